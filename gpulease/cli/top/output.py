"""The output of an open job: the last lines, followed live, without control characters."""

import re
from codecs import getincrementaldecoder
from collections import deque
from threading import Event, Lock, Thread

from gpulease.client import Client
from gpulease.client.transport import Reply
from gpulease.drawing.words import clean
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.wire.frames import FrameKind

MOST_LINES = 1000
TAIL = 200
"""Lines of each stream from before the job was opened."""
_LONGEST_LINE = 2000
_AGAIN_AFTER_S = 2.0
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*.?)")


class OutputText:
    """The last lines of an output. Pure."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._rests: dict[FrameKind, str] = {}
        """The last line of each stream, which is incomplete."""
        self._decoders = {
            kind: getincrementaldecoder("utf-8")("replace")
            for kind in (FrameKind.STDOUT, FrameKind.STDERR)
        }

    def feed(self, kind: FrameKind, piece: bytes) -> None:
        """Take in a piece of one stream."""
        text = self._rests.pop(kind, "") + self._decoders[kind].decode(piece)
        *complete, rest = text.split("\n")
        self._lines.extend(_readable(line) for line in complete)
        # A progress bar rewrites one line.
        self._rests[kind] = rest[max(rest.rfind("\r", 0, -1), 0) :][-_LONGEST_LINE:]

    def lines(self) -> list[str]:
        """Return the lines, oldest first; what has no end yet comes last."""
        return [*self._lines, *(_readable(rest) for rest in self._rests.values() if rest.strip())]


def _readable(line: str) -> str:
    """Return what a line shows in the end: without escapes, and overwritten text."""
    plain = _ESCAPES.sub("", line.rstrip("\r")).expandtabs()
    return clean(plain[plain.rfind("\r") + 1 :][:_LONGEST_LINE])


class OutputFollower:
    """Follows the output of a job in a thread, until it is stopped."""

    def __init__(self, client: Client, job: int) -> None:
        self._client = client
        self._job = job
        self._text = OutputText()
        self._lock = Lock()
        self._has_news = False
        self._reply: Reply | None = None
        self._stopping = Event()
        Thread(target=self._run, name="output", daemon=True).start()

    def news(self) -> list[str] | None:
        """Return the last lines; None if nothing was written since the last call."""
        with self._lock:
            has_news, self._has_news = self._has_news, False
            return self._text.lines() if has_news else None

    def stop(self) -> None:
        """Close the connection to the daemon."""
        with self._lock:
            self._stopping.set()
            if self._reply is not None:
                self._reply.interrupt()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except NoDaemon:
                self._stopping.wait(_AGAIN_AFTER_S)
            except GpuleaseError as error:
                self._take(FrameKind.STDERR, f"{error.message}\n".encode())
                return
            else:
                return

    def _follow(self) -> None:
        with self._lock:
            self._text = OutputText()
        pieces = self._client.logs(self._job, tail=TAIL, follow=True, opened=self._opened)
        for kind, piece in pieces:
            self._take(kind, piece)

    def _opened(self, reply: Reply) -> None:
        with self._lock:
            self._reply = reply
            if self._stopping.is_set():
                reply.interrupt()

    def _take(self, kind: FrameKind, piece: bytes) -> None:
        with self._lock:
            self._text.feed(kind, piece)
            self._has_news = True
