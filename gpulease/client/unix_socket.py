"""Connecting to a Unix socket, and checking which user listens there."""

from __future__ import annotations

import os
import struct
from _socket import AF_UNIX, SO_SNDTIMEO, SOCK_STREAM, SOL_SOCKET

from gpulease.peer_credentials import peer_credentials

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from socket import socket
    from typing import Self
else:
    # The module `socket` makes enumerations of all constants, 9 ms where Python starts in 16:
    # `status` would take 2.6 times as long as Python, in place of 1.8.
    from _socket import socket

_LONGEST_ADDRESS = 107
"""Bytes of a socket's path that the kernel takes, see unix(7)."""


class Link(socket):
    """A connected socket; `with` closes it. It has no makefile()."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def dial(path: Path | str, within: float | None = None) -> Link:
    """Connect to the Unix socket at `path`, of any length; wait at most `within` seconds.

    Raises:
        OSError: nothing listens there, or there is no permission.
    """
    link = Link(AF_UNIX, SOCK_STREAM)
    try:
        # With a timeout of Python, connect() fails at once while the queue of connections is full;
        # with that of the kernel it waits.
        _limit_sending(link, within or 0.0)
        _connect(link, os.fsencode(path))
        _limit_sending(link, 0.0)
        link.settimeout(within)
    except BaseException:
        link.close()
        raise
    return link


def _limit_sending(link: Link, seconds: float) -> None:
    whole, part = divmod(seconds, 1)
    value = struct.pack("ll", int(whole), int(part * 1_000_000))
    link.setsockopt(SOL_SOCKET, SO_SNDTIMEO, value)


def _connect(link: Link, address: bytes) -> None:
    if len(address) <= _LONGEST_ADDRESS:
        link.connect(address)
        return
    parent, name = os.path.split(address)
    folder = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.connect(b"/proc/self/fd/%d/%b" % (folder, name))
    finally:
        os.close(folder)


def peer_uid(link: Link) -> int:
    """Return the user that the kernel names at the other end of `link`."""
    return peer_credentials(link).uid


def trusted_users() -> frozenset[int]:
    """Return the users that may see the environment of the caller's jobs: root and the caller."""
    return frozenset({0, os.geteuid()})


def answers(path: Path | str) -> bool:
    """Tell whether a daemon of root or of the caller listens at `path`."""
    return _listener(path) in trusted_users()


def stranger_on(path: Path | str) -> int | None:
    """Return the user that listens at `path`, if that is neither root nor the caller."""
    found = _listener(path)
    return None if found in trusted_users() else found


def _listener(path: Path | str) -> int | None:
    try:
        with dial(path, 5.0) as link:
            return peer_uid(link)
    except OSError:
        return None
