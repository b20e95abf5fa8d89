"""Messages that no change of a job is: of time limits, weeks, to admins; what is added to others.

Admins are notified when a GPU is drained or resumed, when the daemon logs an error or cannot write
its database, and when it starts after a crash.
"""

import asyncio
import logging
import pwd
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from gpulease.domain.eligibility import has_failed
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.health import GpuAvailability
from gpulease.domain.job import Job, UsageBy, UsageTotal, one_line
from gpulease.domain.lease import State
from gpulease.domain.memory_estimate import size_next_time
from gpulease.domain.notifications import (
    LONGEST_BODY,
    Message,
    NotifyEvent,
    about_gpu,
    about_week,
    message_on_time,
    time_is_short,
    time_is_short_from,
)
from gpulease.errors import RecordUnwritable
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, InThread, Store, Transaction
from gpulease.service.transactions import add_once
from gpulease.units import format_size
from gpulease.wire.text import terminal_lines

_log = logging.getLogger(__name__)

_LINES_SHOWN = 20
_MOST_SHOWN = 2000
"""Lines and characters of a failed job's output: chat services cut longer messages."""
_OF_THE_DISK = "gpulease.daemon.worker_threads"
"""Logs as warnings that the database cannot be written: that may pass, but no job starts."""
_MOST_TROUBLES = 20
_TRY_AGAIN_S = 5.0
_WEEK = timedelta(days=7)


class JobDetails:
    """What a message about the end of a job says besides: its use, command, times and output."""

    def __init__(
        self,
        store: Store,
        smallest_lease: Callable[[], int],
        readings: Callable[[], Mapping[GpuUuid, GpuReading]],
        read_log_tail: Callable[[JobId], Awaitable[str]],
    ) -> None:
        self._store = store
        self._smallest_lease = smallest_lease
        self._readings = readings
        self._read_log_tail = read_log_tail

    async def of(self, message: Message) -> tuple[str, bool] | None:
        """Return the text, and whether the job has failed; None for other messages."""
        job = None if message.job is None else self._store.job(message.job)
        is_end = message.event in (NotifyEvent.END, NotifyEvent.FAIL, NotifyEvent.OOM)
        is_summary = job is not None and job.queue.array and message.event is NotifyEvent.END
        if job is None or job.state is not State.ENDED or not is_end or is_summary:
            return None
        lines = []
        if has_failed(job) and job.has_shim and job.started_at is not None:
            output = last_lines(await self._read_log_tail(job.id))
            lines += ["", "The end of its output:"] if output else []
            lines += [f"  {each}" for each in output]
        facts = [f"{name + ':':<11}{text}" for name, text in self._facts(job)]
        used = memory_use(job, self._smallest_lease())
        lines += ["", *facts, *(["", used] if used else [])]
        if job.has_shim and job.started_at is not None:
            lines += [*([] if used else [""]), f"gpulease logs {job.label} shows its output."]
        return "\n".join(lines), has_failed(job)

    def _facts(self, job: Job) -> Iterator[tuple[str, str]]:
        if job.holder is None:
            yield "command", one_line(job.command)
        known = self._readings()
        for lease in job.leases:
            reading = known.get(lease.gpu)
            name = lease.gpu if reading is None else f"{reading.label} ({reading.name})"
            yield "GPU", f"{name}, {lease.size}"
        yield "submitted", _clock(job.submitted_at)
        if job.started_at is not None:
            yield "started", _clock(job.started_at)
        if job.ended_at is not None:
            yield "ended", _clock(job.ended_at)


def _clock(at: datetime) -> str:
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def memory_use(job: Job, smallest: int) -> str | None:
    """Return the peak of an ended job against its lease, and the size to ask for next time.

    `smallest` is the smallest lease, in bytes.
    """
    used = [(lease.used, lease.size) for lease in job.leases if lease.used is not None]
    if not used:
        return None
    peak, memory = max(used)
    text = f"It used {format_size(peak)} at most, of a lease of {memory}"
    size = size_next_time(job, smallest)
    return f"{text}." if size is None else f"{text}; next time --mem {format_size(size)}."


def last_lines(output: str) -> Sequence[str]:
    """Return the last lines of an output, as a terminal would show them, without empty ones."""
    shown = [each for each in terminal_lines(output) if each.strip()][-_LINES_SHOWN:]
    while shown and sum(len(each) + 1 for each in shown) > _MOST_SHOWN:
        shown = shown[1:] if len(shown) > 1 else [shown[0][-_MOST_SHOWN + 1 :]]
    return shown


