"""The typed client of the daemon's API; its face, through which everyone else imports it."""

from gpulease.client.api import Client
from gpulease.client.dial import answers, dial, peer_uid
from gpulease.client.shapes import decode, encode, indent

__all__ = ["Client", "answers", "decode", "dial", "encode", "indent", "peer_uid"]
