"""Asks the daemon, in a thread: the screen reacts to keys while the daemon does not answer.

One thread makes all requests, one after the other: what the user asks for, and looks at the
machine, every few seconds and at once after each change.
"""

import re
import time
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

from gpulease.client import Client
from gpulease.client.transport import Reply
from gpulease.drawing.words import clean
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.wire.frames import FrameKind
from gpulease.wire.history import JobMemoryView
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import StatusView

FIRST_WAITING = 60
"""Waiting jobs that are asked for while no more of them can be on the screen."""
MOST_WAITING = 1000
"""Waiting jobs that are asked for at most; the daemon counts the others."""
ANSWER_WITHIN_S = 10.0
"""Timeout of a request."""
_CHART_EVERY_S = 10.0
_POINTS = 200
"""Of a chart."""


@dataclass(frozen=True)
class Look:
    """What one look at the daemon has shown."""

    at: float
    """Seconds since the epoch."""
    status: StatusView | None
    """None: the daemon did not answer, or refused."""
    job: JobView | None = None
    """The job that is open."""
    memory: JobMemoryView | None = None
    """Its memory over time, where it was asked for."""
    error: GpuleaseError | None = None


Call = Callable[[Client], object]
Then = Callable[[object, GpuleaseError | None], None]


class Poller:
    """Looks at a daemon from its thread, and passes each look to `seen`."""

    def __init__(self, client: Client, every: float, seen: Callable[[Look], None]) -> None:
        self._client = client.within(ANSWER_WITHIN_S)
        self._every = every
        self._seen = seen
        self._calls: SimpleQueue[tuple[Call, Then] | None] = SimpleQueue()
        self._job: int | None = None
        self._waiting = FIRST_WAITING
        self._charted_at = 0.0
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="poll", daemon=True)

    def start(self) -> None:
        """Begin with a look at once."""
        self._thread.start()

    def stop(self) -> None:
        """End after the present request."""
        self._stopping.set()
        self.look()

    def look(self) -> None:
        """Look at once."""
        self._calls.put(None)

    def want(self, *, all_waiting: bool) -> None:
        """Ask for the first jobs of the queue from now on, or for all."""
        before, self._waiting = self._waiting, MOST_WAITING if all_waiting else FIRST_WAITING
        if self._waiting > before:
            self.look()

    def open(self, job: int | None) -> None:
        """Look at this job as well, from now on."""
        self._job, self._charted_at = job, 0.0
        self.look()

    def ask(self, call: Call, then: Then) -> None:
        """Make a request, pass on its result or its error, and look at once."""
        self._calls.put((call, then))

    def _run(self) -> None:
        due = 0.0
        while not self._stopping.is_set():
            try:
                asked = self._calls.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                asked = None
            if asked is not None:
                self._answer(*asked)
            if self._calls.empty() and not self._stopping.is_set():
                due = time.monotonic() + self._every
                self._seen(self._look())

    def _answer(self, call: Call, then: Then) -> None:
        try:
            then(call(self._client), None)
        except GpuleaseError as error:
            then(None, error)

    def _look(self) -> Look:
        now = time.time()
        try:
            status = self._client.status(self._waiting)
        except GpuleaseError as error:
            return Look(now, None, error=error)
        number = self._job
        if number is None:
            return Look(now, status)
        try:
            return Look(now, status, self._client.job(number), self._memory(number))
        except GpuleaseError as error:
            return Look(now, status, error=error)

    def _memory(self, job: int) -> JobMemoryView | None:
        if time.monotonic() - self._charted_at < _CHART_EVERY_S:
            return None
        self._charted_at = time.monotonic()
        return self._client.job_memory(job, points=_POINTS)


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
