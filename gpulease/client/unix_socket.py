"""Connecting to a Unix socket, and checking which user listens there."""

import os
import socket
import struct
from pathlib import Path

from gpulease.peer_credentials import peer_credentials

_LONGEST_ADDRESS = 107
"""Bytes of a socket's path that the kernel takes, see unix(7)."""


def dial(path: Path, within: float | None = None) -> socket.socket:
    """Connect to the Unix socket at `path`, of any length; wait at most `within` seconds.

    Raises:
        OSError: nothing listens there, or there is no permission.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # With a timeout of Python, connect() fails at once while the queue of connections is full;
        # with that of the kernel it waits.
        _limit_sending(link, within or 0.0)
        _connect(link, path)
        _limit_sending(link, 0.0)
        link.settimeout(within)
    except BaseException:
        link.close()
        raise
    return link


def _limit_sending(link: socket.socket, seconds: float) -> None:
    whole, part = divmod(seconds, 1)
    value = struct.pack("ll", int(whole), int(part * 1_000_000))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _connect(link: socket.socket, path: Path) -> None:
    address = os.fsencode(path)
    if len(address) <= _LONGEST_ADDRESS:
        link.connect(address)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.connect(os.fsencode(f"/proc/self/fd/{folder}/{path.name}"))
    finally:
        os.close(folder)


def peer_uid(link: socket.socket) -> int:
    """Return the user that the kernel names at the other end of `link`."""
    return peer_credentials(link).uid


def trusted_users() -> frozenset[int]:
    """Return the users that may see the environment of the caller's jobs: root and the caller."""
    return frozenset({0, os.geteuid()})


def answers(path: Path) -> bool:
    """Tell whether a daemon of root or of the caller listens at `path`."""
    return _listener(path) in trusted_users()


def stranger_on(path: Path) -> int | None:
    """Return the user that listens at `path`, if that is neither root nor the caller."""
    found = _listener(path)
    return None if found in trusted_users() else found


def _listener(path: Path) -> int | None:
    try:
        with dial(path, 5.0) as link:
            return peer_uid(link)
    except OSError:
        return None
