"""The SQL statements of the store, and the counts of live jobs by user.

Statements that write are built once, on tables instead of ORM rows: writing is what the daemon does
most, and through rows it takes about three times the CPU. The counts by user are updated with each
change, so that checking a limit needs no query.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import (
    ColumnElement,
    Connection,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.orm import Session

from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import CommandFingerprint, Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.memory_estimate import PastRun
from gpulease.service.ports import UserCount
from gpulease.store.gpus import availabilities
from gpulease.store.rows import job_of
from gpulease.store.tables import GpuRow, HolderRow, InvocationRow, JobRow, LeaseRow, Row

_tables = Row.metadata.tables
_jobs, _leases, _invocations = _tables["jobs"], _tables["leases"], _tables["invocations"]

ADD_JOB = insert(_jobs).returning(_jobs.c.id)
RESTORE_JOB = insert(_jobs)
SAVE_JOB = update(_jobs).where(_jobs.c.id == bindparam("this"))
ADD_INVOCATION = insert(_invocations)
DROP_INVOCATION = delete(_invocations).where(_invocations.c.job == bindparam("this"))
ADD_SUBMISSION = insert(_tables["submissions"])
ADD_HOLDER = insert(_tables["holders"])
ADD_LEASE = insert(_leases)
DROP_LEASES = delete(_leases).where(_leases.c.job == bindparam("this"))
_CHANGING = ("granted_at", "released_at", "enforced_by", "driver_limit", "used")
CHANGE_LEASE = (
    update(_leases)
    .where(_leases.c.job == bindparam("this"), _leases.c.gpu == bindparam("that"))
    .values({name: bindparam(name) for name in _CHANGING})
)
NOTE_OVER = (
    update(_leases)
    .where(_leases.c.job == bindparam("this"), _leases.c.gpu == bindparam("that"))
    .values(over_for_us=bindparam("over_for_us"))
)
NOTE_AGING = (
    update(_jobs).where(_jobs.c.id == bindparam("this")).values(aging_since_at=bindparam("since"))
)
ADD_EVENT = insert(_tables["events"])

# AUTOINCREMENT continues from here; see sqlite.org/autoinc.html.
START_SEQUENCE = text(
    "INSERT INTO sqlite_sequence (name, seq) SELECT 'jobs', :last "
    "WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'jobs')"
)
RAISE_SEQUENCE = text("UPDATE sqlite_sequence SET seq = max(seq, :last) WHERE name = 'jobs'")


def remember_gpu(reading: GpuReading, at: datetime) -> Insert:
    """Return the statement that stores a GPU, or updates when it was last seen."""
    seen = {"gpu_index": reading.index, "name": reading.name, "last_seen_at": at}
    if reading.total is not None:
        seen["total"] = reading.total
    return (
        upsert(GpuRow)
        .values(uuid=reading.uuid, first_seen_at=at, **seen)
        .on_conflict_do_update(index_elements=[GpuRow.uuid], set_=seen)
    )


def jobs_where(session: Session, which: ColumnElement[bool]) -> list[Job]:
    """Return jobs with their leases and holders, by id."""
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


def invocation_sizes(session: Session) -> dict[JobId, int]:
    """Return the bytes of each live job's compressed arguments and environment."""
    sizes = session.execute(select(InvocationRow.job, func.length(InvocationRow.content)))
    return {JobId(job): size for job, size in sizes}


def drained_gpus(connection: Connection) -> Mapping[GpuUuid, str]:
    """Return why each drained GPU takes no new leases."""
    return {
        gpu: availability.reason
        for gpu, availability in availabilities(connection).items()
        if availability.reason is not None
    }


_USE_IS_MEANINGFUL = JobRow.out_of_memory | or_(
    (JobRow.outcome == Outcome.EXITED) & (JobRow.exit_code == 0),
    JobRow.outcome.in_((Outcome.CANCELLED, Outcome.TIME_LIMIT, Outcome.OVER_LEASE)),
)
"""Outcomes after which the use counts: a script that failed may have failed at its first line."""


def runs_like(
    connection: Connection, uid: int, shape: CommandFingerprint, gpus: int, most: int
) -> Sequence[PastRun]:
    """Return the latest runs with this fingerprint and known use, latest first.

    Runs with the exact key, or without any, runs with the similar key.
    """
    similar = (
        select(
            func.max(LeaseRow.memory), func.max(LeaseRow.used), JobRow.out_of_memory, JobRow.outcome
        )
        .join(LeaseRow, LeaseRow.job == JobRow.id)
        .where(JobRow.uid == uid, JobRow.alike == shape.similar_key, JobRow.gpus == gpus)
        .where(JobRow.state == State.ENDED, _USE_IS_MEANINGFUL)
        # If it ran out of memory, the size of its lease is enough.
        .where(LeaseRow.used.is_not(None) | JobRow.out_of_memory)
        .group_by(JobRow.id)
        .order_by(JobRow.id.desc())
        .limit(most)
    )
    found = connection.execute(similar.where(JobRow.same == shape.exact_key)).all()
    if not found:
        found = connection.execute(similar).all()
    return [
        PastRun(leased, used or 0, bool(ran_out), outcome == Outcome.OVER_LEASE)
        for leased, used, ran_out, outcome in found
    ]


class UserCounts:
    """Counts the live jobs of each user, and the bytes of their invocations."""

    def __init__(self, live: Iterable[Job], sizes: Mapping[JobId, int]) -> None:
        self._of: dict[int, UserCount] = {}
        self._sizes = dict(sizes)
        for job in live:
            self._count(job, 1)

    def of(self, uid: int) -> UserCount:
        """Return the counts of a user."""
        return self._of.get(uid, UserCount())

    def of_after(
        self, uid: int, changes: Iterable[tuple[Job | None, Job, int | None]]
    ) -> UserCount:
        """Return the counts of a user after `changes`, each in the form of `note`."""
        after = UserCounts((), {})
        after._of = {uid: self.of(uid)}
        for before, job, size in changes:
            if job.owner.uid == uid:
                after._sizes.setdefault(job.id, self._sizes.get(job.id, 0))
                after.note(before, job, size)
        return after.of(uid)

    def note(self, before: Job | None, after: Job, size: int | None = None) -> None:
        """Count a changed job; `size` is given for a new one."""
        if size is not None:
            self._sizes[after.id] = size
        if before is not None:
            self._count(before, -1)
        if after.state is State.ENDED:
            self._sizes.pop(after.id, None)
        else:
            self._count(after, 1)

    def _count(self, job: Job, one: int) -> None:
        was = self.of(job.owner.uid)
        waits = one if job.state is State.QUEUED else 0
        now = replace(
            was,
            waiting=was.waiting + waits,
            waiting_bytes=was.waiting_bytes + waits * self._sizes.get(job.id, 0),
            holds=was.holds + (one if job.holder is not None else 0),
        )
        self._of[job.owner.uid] = now
        if now == UserCount():
            del self._of[job.owner.uid]
