"""The SQL statements of the store, and the counts of live jobs by user.

Statements that write are built once, on tables instead of ORM rows: writing is what the daemon does
most, and through rows it takes about three times the CPU. The counts by user are updated with each
change, so that checking a limit needs no query.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Insert,
    Integer,
    Update,
    and_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.sqlite import Insert as Upsert
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.orm import Session

from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import CommandFingerprint, Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.memory_estimate import PastRun
from gpulease.domain.queue_options import QueuePause
from gpulease.service.ports import UserCount
from gpulease.store.gpus import availabilities
from gpulease.store.rows import invocation_key, job_of
from gpulease.store.tables import (
    GpuRow,
    HolderRow,
    InvocationRow,
    JobRow,
    LeaseRow,
    PropertyRow,
    Row,
)

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


def add_elements(first: JobId, indices: Sequence[int]) -> Insert:
    """Return the statement that adds the other elements of an array, as copies of the first.

    10,000 rows that Python would bind one by one take ten times as long.
    """
    each = func.json_each(json.dumps(indices)).table_valued("key", "value")
    same = [column for column in _jobs.c if column.name not in ("id", "array_index")]
    rows = (
        select(_jobs.c.id + each.c.key, each.c.value, *same)
        .join_from(_jobs, each, true())
        .where(_jobs.c.id == first, each.c.key > 0)
    )
    return insert(_jobs).from_select(["id", "array_index", *(each.name for each in same)], rows)


def add_events(details: Mapping[JobId, str | None], at: datetime, kind: str) -> Insert:
    """Return the statement that adds an event to the histories of many jobs, with these details."""
    each = func.json_each(json.dumps(details)).table_valued("key", "value")
    events = _tables["events"]
    rows = select(
        cast(each.c.key, Integer), literal(at, events.c.at.type), literal(kind), each.c.value
    )
    return insert(events).from_select(["job", "at", "kind", "detail"], rows)


def change_jobs(names: Iterable[str]) -> Update:
    """Return the statement that changes some columns of jobs."""
    return SAVE_JOB.values({name: bindparam(name) for name in names})


def remember_gpu(reading: GpuReading, at: datetime) -> Upsert:
    """Return the statement that stores a GPU, or updates when it was last seen."""
    seen = {"gpu_index": reading.index, "name": reading.name, "last_seen_at": at}
    if reading.total is not None:
        seen["total"] = reading.total
    return (
        upsert(GpuRow)
        .values(uuid=reading.uuid, first_seen_at=at, **seen)
        .on_conflict_do_update(index_elements=[GpuRow.uuid], set_=seen)
    )


_PAUSE = "pause"


def pause_of(connection: Connection) -> QueuePause | None:
    """Return the pause of the queue; None if it is not paused."""
    wanted = select(PropertyRow.value).where(PropertyRow.key == _PAUSE)
    stored = connection.execute(wanted).scalar_one_or_none()
    return None if stored is None else msgspec.json.decode(stored, type=QueuePause)


def set_pause(connection: Connection, pause: QueuePause | None) -> None:
    """Store the pause of the queue, or its end."""
    connection.execute(delete(PropertyRow).where(PropertyRow.key == _PAUSE))
    if pause is not None:
        stored = msgspec.json.encode(pause).decode()
        connection.execute(insert(PropertyRow).values(key=_PAUSE, value=stored))


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


def failed_element(array: JobId) -> ColumnElement[bool]:
    """Return what is true of elements that ended without success; see `dependencies.succeeded`."""
    has_succeeded = (JobRow.outcome == Outcome.RELEASED) | (
        (JobRow.outcome == Outcome.EXITED) & JobRow.exit_code.is_not_distinct_from(0)
    )
    return and_(
        JobRow.array == array,
        JobRow.state == State.ENDED,
        ~has_succeeded,
        JobRow.retried_as.is_(None),
    )


def invocation_sizes(session: Session) -> dict[JobId, int]:
    """Return the bytes of the compressed arguments and environment of each live job or array."""
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
    """Counts the live jobs of each user, and the bytes of their invocations.

    The elements of an array share an invocation, which counts as long as one of them waits.
    """

    def __init__(self, live: Iterable[Job], sizes: Mapping[JobId, int]) -> None:
        self._of: dict[int, UserCount] = {}
        self._sizes = dict(sizes)
        self._users: Counter[JobId] = Counter()
        """Of each invocation, the live jobs."""
        self._waiting: Counter[JobId] = Counter()
        """Of each invocation, the queued jobs."""
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
                key = invocation_key(job)
                if key not in after._sizes:
                    after._sizes[key] = self._sizes.get(key, 0)
                    after._users[key] = self._users[key]
                    after._waiting[key] = self._waiting[key]
                after.note(before, job, size)
        return after.of(uid)

    def note(self, before: Job | None, after: Job, size: int | None = None) -> None:
        """Count a changed job; `size` is given with a new invocation."""
        key = invocation_key(after)
        if size is not None:
            self._sizes[key] = size
        # First the new state: an invocation that is still in use does not leave meanwhile.
        if after.state is not State.ENDED:
            self._count(after, 1)
        if before is not None:
            self._count(before, -1)
        if not self._users[key]:
            for counted in (self._sizes, self._users, self._waiting):
                counted.pop(key, None)

    def _count(self, job: Job, one: int) -> None:
        key, was = invocation_key(job), self.of(job.owner.uid)
        waits = one if job.state is State.QUEUED else 0
        waited = self._waiting[key] > 0
        self._users[key] += one
        self._waiting[key] += waits
        turned = (self._waiting[key] > 0) - waited
        now = replace(
            was,
            waiting=was.waiting + waits,
            waiting_bytes=was.waiting_bytes + turned * self._sizes.get(key, 0),
            holds=was.holds + (one if job.holder is not None else 0),
        )
        self._of[job.owner.uid] = now
        if now == UserCount():
            del self._of[job.owner.uid]
