"""What `run` says while its job waits: one line, rewritten where a terminal can."""

import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from gpulease.cli.text import clean, clock, ordinal, sentence, shorten
from gpulease.wire import JobView

SPEAKS_EVERY = timedelta(seconds=30)
"""Where lines cannot be rewritten, as in the log of a batch system."""
_ERASE = "\r\x1b[2K"


def waiting_text(job: JobView, blockers: Sequence[JobView], now: datetime) -> str:
    """Say where a job stands in the line, why, and for whom."""
    if job.state != "queued":
        return f"gpulease: job {job.id} starts"
    place = f", {ordinal(job.position)} in line" if job.position else ""
    return f"gpulease: job {job.id} waits{place}{_why(job, blockers, now)}"


def _why(job: JobView, blockers: Sequence[JobView], now: datetime) -> str:
    """Say the daemon's reason; where we know more of the jobs it names, with that."""
    what, names_them, _ = (job.reason or "").partition(" before ")
    if names_them and blockers:
        parts = [_blocker(blocker, now, " ({} at the latest)") for blocker in blockers]
        others = len(job.waits_for) - len(parts)
        parts += ["another" if others == 1 else f"one of {others} more"] if others else []
        return f": {clean(what)} before {' or '.join(parts)} ends{_brackets(_start(job, now))}"
    why = f": {sentence(job.reason)}" if job.reason else ""
    parts = [_blocker(blocker, now, ", ends {}") for blocker in blockers]
    return why + _brackets([*_for_whom(job, parts), *_start(job, now)])


def _for_whom(job: JobView, parts: list[str]) -> list[str]:
    if more := len(job.waits_for) - len(parts):
        parts = [*parts, f"{more} more" if parts else "jobs " + ", ".join(map(str, job.waits_for))]
    return [f"waits for {' and '.join(parts)}"] if parts else []


def _start(job: JobView, now: datetime) -> list[str]:
    at = job.expected_start_at
    return [f"expected to start by {clock(at, now)}"] if at else []


def _brackets(said: list[str]) -> str:
    return f" ({'; '.join(said)})" if said else ""


def _blocker(job: JobView, now: datetime, ends_as: str) -> str:
    ends = ends_as.format(f"by {clock(job.expires_at, now)}") if job.expires_at else ""
    return f"job {job.id} of {clean(job.user)}{ends}"


class WaitingLine:
    """The line on stderr; `width` is None where it cannot be rewritten.

    It keeps quiet for the first `patience` seconds: most jobs start at once.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        width: Callable[[], int] | None,
        patience: float = 0.5,
    ) -> None:
        self._write = write
        self._width = width
        self._patience: float | None = patience
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._text = ""
        self._shown: str | None = None
        self._shown_at: datetime | None = None

    @property
    def rewrites(self) -> bool:
        """Whether what is shown is gone when the job starts."""
        return self._width is not None

    def show(self, text: str, now: datetime) -> None:
        """Say `text`, unless it has been said, or something was only just now."""
        with self._lock:
            self._text = text
            if self._patience is None:
                self._show(now)
            elif self._timer is None:
                self._timer = threading.Timer(self._patience, self._lose_patience, (now,))
                self._timer.daemon = True
                self._timer.start()

    def clear(self) -> None:
        """Leave the terminal as it was found, and say nothing more until the next `show`."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._width is not None and self._shown is not None:
                self._write(_ERASE)
            self._shown = None
            self._text = ""

    def _lose_patience(self, now: datetime) -> None:
        with self._lock:
            self._patience = None
            if self._text:
                self._show(now)

    def _show(self, now: datetime) -> None:
        if self._width is not None:
            self._write(_ERASE + shorten(self._text, self._width() - 1))
        elif self._text != self._shown and self._may_speak(now):
            self._write(self._text + "\n")
        else:
            return
        self._shown, self._shown_at = self._text, now

    def _may_speak(self, now: datetime) -> bool:
        return self._shown_at is None or now - self._shown_at >= SPEAKS_EVERY
