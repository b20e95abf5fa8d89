"""The one write transaction: jobs in and out, as the use cases want them."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session

from gpulease.domain.account import Shape
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import State
from gpulease.domain.memory import GpuReading, GpuUuid, JobId
from gpulease.domain.sizing import Run
from gpulease.errors import NoSuchJob
from gpulease.service.ports import Event, Order, Tally
from gpulease.store import statements
from gpulease.store.reads import drained_gpus, jobs_where
from gpulease.store.rows import holder_values, job_values, pack, unpack
from gpulease.store.runs import runs_like
from gpulease.store.tables import InvocationRow, JobRow, SubmissionRow
from gpulease.store.tallies import Tallies


class SqlTransaction:
    """Changes that become true together, on disk, or not at all."""

    def __init__(
        self,
        connection: Connection,
        live: Mapping[JobId, Job],
        known_gpus: frozenset[GpuUuid],
        tallies: Tallies,
    ) -> None:
        self._connection = connection
        self._tallies = tallies
        self.changes: list[tuple[Job | None, Job, int | None]] = []
        """Each job before and after, and the bytes of a new one's invocation."""
        self._live = dict(live)
        self._known_gpus = known_gpus

    def live(self) -> Sequence[Job]:
        """Return every job that waits or holds memory, by id."""
        return tuple(self._live.values())

    def outcome(self) -> tuple[dict[JobId, Job], frozenset[GpuUuid]]:
        """Return the live jobs and the known GPUs as they are when this has been committed."""
        return self._live, self._known_gpus

    def job(self, job: JobId) -> Job | None:
        """Return one job, whatever its state."""
        held = self._live.get(job)
        if held is not None:
            return held
        with Session(self._connection) as session:
            return next(iter(jobs_where(session, JobRow.id == job)), None)

    def tally(self, uid: int) -> Tally:
        """Return what a user has, with what this transaction has changed."""
        return self._tallies.of_after(uid, self.changes)

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return the GPUs on which nothing more may be granted, and why."""
        return drained_gpus(self._connection)

    def know(self, readings: Sequence[GpuReading], at: datetime) -> None:
        """Store the GPUs that were not known yet; a lease can only be on a known one."""
        new = [reading for reading in readings if reading.uuid not in self._known_gpus]
        for reading in new:
            self._connection.execute(statements.remember_gpu(reading, at))
        self._known_gpus |= {reading.uuid for reading in new}

    def ordered(self, uid: int, key: str) -> Job | None:
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
        with Session(self._connection) as session:
            row = session.get(InvocationRow, job)
            if row is None:
                raise NoSuchJob(f"cannot start job {job} again: it has ended")
            return unpack(row)

    def runs(self, uid: int, shape: Shape, gpus: int, most: int) -> Sequence[Run]:
        """Return the latest runs like this one of which the use is known, latest first."""
        return runs_like(self._connection, uid, shape, gpus, most)

    def add(self, order: Order, at: datetime) -> Job:
        """Store a new job, QUEUED, with its invocation."""
        values = job_values(order.queued(JobId(0), at))
        number = self._connection.execute(statements.ADD_JOB, values).scalar_one()
        job = order.queued(JobId(number), at)
        content = pack(order.invocation)
        self._connection.execute(statements.ADD_INVOCATION, {"job": job.id, "content": content})
        if job.holder is not None:
            self._connection.execute(statements.ADD_HOLDER, holder_values(job.id, job.holder))
        if order.key is not None:
            self._connection.execute(
                statements.ADD_SUBMISSION,
                {"uid": job.owner.uid, "key": order.key, "job": job.id},
            )
        self._log(job.id, Event(at, "submitted", str(order.claim)))
        self._live[job.id] = job
        self.changes.append((None, job, len(content)))
        return job

    def save(self, job: Job, event: Event) -> None:
        """Store a job as it is now, and why."""
        before = self._live.get(job.id)
        if job is not before:
            self._connection.execute(statements.SAVE_JOB, {**job_values(job), "this": job.id})
            self._save_leases(before, job)
        self._log(job.id, event)
        self._live[job.id] = job
        self.changes.append((before, job, None))
        if job.state is State.ENDED:
            del self._live[job.id]
            self._connection.execute(statements.DROP_INVOCATION, {"this": job.id})

    def restore(self, job: Job, event: Event) -> None:
        """Store a job that the record has lost, under the id that it had."""
        self._connection.execute(statements.RESTORE_JOB, {**job_values(job), "id": job.id})
        self._save_leases(None, job)
        self._log(job.id, event)
        self._live[job.id] = job

    def _save_leases(self, before: Job | None, job: Job) -> None:
        if before is not None and before.leases == job.leases:
            return
        known = {lease.gpu for lease in before.leases} if before is not None else set()
        for place, lease in enumerate(job.leases):
            if lease.gpu not in known:
                new = {
                    "job": job.id,
                    "gpu": lease.gpu,
                    "place": place,
                    "memory": lease.memory,
                    "granted_at": lease.granted_at,
                }
                self._connection.execute(statements.ADD_LEASE, new)
            else:
                # Never before the grant, whatever the clock has done meanwhile.
                released = lease.released_at and max(lease.released_at, lease.granted_at)
                which = {"this": job.id, "that": lease.gpu}
                over = {"released_at": released, "used": lease.used}
                self._connection.execute(statements.RELEASE, {**which, **over})

    def _log(self, job: JobId, event: Event) -> None:
        entry = {"job": job, "at": event.at, "kind": event.kind, "detail": event.detail}
        self._connection.execute(statements.ADD_EVENT, entry)
