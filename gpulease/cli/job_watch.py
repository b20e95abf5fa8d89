"""Watch a job until it has started or ended, and show on standard error why it waits.

The daemon may stop and start meanwhile: the job is in its database.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from threading import Lock

from gpulease.cli.render import (
    local_time,
    print_stderr,
    screen_of,
    shown,
    terminal_width,
    write_stderr,
)
from gpulease.cli.signals import name_of
from gpulease.errors import GpuleaseError, NoDaemon, TooMany
from gpulease.locations import environment
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from datetime import datetime
    from threading import Timer

    from gpulease.cli.signals import Signals
    from gpulease.client.light_client import LightClient
    from gpulease.client.submission import Submission
    from gpulease.wire.jobs import JobView


_POLL_EVERY = 10.0
"""Seconds between requests for a job that cannot be followed live, as many others are."""
RECONNECT_EVERY = 2.0
"""Seconds between attempts to reach a daemon that stopped."""
HAS_A_WORKER = ("active", "releasing", "ended")


class JobWatch:
    """A command that waits for jobs: for their daemon, with its signals and its standard error."""

    def __init__(self, client: LightClient, signals: Signals, stderr: StderrStatus) -> None:
        self.client = client
        self.signals = signals
        self.stderr = stderr

    def wait_for_start(
        self, job: JobView, submission: Submission | None = None, keys: str = ""
    ) -> JobView:
        """Return the job once it has a worker or has ended; show its place in the queue meanwhile.

        `submission` is what has just queued the job, and says if it still waits after a moment.
        `keys` says what keys do meanwhile.

        Raises:
            Interrupted: a signal that ends a wait came.
        """
        views = self._changes(job, submission)
        is_news = submission is None
        while job.state not in HAS_A_WORKER:
            if is_news:
                self._show_wait(job, keys)
            job = self.signals.interruptible(next, views, job)
            is_news = True
        self.stderr.line.clear()
        for signum in self.signals.take():
            self.stderr.print(f"gpulease: ignored {name_of(signum)}: the job had not started")
        return job

    def _show_wait(self, job: JobView, keys: str) -> None:
        line, now = self.stderr.line, self.stderr.now
        if line.rewrites:
            from gpulease.cli.messages import waiting_line

            line.show(waiting_line(job, now(), keys), now())
        elif job.state == "queued":
            from gpulease.cli.messages import waiting_text

            blocker = self.signals.interruptible(_blocker, self.client, job)
            line.show(waiting_text(job, blocker, now()), now())
        else:
            # It is granted: a delayed line about its place in the queue is out of date.
            line.clear()

    def wait_for_end(self, job: JobView) -> JobView:
        """Return the job once it has ended.

        Raises:
            Interrupted: a signal that ends a wait came.
        """
        views = self._changes(job)
        while job.state != "ended":
            job = self.signals.interruptible(next, views, job)
        return job

    def _changes(self, job: JobView, submission: Submission | None = None) -> Iterator[JobView]:
        """Yield the job as it changes, also across a restart of the daemon.

        The changes until it has started come from `submission`, if that is given.
        """
        is_away = yield from self._changes_of(submission, job)
        stderr, is_refused = self.stderr, False
        while True:
            try:
                for changed in self.client.watch(job.id):
                    if is_away:
                        stderr.line.clear()
                        now = f"job {id_of(job)} is {changed.state}"
                        stderr.print(f"gpulease: the daemon is back; {now}")
                    is_away = False
                    job = changed
                    yield job
                return
            except TooMany as error:
                if not is_refused:
                    from gpulease.cli.messages import not_followed

                    stderr.line.clear()
                    stderr.print(not_followed(job, error))
                is_refused = True
                yield current(self.client, job)
                time.sleep(_POLL_EVERY)
            except NoDaemon:
                if not is_away:
                    self._say_lost(job)
                is_away = True
                time.sleep(RECONNECT_EVERY)

    def _changes_of(
        self, submission: Submission | None, job: JobView
    ) -> Generator[JobView, None, bool]:
        """Yield what a submission says about its job; return whether the daemon stopped."""
        try:
            if submission is not None:
                yield from submission.changes()
        except NoDaemon:
            self._say_lost(job)
            time.sleep(RECONNECT_EVERY)
            return True
        return False

    def _say_lost(self, job: JobView) -> None:
        self.stderr.line.clear()
        kept = f"job {id_of(job)} keeps its place in the queue"
        self.stderr.print(f"gpulease: lost connection to the daemon; {kept}")


def current(client: LightClient, job: JobView) -> JobView:
    """Return the job as it is now, or unchanged if no daemon answers."""
    try:
        return client.job(job.id)
    except (NoDaemon, TooMany):
        return job


def _blocker(client: LightClient, job: JobView) -> JobView | None:
    """Return the job whose end makes room for another one, if it is known which."""
    after = None if job.expected_start is None else job.expected_start.after
    if after is None and len(job.waits_for) == 1:
        after = job.waits_for[0]
    try:
        return None if after is None else client.job(after)
    except GpuleaseError:
        return None  # it has ended, or the daemon is away


def id_of(job: JobView) -> str:
    """Return the number of a job as people see it."""
    return job.label or str(job.id)


LINE_EVERY_S = 30.0
"""Between lines that cannot be rewritten, as in the log of a batch system."""
_ERASE = "\r\x1b[2K"


class WaitingLine:
    """The line on stderr; `width` is None if it cannot be rewritten.

    Nothing is shown for the first `delay` seconds: most jobs start at once.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        width: Callable[[], int] | None,
        delay: float,
    ) -> None:
        self._write = write
        self._width = width
        self._delay: float | None = delay
        self._timer: Timer | None = None
        self._lock = Lock()
        self._text = ""
        self._shown: str | None = None
        self._shown_at: datetime | None = None

    @property
    def rewrites(self) -> bool:
        """Whether the line disappears when the job starts."""
        return self._width is not None

    def show(self, text: str, now: datetime) -> None:
        """Show `text`, unless it is shown already or the last line is too recent.

        A terminal gets as much of it as fits.
        """
        from threading import Timer

        with self._lock:
            self._text = text
            if self._delay is None:
                self._show(now)
            elif self._timer is None:
                self._timer = Timer(self._delay, self._show_first, (now,))
                self._timer.daemon = True
                self._timer.start()

    def say(self, text: str) -> None:
        """Print a line that stays, on a terminal only."""
        if self.rewrites:
            self._write(f"{_ERASE}{text}\n")

    def clear(self) -> None:
        """Erase the line, and show nothing until the next `show`."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._width is not None and self._shown is not None:
                self._write(_ERASE)
            self._shown = None
            self._text = ""

    def _show_first(self, now: datetime) -> None:
        with self._lock:
            self._delay = None
            if self._text:
                self._show(now)

    def _show(self, now: datetime) -> None:
        before = self._shown_at
        is_due = before is None or (now - before).total_seconds() >= LINE_EVERY_S
        if self._width is not None:
            from gpulease.drawing.words import shorten

            self._write(_ERASE + shorten(self._text, self._width() - 1))
        elif self._text != self._shown and is_due:
            self._write(self._text + "\n")
        else:
            return
        self._shown, self._shown_at = self._text, now


@record(frozen=True)
class StderrStatus:
    """What the command prints about a job on standard error, and the time there."""

    print: Callable[[str], None]
    line: WaitingLine
    now: Callable[[], datetime]


def stderr_status(delay: float = 0.5, *, quiet: bool = False) -> StderrStatus:
    """Return the status on standard error, in local time; a terminal gets a line that changes.

    The line is shown after `delay` seconds: most jobs start at once. With `quiet` there is none.
    """
    screen = screen_of(sys.stderr, environment())
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    rewrites = is_terminal and not quiet and environment().get("TERM", "dumb") != "dumb"

    def write(text: str) -> None:
        if not quiet:
            write_stderr(shown(text, screen))

    return StderrStatus(
        print=print_stderr,
        line=WaitingLine(write, partial(terminal_width, 2) if rewrites else None, delay),
        now=local_time,
    )
