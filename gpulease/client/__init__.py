"""The typed client of the daemon's API; its face, through which everyone else imports it."""

from gpulease.client.api import Client
from gpulease.client.dial import answers, dial, peer_uid, trusted_users
from gpulease.client.failures import NotTrusted
from gpulease.client.find import find, no_daemon_on
from gpulease.client.machine import has_daemon, machine_daemon
from gpulease.client.shapes import decode, encode, indent

__all__ = [
    "Client",
    "NotTrusted",
    "answers",
    "decode",
    "dial",
    "encode",
    "find",
    "has_daemon",
    "indent",
    "machine_daemon",
    "no_daemon_on",
    "peer_uid",
    "trusted_users",
]
