"""The store: domain objects in and out, one writer, and the live jobs at hand.

Every job that waits or holds memory is also kept in memory, exactly as last committed, so that a
planning pass over ten thousand of them reads no row. What a transaction changed becomes visible
there when it has been committed, and not before.
"""

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from sqlalchemy import (
    ColumnElement,
    Connection,
    select,
)
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.orm import Session

from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import State
from gpulease.domain.memory import GpuReading, GpuUuid, JobId
from gpulease.errors import NoSuchJob, RecordUnwritable, StateUnusable
from gpulease.service.ports import Event, Order
from gpulease.store import statements
from gpulease.store.engine import WRITES, open_engine
from gpulease.store.rows import holder_values, job_of, job_values, pack, unpack
from gpulease.store.schema import bring_up_to_date
from gpulease.store.tables import (
    EventRow,
    GpuRow,
    HolderRow,
    InvocationRow,
    JobRow,
    LeaseRow,
    PropertyRow,
    SubmissionRow,
)

FILE_NAME = "gpulease.db"


class SqlStore:
    """The record of jobs and leases in one SQLite file."""

    def __init__(self, path: Path) -> None:
        """Open the file at `path`, which is created or migrated if need be.

        Raises:
            StateUnusable: the file cannot be used as it is.
        """
        self.path = path
        try:
            # SQLite gives the files beside it the same mode; the environments of jobs are in them.
            path.touch(mode=0o600)
            self.engine = open_engine(path)
            bring_up_to_date(path, self.engine)
            with Session(self.engine) as session:
                self._live = {job.id: job for job in _jobs(session, JobRow.state != State.ENDED)}
                self._known_gpus = frozenset(map(GpuUuid, session.scalars(select(GpuRow.uuid))))
        except (DatabaseError, OSError) as error:
            why = error.orig if isinstance(error, DatabaseError) else error.strerror
            raise StateUnusable(
                f"cannot use the database {path}: {why}",
                "see that the directory can be written and the disk is not full",
            ) from error
        self._live_in_order = tuple(self._live.values())
        self._writing = threading.Lock()

    def close(self) -> None:
        """Let go of the file."""
        self.engine.dispose()

    @contextmanager
    def write(self) -> Iterator["SqlTransaction"]:
        """Open the one write transaction; what it did is on disk when the context ends."""
        with self.alone() as connection:
            with connection.begin():
                transaction = SqlTransaction(connection, self._live, self._known_gpus)
                yield transaction
            # Replaced and not changed, so that a reader's snapshot stays whole.
            self._live, self._known_gpus = transaction.outcome()
            self._live_in_order = tuple(self._live.values())

    @contextmanager
    def alone(self) -> Iterator[Connection]:
        """Return a connection that may write; within this process nobody else writes meanwhile.

        Raises:
            RecordUnwritable: the file cannot be written at this moment.
        """
        try:
            with self._writing, self.engine.connect() as connection:
                yield connection.execution_options(**WRITES)
        except OperationalError as error:
            raise RecordUnwritable(
                f"cannot write the record {self.path}: {error.orig}",
                "an admin should see that the disk has room and nothing else holds the file; "
                "running jobs go on meanwhile",
            ) from error

    def live(self) -> Sequence[Job]:
        """Return every job that waits or holds memory, by id, as last committed."""
        return self._live_in_order

    def job(self, job: JobId) -> Job | None:
        """Return one job, whatever its state."""
        held = self._live.get(job)
        if held is not None:
            return held
        with Session(self.engine) as session:
            return next(iter(_jobs(session, JobRow.id == job)), None)

    def jobs(self, user: str | None, state: str | None, limit: int) -> Sequence[Job]:
        """Return the latest jobs in whatever state, oldest first."""
        with Session(self.engine) as session:
            wanted = select(JobRow.id).order_by(JobRow.id.desc()).limit(limit)
            if user is not None:
                wanted = wanted.where(JobRow.user == user)
            if state is not None:
                wanted = wanted.where(JobRow.state == state)
            return _jobs(session, JobRow.id.in_(wanted))

    def invocation(self, job: JobId) -> Invocation:
        """Return how to start a job.

        Raises:
            NoSuchJob: there is no such job, or it has ended.
        """
        with Session(self.engine) as session:
            row = session.get(InvocationRow, job)
            if row is None:
                raise NoSuchJob(f"cannot start job {job}: it has ended")
            return unpack(row)

    def events(self, job: JobId) -> Sequence[Event]:
        """Return the history of a job, oldest first."""
        with Session(self.engine) as session:
            rows = session.scalars(
                select(EventRow).where(EventRow.job == job).order_by(EventRow.id)
            )
            return [Event(row.at, row.kind, row.detail) for row in rows]

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return the GPUs on which nothing more may be granted, and why."""
        with self.engine.connect() as connection:
            return _drained(connection)

    def use_no_id_up_to(self, last: int) -> None:
        """See that new jobs get ids above `last`: up to there, ids are taken already."""
        with self.alone() as connection, connection.begin():
            connection.execute(statements.START_SEQUENCE, {"last": last})
            connection.execute(statements.RAISE_SEQUENCE, {"last": last})

    def installation(self) -> str:
        """Return the name of this database, made once; it tells our jobs from another daemon's."""
        name = {"key": "installation", "value": uuid.uuid4().hex}
        with self.alone() as connection, connection.begin():
            connection.execute(upsert(PropertyRow).on_conflict_do_nothing(), name)
            wanted = select(PropertyRow.value).where(PropertyRow.key == name["key"])
            return connection.execute(wanted).scalar_one()


