"""Notifications of users: stored with what they are about, and sent later.

`notify_owners` runs in the transaction in which a job changes. So each message is stored once,
whatever happens to the daemon. What is long or may still change is added when a message is sent.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import datetime

from gpulease.domain.dependencies import has_failed
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job, one_line
from gpulease.domain.lease import State
from gpulease.domain.notifications import (
    Message,
    NotifyEvent,
    about_array,
    first_of_array,
    last_lines,
    memory_use,
    message_on,
    message_on_time,
    time_is_short,
    time_is_short_from,
)
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, InThread, Store, Transaction
from gpulease.units import format_size


def notify_owners(tx: Transaction, changed: Iterable[tuple[Job | None, Job]]) -> None:
    """Store the messages about changes of jobs, each before and after one."""
    summed_up: set[JobId] = set()
    for before, after in changed:
        message, at = message_on(before, after), _changed_at(after)
        array = None if after.queue.array is None else after.queue.array.job
        if message is None:
            continue
        if array is None:
            tx.add_messages([(message, at)])
            continue
        if message.event is not NotifyEvent.END:
            add_once(tx, after, message, at)
        asks = after.state is State.ENDED and NotifyEvent.END in after.notify
        if asks and array not in summed_up and not tx.live_elements(array):
            summed_up.add(array)
            tx.add_messages([(about_array(after, *tx.array_result(array)), at)])


def _changed_at(job: Job) -> datetime:
    return job.ended_at or job.started_at or job.submitted_at


def add_once(
    tx: Transaction, job: Job, message: Message, at: datetime, since: datetime | None = None
) -> None:
    """Store a message, unless there was one about the same event of the job (since then).

    Of an array, the first element alone has one.
    """
    array = job.queue.array
    if not tx.has_message(job, message.event, since if array is None else None):
        message = message if array is None else first_of_array(message, array.job)
        tx.add_messages([(message, at)])


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
        used = memory_use(job, self._smallest_lease())
        facts = [f"{name + ':':<11}{text}" for name, text in self._facts(job)]
        lines = [*([used] if used else []), "", *facts]
        if has_failed(job) and job.has_shim and job.started_at is not None:
            output = last_lines(await self._read_log_tail(job.id))
            lines += ["", "The end of its output:"] if output else [""]
            lines += [f"  {each}" for each in output]
            lines.append(f"gpulease logs {job.label} shows its output.")
        return "\n".join(lines), has_failed(job)

    def _facts(self, job: Job) -> Iterator[tuple[str, str]]:
        if job.holder is None:
            yield "command", one_line(job.command)
        known = self._readings()
        for lease in job.leases:
            yield "GPU", f"{_name_of(lease.gpu, known.get(lease.gpu))}, {format_size(lease.memory)}"
        yield "submitted", _clock(job.submitted_at)
        if job.started_at is not None:
            yield "started", _clock(job.started_at)
        if job.ended_at is not None:
            yield "ended", _clock(job.ended_at)


def _clock(at: datetime) -> str:
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def _name_of(uuid: GpuUuid, reading: GpuReading | None) -> str:
    return uuid if reading is None else f"{reading.label} ({reading.name})"


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
