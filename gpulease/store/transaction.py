"""The write transaction: jobs in and out, as the use cases need them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import Session

from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.health import GpuAvailability, GpuEvent
from gpulease.domain.hook_reports import Reports
from gpulease.domain.job import CommandFingerprint, Invocation, Job, aging, with_over_for
from gpulease.domain.lease import State
from gpulease.domain.memory_estimate import PastRun
from gpulease.domain.queue_options import ArrayElement, Indices, QueuePause
from gpulease.errors import NoSuchJob
from gpulease.service.ports import Event, PastJob, Submission, UserCount
from gpulease.store import gpus, statements, windows
from gpulease.store.hook_reports import replace_reports
from gpulease.store.rows import (
    holder_values,
    invocation_key,
    job_values,
    lease_values,
    pack,
    unpack,
)
from gpulease.store.statements import UserCounts, drained_gpus, jobs_where, runs_like
from gpulease.store.tables import InvocationRow, JobRow, SubmissionRow


class SqlTransaction:
    """Changes that are committed together or not at all."""

    def __init__(
        self,
        connection: Connection,
        live: Mapping[JobId, Job],
        known_gpus: frozenset[GpuUuid],
        user_counts: UserCounts,
    ) -> None:
        self._connection = connection
        self._tallies = user_counts
        self.changes: list[tuple[Job | None, Job, int | None]] = []
        """Each job before and after, and for a new one the bytes of its invocation."""
        self.released: list[PastJob] = []
        """The jobs that let go of their memory."""
        self._live = dict(live)
        self._known_gpus = known_gpus
        self._elements: Counter[JobId] | None = None
        """The live elements of each array, counted when first needed."""

    def live(self) -> Sequence[Job]:
        """Return every job that waits or holds memory, by id."""
        return tuple(self._live.values())

    def outcome(self) -> tuple[dict[JobId, Job], frozenset[GpuUuid]]:
        """Return the live jobs and the known GPUs as of the commit."""
        return self._live, self._known_gpus

    def job(self, job: JobId) -> Job | None:
        """Return one job in any state; None if there is none."""
        held = self._live.get(job)
        if held is not None:
            return held
        with Session(self._connection) as session:
            return next(iter(jobs_where(session, JobRow.id == job)), None)

    def user_count(self, uid: int) -> UserCount:
        """Return the counts of a user, including the changes of this transaction."""
        return self._tallies.of_after(uid, self.changes)

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return why each drained GPU takes no new leases."""
        return drained_gpus(self._connection)

    def availabilities(self) -> Mapping[GpuUuid, GpuAvailability]:
        """Return the availability of each GPU with a drain, a fault or an accepted fault."""
        return gpus.availabilities(self._connection)

    def set_availability(self, gpu: GpuUuid, availability: GpuAvailability) -> None:
        """Store the availability of a known GPU."""
        gpus.set_availability(self._connection, gpu, availability)

    def note_gpu(self, event: GpuEvent) -> None:
        """Store a health event of a known GPU."""
        gpus.note_event(self._connection, event)

    def pause(self) -> QueuePause | None:
        """Return the pause of the queue; None if it is not paused."""
        return statements.pause_of(self._connection)

    def set_pause(self, pause: QueuePause | None) -> None:
        """Store the pause of the queue, or its end."""
        statements.set_pause(self._connection, pause)

    def windows(self) -> Sequence[Window]:
        """Return the windows, in the order in which they were made."""
        return windows.all_windows(self._connection)

    def add_window(self, window: Window) -> Window:
        """Store a new window, and return it with its id."""
        return windows.add(self._connection, window)

    def remove_window(self, window: WindowId) -> None:
        """Remove a window."""
        windows.remove(self._connection, window)

    def add_gpus(self, readings: Sequence[GpuReading], at: datetime) -> None:
        """Store GPUs that are not known yet; a lease refers to a known one."""
        new = [reading for reading in readings if reading.uuid not in self._known_gpus]
        for reading in new:
            self._connection.execute(statements.remember_gpu(reading, at))
        self._known_gpus |= {reading.uuid for reading in new}

    def job_by_key(self, uid: int, key: str) -> Job | None:
        """Return the job that a user has ordered under this key, whatever its state."""
        with Session(self._connection) as session:
            number = session.scalar(
                select(SubmissionRow.job).where(SubmissionRow.uid == uid, SubmissionRow.key == key)
            )
        return None if number is None else self.job(JobId(number))

    def invocation(self, job: JobId) -> Invocation:
        """Return how a job was started.

        Raises:
            NoSuchJob: it has ended, or never was.
        """
        held = self._live.get(job)
        with Session(self._connection) as session:
            row = session.get(InvocationRow, job if held is None else invocation_key(held))
            if row is None:
                raise NoSuchJob(f"cannot start job {job} again: it has ended")
            return unpack(row)

    def past_runs(
        self, uid: int, shape: CommandFingerprint, gpus: int, most: int
    ) -> Sequence[PastRun]:
        """Return the latest runs like this one of which the use is known, latest first."""
        return runs_like(self._connection, uid, shape, gpus, most)

    def add(self, order: Submission, at: datetime) -> Job:
        """Store a new job, QUEUED, with its invocation, unless that of its array is stored."""
        job = self._insert(order, at)
        key = invocation_key(job)
        is_new = key == job.id or not self.live_elements(key)
        size = self._add_invocation(key, order.invocation) if is_new else None
        self._log(job.id, Event(at, "submitted", str(order.claim)))
        self._note(None, job, size)
        return job

    def _insert(self, order: Submission, at: datetime) -> Job:
        values = job_values(order.queued(JobId(0), at))
        number = self._connection.execute(statements.ADD_JOB, values).scalar_one()
        job = order.queued(JobId(number), at)
        if job.holder is not None:
            self._connection.execute(statements.ADD_HOLDER, holder_values(job.id, job.holder))
        if order.key is not None:
            self._connection.execute(
                statements.ADD_SUBMISSION,
                {"uid": job.owner.uid, "key": order.key, "job": job.id},
            )
        return job

    def _add_invocation(self, key: JobId, invocation: Invocation) -> int:
        content = pack(invocation)
        self._connection.execute(statements.ADD_INVOCATION, {"job": key, "content": content})
        return len(content)

    def add_array(self, order: Submission, indices: Indices, at: datetime) -> Sequence[Job]:
        """Store a new job for each index, QUEUED, with one invocation for all."""
        alone = self._insert(order, at)
        elements = [
            ArrayElement(alone.id, index, indices.most_running) for index in indices.indices
        ]
        jobs = [
            replace(alone, id=JobId(alone.id + place), queue=replace(alone.queue, array=element))
            for place, element in enumerate(elements)
        ]
        self._connection.execute(statements.SAVE_JOB, {**job_values(jobs[0]), "this": alone.id})
        self._connection.execute(statements.add_elements(alone.id, indices.indices))
        size = self._add_invocation(alone.id, order.invocation)
        self._log_all(jobs, Event(at, "submitted", str(order.claim)))
        for job in jobs:
            self._note(None, job, size if job.id == alone.id else None)
        return jobs

    def element(self, array: JobId, index: int) -> Job | None:
        """Return the latest job with this index in an array, in any state, or None."""
        with Session(self._connection) as session:
            this = select(func.max(JobRow.id)).where(
                JobRow.array == array, JobRow.array_index == index
            )
            number = session.scalar(this)
        return None if number is None else self.job(JobId(number))

    def live_elements(self, array: JobId) -> int:
        """Return how many elements of an array wait or hold memory."""
        if self._elements is None:
            self._elements = Counter(
                job.queue.array.job for job in self._live.values() if job.queue.array is not None
            )
        return self._elements[array]

    def failed_element(self, array: JobId) -> Job | None:
        """Return an element that ended without success and is not retried, or None."""
        with Session(self._connection) as session:
            number = session.scalar(
                select(JobRow.id).where(statements.failed_element(array)).limit(1)
            )
        return None if number is None else self.job(JobId(number))

    def ended(self) -> Sequence[Job]:
        """Return the jobs that have ended in this transaction."""
        return [job for _, job, _ in self.changes if job.state is State.ENDED]

    def save(self, job: Job, event: Event | None) -> None:
        """Store a job as it is now, and why; None: not worth a line in its history."""
        before = self._live.get(job.id)
        if job is not before:
            self._connection.execute(statements.SAVE_JOB, {**job_values(job), "this": job.id})
            self._save_leases(before, job)
        if event is not None:
            self._log(job.id, event)
            self._note_release(before, job, event.at)
        self._note(before, job)
        self._drop_invocations([job])

    def save_all(
        self, jobs: Sequence[Job], event: Event, details: Mapping[JobId, str | None] = {}
    ) -> None:
        """Store many queued jobs that changed or ended at once; their leases stay.

        `details` are those of jobs for which that of the event does not apply.
        """
        changes: dict[tuple[str, ...], list[dict[str, object]]] = {}
        for job in jobs:
            before = job_values(self._live[job.id])
            values = {
                name: value for name, value in job_values(job).items() if value != before[name]
            }
            if values:
                changes.setdefault(tuple(values), []).append({**values, "this": job.id})
        for names, rows in changes.items():
            self._connection.execute(statements.change_jobs(names), rows)
        self._log_all(jobs, event, details)
        for job in jobs:
            self._note(self._live[job.id], job)
        self._drop_invocations(jobs)

    def _note(self, before: Job | None, after: Job, size: int | None = None) -> None:
        """Keep a changed job; `size` is that of a new invocation."""
        self.changes.append((before, after, size))
        is_live = after.state is not State.ENDED
        if is_live:
            self._live[after.id] = after
        else:
            self._live.pop(after.id, None)
        if self._elements is not None and after.queue.array is not None:
            self._elements[after.queue.array.job] += is_live - (before is not None)

    def _drop_invocations(self, jobs: Sequence[Job]) -> None:
        """Delete the invocations that only ended ones of `jobs` have used."""
        ended = {invocation_key(job): job for job in jobs if job.state is State.ENDED}
        unused = [
            {"this": key}
            for key, job in ended.items()
            if job.queue.array is None or not self.live_elements(key)
        ]
        if unused:
            self._connection.execute(statements.DROP_INVOCATION, unused)

    def _note_release(self, before: Job | None, job: Job, at: datetime) -> None:
        if before is None or not before.holds_memory or job.holds_memory:
            return
        held = job if job.leases else before
        past = PastJob.of(held, job.outcome, job.ended_at or at)
        if past is not None:
            self.released.append(past)

    def note(self, job: JobId, event: Event) -> None:
        """Add to the history of a job that stays as it is; it may have ended."""
        self._log(job, event)

    def save_hooks(self, job: JobId, reports: Reports) -> None:
        """Store the reports of the hooks of a job in place of its former ones."""
        replace_reports(self._connection, job, reports)

    def note_over(self, job: JobId, gpu: GpuUuid, over_for: timedelta | None) -> None:
        """Store for how long a lease has been over; nothing of one that is not held any more."""
        held = self._live.get(job)
        if held is None:
            return
        span = None if over_for is None else over_for // timedelta(microseconds=1)
        which = {"this": job, "that": gpu, "over_for_us": span}
        self._connection.execute(statements.NOTE_OVER, which)
        self._live[job] = with_over_for(held, gpu, over_for)

    def note_aging(self, jobs: Sequence[JobId], since: datetime | None) -> None:
        """Store since when the age of these queued jobs counts; None: they have no age."""
        if not jobs:
            return
        which = [{"this": job, "since": since} for job in jobs]
        self._connection.execute(statements.NOTE_AGING, which)
        for job in jobs:
            self._live[job] = aging(self._live[job], since)

    def restore(self, job: Job, event: Event) -> None:
        """Store a job that the record has lost, under the id that it had."""
        self._connection.execute(statements.RESTORE_JOB, {**job_values(job), "id": job.id})
        self._save_leases(None, job)
        self._log(job.id, event)
        self._live[job.id] = job

    def _save_leases(self, before: Job | None, job: Job) -> None:
        if before is not None and before.leases == job.leases:
            return
        if not job.leases:
            self._connection.execute(statements.DROP_LEASES, {"this": job.id})
        known = {lease.gpu for lease in before.leases} if before is not None else set()
        for place, lease in enumerate(job.leases):
            if lease.gpu not in known:
                new = {
                    "job": job.id,
                    "gpu": lease.gpu,
                    "place": place,
                    "memory": lease.memory,
                    **lease_values(lease),
                }
                self._connection.execute(statements.ADD_LEASE, new)
            else:
                which = {"this": job.id, "that": lease.gpu}
                changed = {**which, **lease_values(lease)}
                self._connection.execute(statements.CHANGE_LEASE, changed)

    def _log_all(
        self, jobs: Sequence[Job], event: Event, details: Mapping[JobId, str | None] = {}
    ) -> None:
        each = {job.id: details.get(job.id, event.detail) for job in jobs}
        self._connection.execute(statements.add_events(each, event.at, event.kind))

    def _log(self, job: JobId, event: Event) -> None:
        entry = {"job": job, "at": event.at, "kind": event.kind, "detail": event.detail}
        self._connection.execute(statements.ADD_EVENT, entry)
