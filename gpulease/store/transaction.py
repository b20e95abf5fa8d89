"""The write transaction: jobs in and out, as the use cases need them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select

from gpulease.domain.array_values import Grid, suffix_of
from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.enforcement import Reports
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.health import GpuAvailability, GpuEvent
from gpulease.domain.job import CommandFingerprint, Invocation, Job, aging, with_over_for
from gpulease.domain.lease import State
from gpulease.domain.memory_estimate import PastRun
from gpulease.domain.notifications import Message
from gpulease.domain.queue_options import ArrayElement, Indices, QueuePause
from gpulease.errors import NoSuchJob
from gpulease.service.ports import Event, PastJob, Submission, UserCount
from gpulease.store import machine, statements
from gpulease.store.live_state import LiveState
from gpulease.store.rows import (
    PAST,
    holder_values,
    instant,
    invocation_key,
    job_values,
    lease_values,
    message_values,
    pack,
    pack_past,
    unpack,
)
from gpulease.store.statements import jobs_with, replace_reports, runs_like
from gpulease.store.tables import JobRow
from gpulease.store.writer import Writer
from gpulease.units import KIB
from gpulease.wire.text import LONGEST_NAME

_KEPT_INVOCATION = 16 * KIB
"""Larger ones are read from the disk at the start of their jobs."""
_AGING = statements.change_job(("aging_since_at",))


class SqlTransaction:
    """Changes that are committed together or not at all."""

    def __init__(self, writer: Writer, state: LiveState, announced: Callable[[], None]) -> None:
        """`announced` is called when a notification is stored, before the commit."""
        self._announced = announced
        self._writer = writer
        self._state = state
        self._ended: list[Job] = []
        self._changed: list[tuple[Job | None, Job]] = []

    def _execute(self, statement: str, values: Mapping[str, object]) -> int | None:
        """Execute a statement, and return the id of the new row."""
        return self._writer.driver.execute(statement, values).lastrowid

    def live(self) -> Sequence[Job]:
        """Return every job that waits or holds memory, by id."""
        return self._state.jobs()

    def dependents(self) -> Sequence[Job]:
        """Return the queued jobs that wait for others, by id."""
        return self._state.dependents()

    def job(self, job: JobId) -> Job | None:
        """Return one job in any state; None if there is none."""
        known = self._state.job(job)
        if known is not None:
            return known
        return next(iter(jobs_with(self._writer.connection, [job])), None)

    def user_count(self, uid: int) -> UserCount:
        """Return the counts of a user, including the changes of this transaction."""
        return self._state.counts.of(uid)

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return why each drained GPU takes no new leases."""
        return self._state.machine.drained()

    def availabilities(self) -> Mapping[GpuUuid, GpuAvailability]:
        """Return the availability of each GPU with a drain, a fault or an accepted fault."""
        return self._state.machine.availabilities

    def set_availability(self, gpu: GpuUuid, availability: GpuAvailability) -> None:
        """Store the availability of a known GPU."""
        machine.set_availability(self._writer.connection, gpu, availability)
        others = {key: each for key, each in self.availabilities().items() if key != gpu}
        this = {} if availability == GpuAvailability() else {gpu: availability}
        self._state.machine = replace(self._state.machine, availabilities={**others, **this})

    def note_gpu(self, event: GpuEvent) -> None:
        """Store a health event of a known GPU."""
        machine.note_event(self._writer.connection, event)

    def pause(self) -> QueuePause | None:
        """Return the pause of the queue; None if it is not paused."""
        return self._state.machine.pause

    def set_pause(self, pause: QueuePause | None) -> None:
        """Store the pause of the queue, or its end."""
        machine.set_pause(self._writer.connection, pause)
        self._state.machine = replace(self._state.machine, pause=pause)

    def windows(self) -> Sequence[Window]:
        """Return the windows, in the order in which they were made."""
        return self._state.machine.windows

    def add_window(self, window: Window) -> Window:
        """Store a new window, and return it with its id."""
        added = machine.add_window(self._writer.connection, window)
        self._state.machine = replace(self._state.machine, windows=(*self.windows(), added))
        return added

    def remove_window(self, window: WindowId) -> None:
        """Remove a window."""
        machine.remove_window(self._writer.connection, window)
        others = tuple(each for each in self.windows() if each.id != window)
        self._state.machine = replace(self._state.machine, windows=others)

    def add_gpus(self, readings: Sequence[GpuReading], at: datetime) -> None:
        """Store GPUs that are not known yet; a lease refers to a known one."""
        known = self._state.machine.gpus
        new = [reading for reading in readings if reading.uuid not in known]
        if new:
            seen = [statements.seen_gpu(reading, at) for reading in new]
            self._writer.connection.execute(statements.REMEMBER_GPU, seen)
            known |= {reading.uuid for reading in new}
            self._state.machine = replace(self._state.machine, gpus=known)

    def job_by_key(self, uid: int, key: str) -> Job | None:
        """Return the job that a user has ordered under this key, whatever its state."""
        which = {"uid": uid, "key": key}
        found = self._writer.driver.execute(statements.FIND_SUBMISSION, which).fetchone()
        return None if found is None else self.job(JobId(found[0]))

    def invocation(self, job: JobId) -> Invocation:
        """Return how a job was started.

        Raises:
            NoSuchJob: it has ended, or never was.
        """
        held = self._state.live_job(job)
        key = job if held is None else invocation_key(held)
        known = self._state.invocation(key)
        if known is not None:
            return known
        found = self._writer.driver.execute(statements.INVOCATION_OF, (key,)).fetchone()
        if found is None or found[0].startswith(PAST):
            raise NoSuchJob(f"cannot start job {job} again: it has ended")
        return unpack(found[0])

    def past_runs(
        self, uid: int, shape: CommandFingerprint, gpus: int, most: int
    ) -> Sequence[PastRun]:
        """Return the latest runs like this one of which the use is known, latest first."""
        return runs_like(self._writer.connection, uid, shape, gpus, most)

    def add(self, order: Submission, at: datetime) -> Job:
        """Store a new job, QUEUED, with its invocation, unless that of its array is stored."""
        job = self._insert(order, at)
        key = invocation_key(job)
        is_new = key == job.id or not self.live_elements(key)
        if is_new and key != job.id:  # that of an array of which all elements had ended
            self._writer.driver.execute(statements.DROP_INVOCATION, (key,))
        size = self._add_invocation(key, order.invocation) if is_new else None
        self._log(job.id, Event(at, "submitted", order.claim.in_full))
        self._state.note(None, job, size)
        return job

    def _insert(self, order: Submission, at: datetime) -> Job:
        number = self._execute(statements.ADD_JOB, job_values(order.queued(JobId(0), at)))
        assert number is not None, "a row was inserted"
        job = order.queued(JobId(number), at)
        if job.holder is not None:
            self._execute(statements.ADD_HOLDER, holder_values(job.id, job.holder))
        if order.key is not None:
            key = {"uid": job.owner.uid, "key": order.key, "job": job.id}
            self._execute(statements.ADD_SUBMISSION, key)
        return job

    def _add_invocation(self, key: JobId, invocation: Invocation) -> int:
        content = pack(invocation)
        self._execute(statements.ADD_INVOCATION, {"job": key, "content": content})
        if len(content) <= _KEPT_INVOCATION:
            self._state.keep_invocation(key, invocation)
        return len(content)

    def add_array(self, order: Submission, indices: Indices, at: datetime) -> Sequence[Job]:
        """Store a new job for each index, QUEUED, with one invocation for all."""
        grid = order.invocation.grid
        names = [_element_name(order.name, grid, index) for index in indices.indices]
        alone = self._insert(replace(order, name=names[0]), at)
        elements = [
            ArrayElement(alone.id, index, indices.most_running) for index in indices.indices
        ]
        jobs = [
            replace(
                alone, id=JobId(alone.id + place), name=name,
                queue=replace(alone.queue, array=element),
            )
            for place, (element, name) in enumerate(zip(elements, names, strict=True))
        ]  # fmt: skip
        self._save(alone, jobs[0])
        elements_but_first = statements.add_elements(alone.id, indices.indices)
        self._writer.connection.execute(elements_but_first)
        if grid:
            named = [{"name": job.name, "this": job.id} for job in jobs]
            self._execute_all(statements.change_job(("name",)), named)
        size = self._add_invocation(alone.id, order.invocation)
        self._log_all(jobs, Event(at, "submitted", order.claim.in_full))
        for job in jobs:
            self._state.note(None, job, size if job.id == alone.id else None)
        return jobs

    def element(self, array: JobId, index: int) -> Job | None:
        """Return the latest job with this index in an array, in any state, or None."""
        this = select(func.max(JobRow.id)).where(JobRow.array == array, JobRow.array_index == index)
        number = self._writer.connection.scalar(this)
        return None if number is None else self.job(JobId(number))

    def live_elements(self, array: JobId) -> int:
        """Return how many elements of an array wait or hold memory."""
        return self._state.counts.users_of(array)

    def failed_element(self, array: JobId) -> Job | None:
        """Return an element that ended without success and is not retried, or None."""
        this = select(JobRow.id).where(statements.failed_element(array)).limit(1)
        number = self._writer.connection.scalar(this)
        return None if number is None else self.job(JobId(number))

    def array_result(self, array: JobId) -> tuple[int, Sequence[str]]:
        """Return how many elements an array has, and the labels of those without success."""
        elements = select(func.count(JobRow.array_index.distinct())).where(JobRow.array == array)
        failed = select(JobRow.array_index).where(statements.failed_element(array))
        indices = self._writer.connection.scalars(failed.order_by(JobRow.array_index))
        labels = [f"{array}_{index}" for index in indices]
        return self._writer.connection.scalar(elements) or 0, labels

    def ended(self) -> Sequence[Job]:
        """Return the jobs that have ended in this transaction."""
        return self._ended

    def changed(self) -> Sequence[tuple[Job | None, Job]]:
        """Return the jobs with notifications before and after each change."""
        return self._changed

    def add_messages(self, messages: Sequence[tuple[Message, datetime]]) -> None:
        """Store notifications that are to be sent, each with its time."""
        self._execute_all(statements.ADD_MESSAGE, [message_values(*each) for each in messages])
        if messages:
            self._announced()

    def has_message(self, job: Job, event: str, since: datetime | None = None) -> bool:
        """Return whether a notification of this event of a job or its array is stored."""
        array, when = job.queue.array, (event, instant(since) or 0)
        if array is None:
            found = self._writer.driver.execute(statements.FIND_MESSAGE, (job.id, *when))
        else:
            which = (array.job, *when, array.job)
            found = self._writer.driver.execute(statements.FIND_MESSAGE_OF_ARRAY, which)
        return found.fetchone() is not None

    def save(self, job: Job, event: Event | None) -> None:
        """Store a job as it is now, and why; None: not worth a line in its history."""
        before = self._state.live_job(job.id)
        if job is not before:
            self._save(before, job)
            self._save_leases(before, job)
        if event is not None:
            self._log(job.id, event)
            self._note_release(before, job, event.at)
        self._note(before, job)
        self._end_invocations([job])

    def _save(self, before: Job | None, job: Job) -> None:
        """Store the columns of a job that have changed; all if `before` is None."""
        values = _changes(before, job)
        if values:
            statement = statements.change_job(tuple(values))
            self._execute(statement, {**values, "this": job.id})

    def save_all(
        self, jobs: Sequence[Job], event: Event, details: Mapping[JobId, str | None] = {}
    ) -> None:
        """Store many queued jobs that changed or ended at once; their leases stay.

        `details` are those of jobs for which that of the event does not apply.
        """
        by_names: dict[tuple[str, ...], list[dict[str, object]]] = {}
        for job in jobs:
            before = self._state.live_job(job.id)
            if values := _changes(before, job):
                by_names.setdefault(tuple(values), []).append({**values, "this": job.id})
            self._note(before, job)
        for names, rows in by_names.items():
            self._execute_all(statements.change_job(names), rows)
        self._log_all(jobs, event, details)
        self._end_invocations(jobs)

    def _note(self, before: Job | None, after: Job) -> None:
        self._state.note(before, after)
        if after.state is State.ENDED:
            self._ended.append(after)
        if after.notify:
            self._changed.append((before, after))

    def _end_invocations(self, jobs: Sequence[Job]) -> None:
        """Delete the environments of the invocations that only ended ones of `jobs` have used."""
        ended = {invocation_key(job): job for job in jobs if job.state is State.ENDED}
        rows = []
        for key, job in ended.items():
            if job.queue.array is not None and self.live_elements(key):
                continue
            invocation = self._state.invocation(key)
            if invocation is None:
                found = self._writer.driver.execute(statements.INVOCATION_OF, (key,)).fetchone()
                invocation = None if found is None else unpack(found[0])
            if invocation is not None:
                rows.append({"this": key, "content": pack_past(invocation)})
        self._execute_all(statements.END_INVOCATION, rows)

    def _note_release(self, before: Job | None, job: Job, at: datetime) -> None:
        if before is None or not before.holds_memory or job.holds_memory:
            return
        held = job if job.leases else before
        past = PastJob.of(held, job.outcome, job.ended_at or at)
        if past is not None:
            self._state.keep_released(past)

    def note(self, job: JobId, event: Event) -> None:
        """Add to the history of a job that stays as it is; it may have ended."""
        self._log(job, event)

    def save_hooks(self, job: JobId, reports: Reports) -> None:
        """Store the reports of the hooks of a job in place of its former ones."""
        replace_reports(self._writer.connection, job, reports)

    def note_over(self, job: JobId, gpu: GpuUuid, over_for: timedelta | None) -> None:
        """Store for how long a lease has been over; nothing of one that is not held any more."""
        held = self._state.live_job(job)
        if held is None:
            return
        span = None if over_for is None else over_for // timedelta(microseconds=1)
        which = {"this": job, "that": gpu, "over_for_us": span}
        self._execute(statements.NOTE_OVER, which)
        self._state.keep(with_over_for(held, gpu, over_for))

    def note_aging(self, jobs: Sequence[JobId], since: datetime | None) -> None:
        """Store since when the age of these queued jobs counts; None: they have no age."""
        at = instant(since)
        self._execute_all(_AGING, [{"this": job, "aging_since_at": at} for job in jobs])
        for job in jobs:
            held = self._state.live_job(job)
            assert held is not None, "only live jobs wait"
            self._state.keep(aging(held, since))

    def restore(self, job: Job, event: Event) -> None:
        """Store a job that the record has lost, under the id that it had."""
        self._execute(statements.RESTORE_JOB, {**job_values(job), "id": job.id})
        self._save_leases(None, job)
        self._log(job.id, event)
        self._note(None, job)

    def _save_leases(self, before: Job | None, job: Job) -> None:
        if before is not None and before.leases == job.leases:
            return
        if not job.leases:
            self._execute(statements.DROP_LEASES, {"this": job.id})
        known = {lease.gpu for lease in before.leases} if before is not None else set()
        for place, lease in enumerate(job.leases):
            if lease.gpu not in known:
                new = {
                    "job": job.id,
                    "gpu": lease.gpu,
                    "place": place,
                    "memory": lease.memory,
                    "memory_bound": lease.memory_bound,
                    **lease_values(lease),
                }
                self._execute(statements.ADD_LEASE, new)
            else:
                which = {"this": job.id, "that": lease.gpu}
                changed = {**which, **lease_values(lease)}
                self._execute(statements.CHANGE_LEASE, changed)

    def _log_all(
        self, jobs: Sequence[Job], event: Event, details: Mapping[JobId, str | None] = {}
    ) -> None:
        kind, at = str(event.kind), instant(event.at)
        rows = [(job.id, at, kind, details.get(job.id, event.detail)) for job in jobs]
        self._execute_all(statements.ADD_EVENT, rows)

    def _log(self, job: JobId, event: Event) -> None:
        detail = None if event.detail is None else str(event.detail)
        entry = (job, instant(event.at), str(event.kind), detail)
        self._writer.driver.execute(statements.ADD_EVENT, entry)

    def _execute_all(self, statement: str, rows: Sequence[Any]) -> None:
        if rows:
            self._writer.driver.executemany(statement, rows)


def _changes(before: Job | None, job: Job) -> dict[str, object]:
    """Return the columns of a job that have changed; all if `before` is None."""
    values = job_values(job)
    if before is None:
        return values
    former = job_values(before)
    return {name: value for name, value in values.items() if value != former[name]}


def _element_name(array: str, grid: Grid, index: int) -> str:
    return (array + suffix_of(grid, index))[:LONGEST_NAME] if grid else array