class TimeLeftWatch:
    """Notifies owners of jobs when the time limit is near, at observations of the GPUs."""

    def __init__(self, store: Store, clock: Clock, in_writer: InThread) -> None:
        self._store = store
        self._clock = clock
        self._in_writer = in_writer
        self._notified: set[tuple[JobId, datetime | None]] = set()
        """Each job with the end of its time, which its owner may extend."""

    async def observe(self, _: Observation) -> None:
        """Store the messages that are due.

        Raises:
            RecordUnwritable: they cannot be stored now; the next call tries again.
        """
        now = self._clock.now()
        running = [job for job in self._store.holding() if job.notify]
        self._notified &= {(job.id, job.expires_at) for job in running}
        short = [job for job in running if time_is_short(job, now)]
        due = [job for job in short if (job.id, job.expires_at) not in self._notified]
        if due:
            await self._in_writer(lambda: self._notify(due, now))
            self._notified |= {(job.id, job.expires_at) for job in due}

    def _notify(self, due: Iterable[Job], now: datetime) -> None:
        with self._store.write() as tx:
            for job in due:
                add_once(tx, job, message_on_time(job, now), now, time_is_short_from(job))


class AdminNotices:
    """Stores messages to the admins of the settings."""

    def __init__(
        self, store: Store, clock: Clock, in_writer: InThread, settings: Mapping[str, Any]
    ) -> None:
        self._store = store
        self._clock = clock
        self._in_writer = in_writer
        self._troubles: deque[str] = deque(maxlen=_MOST_TROUBLES)
        self._has_troubles = asyncio.Event()
        self.adopt(settings)

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Use these settings from now on."""
        self._uids = tuple(_uids(settings.get("admins", ())))

    def of_gpu(
        self, tx: Transaction, label: str, before: GpuAvailability, after: GpuAvailability
    ) -> None:
        """Store messages if a GPU was drained or resumed."""
        now = self._clock.now()
        found = [about_gpu(uid, label, before, after) for uid in self._uids]
        tx.add_messages([(message, now) for message in found if message is not None])

    def of_trouble(self, what: str) -> None:
        """Store messages as soon as the database can be written."""
        if self._uids:
            self._troubles.append(what)
            self._has_troubles.set()

    async def run(self) -> None:
        """Store the messages about troubles, without end."""

        def add(what: str) -> None:
            now = self._clock.now()
            with self._store.write() as tx:
                tx.add_messages([(about_trouble(uid, what), now) for uid in self._uids])

        while True:
            await self._has_troubles.wait()
            self._has_troubles.clear()
            while self._troubles:
                try:
                    await self._in_writer(partial(add, self._troubles[0]))
                    self._troubles.popleft()
                except RecordUnwritable:
                    await asyncio.sleep(_TRY_AGAIN_S)


class WeeklyReports:
    """Stores a message to each user about memory that was leased and not used, once a week."""

    def __init__(
        self,
        store: Store,
        totals: Callable[[UsageBy, None, datetime, datetime], Sequence[UsageTotal]],
        clock: Clock,
        in_writer: InThread,
        settings: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`settings` returns [notify] of the daemon."""
        self._store = store
        self._totals = totals
        self._clock = clock
        self._in_writer = in_writer
        self._settings = settings

    async def daily(self) -> None:
        """Store the messages if this is the day of [notify] weekly_report.

        Raises:
            RecordUnwritable: there are none this week.
        """
        now = self._clock.now()
        if now.astimezone().strftime("%a").lower() == self._settings().get("weekly_report"):
            await self._in_writer(partial(self._add, now))

    def _add(self, now: datetime) -> None:
        messages = []
        for total in self._totals(UsageBy.USER, None, now - _WEEK, now):
            with suppress(KeyError):  # the account was removed
                messages.append(about_week(pwd.getpwnam(total.key).pw_uid, total))
        with self._store.write() as tx:
            tx.add_messages([(each, now) for each in messages if each is not None])


def _uids(names: tuple[str, ...]) -> Iterator[int]:
    for name in names:
        try:
            yield pwd.getpwnam(name).pw_uid
        except (KeyError, ValueError):
            _log.warning("the settings: [notify] admins: no user named %r", name)


def about_trouble(uid: int, what: str) -> Message:
    """Return the message to an admin that the daemon is in trouble."""
    title, _, rest = what.partition("\n")
    body = f"{rest}\ngpulease doctor and the log of the daemon show more.".strip()
    return Message(uid, NotifyEvent.TROUBLE, one_line(title), body[-LONGEST_BODY:])


class TroubleLog(logging.Handler):
    """Passes on what the daemon logs about troubles, from any thread."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify = notify
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.name == _OF_THE_DISK:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._notify, record.getMessage())
