"""The typed client of the daemon's API. Other packages import from here."""

from gpulease.client.client import Client
from gpulease.client.discovery import find, has_daemon, machine_daemon, no_daemon_on
from gpulease.client.errors import NotTrusted
from gpulease.client.transport import decode, encode, indent
from gpulease.client.unix_socket import answers, dial, peer_uid, trusted_users

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