class SqlTransaction:
    """Changes that become true together, on disk, or not at all."""

    def __init__(
        self, connection: Connection, live: Mapping[JobId, Job], known_gpus: frozenset[GpuUuid]
    ) -> None:
        self._connection = connection
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
            return next(iter(_jobs(session, JobRow.id == job)), None)

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return the GPUs on which nothing more may be granted, and why."""
        return _drained(self._connection)

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

    def add(self, order: Order, at: datetime) -> Job:
        """Store a new job, QUEUED, with its invocation."""
        values = job_values(order.queued(JobId(0), at))
        number = self._connection.execute(statements.ADD_JOB, values).scalar_one()
        job = order.queued(JobId(number), at)
        self._connection.execute(
            statements.ADD_INVOCATION, {"job": job.id, "content": pack(order.invocation)}
        )
        if job.holder is not None:
            self._connection.execute(statements.ADD_HOLDER, holder_values(job.id, job.holder))
        if order.key is not None:
            self._connection.execute(
                statements.ADD_SUBMISSION,
                {"uid": job.owner.uid, "key": order.key, "job": job.id},
            )
        self._log(job.id, Event(at, "submitted", str(order.claim)))
        self._live[job.id] = job
        return job

    def save(self, job: Job, event: Event) -> None:
        """Store a job as it is now, and why."""
        before = self._live.get(job.id)
        if job is not before:
            self._connection.execute(statements.SAVE_JOB, {**job_values(job), "this": job.id})
            self._save_leases(before, job)
        self._log(job.id, event)
        self._live[job.id] = job
        if job.state is State.ENDED:
            del self._live[job.id]
            self._connection.execute(statements.DROP_INVOCATION, {"this": job.id})

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
                self._connection.execute(statements.RELEASE, {**which, "released_at": released})

    def _log(self, job: JobId, event: Event) -> None:
        entry = {"job": job, "at": event.at, "kind": event.kind, "detail": event.detail}
        self._connection.execute(statements.ADD_EVENT, entry)


def _jobs(session: Session, which: ColumnElement[bool]) -> list[Job]:
    """Read jobs with their leases and holders, by id."""
    rows = session.scalars(select(JobRow).where(which).order_by(JobRow.id)).all()
    leases: dict[int, list[LeaseRow]] = {}
    of_these = select(JobRow.id).where(which)
    for lease in session.scalars(
        select(LeaseRow).where(LeaseRow.job.in_(of_these)).order_by(LeaseRow.place)
    ):
        leases.setdefault(lease.job, []).append(lease)
    of_holds = select(HolderRow).where(HolderRow.job.in_(of_these))
    holders = {holder.job: holder for holder in session.scalars(of_holds)}
    return [job_of(row, leases.get(row.id, ()), holders.get(row.id)) for row in rows]


def _drained(connection: Connection) -> Mapping[GpuUuid, str]:
    rows = connection.execute(
        select(GpuRow.uuid, GpuRow.drained).where(GpuRow.drained.is_not(None))
    )
    return {GpuUuid(gpu): why for gpu, why in rows if why is not None}
