"""The daemon's door: its socket, where callers look for it for as long as the daemon lives.

A socket can be taken away under a daemon: logind removes /run/user/UID when its user has logged
out, and anybody may tidy up too much. Nobody finds the daemon then, and no other may take its
place.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpulease.daemon.listen import listen
from gpulease.errors import BadConfiguration
from gpulease.service.complaints import Complaints

_log = logging.getLogger("gpuleased")


class Door:
    """The listening socket at one path, laid anew when it is gone."""

    def __init__(
        self, path: Path, *, to_all: bool, move: Callable[[socket.socket], Awaitable[None]]
    ) -> None:
        """`move` makes a new listening socket the one that is served."""
        self._path = path
        self._to_all = to_all
        self._move = move
        self._laid: tuple[int, int] | None = None
        self._complaints = Complaints(_log)

    def open(self) -> socket.socket:
        """Return the socket to listen on.

        Raises:
            BadConfiguration: the path cannot be used, or another daemon listens there.
        """
        listening = listen(self._path, to_all=self._to_all)
        self._laid = self._found()
        return listening

    async def look(self) -> None:
        """Lay the socket anew if it is gone or is another file; why it cannot be is told once."""
        if self._is_ours():
            return
        try:
            listening = self.open()
        except BadConfiguration as error:
            self._complaints.say(
                "socket", f"the socket has gone, and {error.message}; trying again"
            )
            return
        self._complaints.passed("socket")
        await self._move(listening)
        _log.warning("the socket had gone; listening anew on %s", self._path)

    def close(self) -> None:
        """Take the socket away, unless what lies there is not ours."""
        if self._is_ours():
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _is_ours(self) -> bool:
        return self._laid is not None and self._found() == self._laid

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino
