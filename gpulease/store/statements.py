"""The SQL statements of the store.

Those that each job needs are text that is made once from the tables: SQLAlchemy takes ten times as
long for them as SQLite does. `rows` makes their values.
"""

import json
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ClauseElement,
    ColumnElement,
    Connection,
    Insert,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.sqlite import dialect

from gpulease.domain.enforcement import HookReport, HookState, Reports
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import CommandFingerprint, Job, Outcome, Owner
from gpulease.domain.lease import Claim, State
from gpulease.domain.memory_estimate import PastRun
from gpulease.service.metrics import MOST_EARLIER_USERS
from gpulease.service.ports import PastJob
from gpulease.store.rows import job_of
from gpulease.store.tables import (
    EventRow,
    HookRow,
    Instant,
    InvocationRow,
    JobRow,
    LeaseRow,
    Row,
)
from gpulease.units import Share

_tables = Row.metadata.tables
_jobs, _leases, _invocations = _tables["jobs"], _tables["leases"], _tables["invocations"]
_submissions, _holders = _tables["submissions"], _tables["holders"]


def _text(statement: ClauseElement) -> str:
    """Return a statement as SQL with named parameters."""
    return str(statement.compile(dialect=dialect(paramstyle="named")))


def _insert(table: str, *without: str) -> str:
    columns = [each.name for each in _tables[table].c if each.name not in without]
    return _text(insert(_tables[table]).values({name: bindparam(name) for name in columns}))


ADD_JOB = _insert("jobs", "id")
RESTORE_JOB = _insert("jobs")
ADD_INVOCATION = _insert("invocations")
DROP_INVOCATION = "DELETE FROM invocations WHERE job = ?"
END_INVOCATION = "UPDATE invocations SET content = :content WHERE job = :this"
ADD_SUBMISSION = _insert("submissions")
FIND_SUBMISSION = _text(
    select(_submissions.c.job).where(
        _submissions.c.uid == bindparam("uid"), _submissions.c.key == bindparam("key")
    )
)
ADD_HOLDER = _insert("holders")
ADD_LEASE = _insert("leases", "peak", "over_for_us")
DROP_LEASES = _text(delete(_leases).where(_leases.c.job == bindparam("this")))
_THIS_LEASE = (_leases.c.job == bindparam("this"), _leases.c.gpu == bindparam("that"))
_CHANGING = ("granted_at", "released_at", "enforced_by", "driver_limit", "used")
CHANGE_LEASE = _text(
    update(_leases).where(*_THIS_LEASE).values({name: bindparam(name) for name in _CHANGING})
)
NOTE_OVER = _text(update(_leases).where(*_THIS_LEASE).values(over_for_us=bindparam("over_for_us")))
ADD_EVENT = "INSERT INTO events (job, at, kind, detail) VALUES (?, ?, ?, ?)"
ADD_MESSAGE = _insert("notifications", "id", "attempts", "error")
FIND_MESSAGE = "SELECT 1 FROM notifications WHERE job = ? AND event = ? AND at >= ?"
# In the order of jobs from the first element on: an array has few messages and many elements.
FIND_MESSAGE_OF_ARRAY = (
    "SELECT 1 FROM notifications WHERE job >= ? AND event = ? AND at >= ? "
    "AND (SELECT array FROM jobs WHERE id = notifications.job) = ? LIMIT 1"
)
INVOCATION_OF = "SELECT content FROM invocations WHERE job = ?"

# AUTOINCREMENT continues from here; see sqlite.org/autoinc.html.
START_SEQUENCE = text(
    "INSERT INTO sqlite_sequence (name, seq) SELECT 'jobs', :last "
    "WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'jobs')"
)
RAISE_SEQUENCE = text("UPDATE sqlite_sequence SET seq = max(seq, :last) WHERE name = 'jobs'")


@lru_cache(256)
def change_job(names: tuple[str, ...]) -> str:
    """Return the statement that changes some columns of the job `this`.

    Only those: SQLite writes each index of a named column.
    """
    changes = update(_jobs).where(_jobs.c.id == bindparam("this"))
    return _text(changes.values({name: bindparam(name) for name in names}))


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


REMEMBER_GPU = text(
    """
    INSERT INTO gpus (uuid, number, gpu_index, name, total, first_seen_at, last_seen_at)
    VALUES (
        :uuid, (SELECT coalesce(max(number), 0) + 1 FROM gpus), :index, :name, :total, :at, :at
    )
    ON CONFLICT (uuid) DO UPDATE SET
        number = coalesce(number, excluded.number), gpu_index = excluded.gpu_index,
        name = excluded.name, total = coalesce(excluded.total, total),
        last_seen_at = excluded.last_seen_at
    """
).bindparams(bindparam("at", type_=Instant))
"""Stores a GPU, or updates when it was last seen; the values are those of `seen_gpu`."""


def seen_gpu(reading: GpuReading, at: datetime) -> dict[str, object]:
    """Return the parameters of `REMEMBER_GPU`."""
    return {
        "uuid": reading.uuid,
        "index": reading.index,
        "name": reading.name,
        "total": reading.total,
        "at": at,
    }


def jobs_with(connection: Connection, ids: Sequence[int]) -> list[Job]:
    """Return the jobs with some ids, with their leases and holders, by id."""
    if not ids:
        return []
    these = select(func.json_each(json.dumps(ids)).table_valued("value").c.value)
    by_id = select(_jobs).where(_jobs.c.id.in_(these)).order_by(_jobs.c.id)
    leases: dict[int, list[Any]] = {}
    by_place = select(_leases).where(_leases.c.job.in_(these)).order_by(_leases.c.place)
    for lease in _rows(connection, by_place):
        leases.setdefault(lease.job, []).append(lease)
    of_holds = select(_holders).where(_holders.c.job.in_(these))
    holders = {holder.job: holder for holder in _rows(connection, of_holds)}
    return [
        job_of(row, leases.get(row.id, ()), holders.get(row.id)) for row in _rows(connection, by_id)
    ]


def _rows(connection: Connection, statement: Select[Any]) -> Iterator[Any]:
    """Return rows as named tuples: to read a column of SQLAlchemy's takes thirty times as long."""
    found = connection.execute(statement)
    return map(_named_tuple(*found.keys()), found.all())


@lru_cache
def _named_tuple(*columns: str) -> Callable[[Sequence[Any]], Any]:
    row: Any = namedtuple("row", columns)  # type: ignore[misc]
    return row._make


LATEST_USERS = (
    select(JobRow.user)
    .group_by(JobRow.user)
    .order_by(func.max(JobRow.id).desc())
    .limit(MOST_EARLIER_USERS)
)
"""The users with the latest jobs; an index has all of it."""
LIVE = text("jobs.state <> 'ended'")
"""As in the condition of the index of live jobs."""


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


def invocation_sizes(connection: Connection) -> dict[JobId, int]:
    """Return the bytes of the compressed arguments and environment of each live job or array."""
    live = select(func.coalesce(JobRow.array, JobRow.id)).where(LIVE)
    size = select(InvocationRow.job, func.length(InvocationRow.content))
    sizes = connection.execute(size.where(InvocationRow.job.in_(live)))
    return {JobId(job): size for job, size in sizes}


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
            # With a range, the bound was there to be used.
            func.max(func.coalesce(LeaseRow.memory_bound, LeaseRow.memory)),
            func.max(LeaseRow.used),
            JobRow.out_of_memory,
            JobRow.outcome,
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


_MOST_PAST_JOBS = 50_000
"""The latest jobs that a start of the daemon reads, in about a second."""


def jobs_ended_since(connection: Connection, since: datetime) -> Sequence[PastJob]:
    """Return the latest jobs that ended since then after they held memory, the earliest first."""
    leased = select(func.sum(LeaseRow.memory)).where(LeaseRow.job == JobRow.id).scalar_subquery()
    unblocked = (
        select(func.max(EventRow.at))
        .where(EventRow.job == JobRow.id, EventRow.kind.in_(("dependency_met", "edit")))
        .scalar_subquery()
    )
    wanted = (
        select(
            JobRow.id, JobRow.uid, JobRow.gid, JobRow.user, JobRow.memory, JobRow.share,
            JobRow.gpus, JobRow.exclusive, JobRow.time_limit_us, JobRow.alike, JobRow.same,
            JobRow.submitted_at, JobRow.begin_at, JobRow.granted_at, JobRow.started_at,
            JobRow.ended_at, JobRow.outcome, JobRow.utilization, leased.label("leased"),
            unblocked.label("unblocked_at"),
        )
        .where(JobRow.ended_at >= since, JobRow.granted_at.is_not(None), leased.is_not(None))
        .order_by(JobRow.ended_at.desc())
        .limit(_MOST_PAST_JOBS)
    )  # fmt: skip
    return [_past(row) for row in reversed(connection.execute(wanted).all())]


def _past(row: Any) -> PastJob:
    limit = row.time_limit_us
    claim = Claim(
        row.memory if row.share is None else Share(Fraction(row.share)),
        row.gpus,
        row.exclusive,
        None if limit is None else timedelta(microseconds=limit),
    )
    eligible = (row.submitted_at, row.begin_at, row.unblocked_at)
    return PastJob(
        job=JobId(row.id),
        owner=Owner(row.uid, row.gid, row.user),
        claim=claim,
        fingerprint=None if row.alike is None else CommandFingerprint(row.alike, row.same),
        eligible_at=max(each for each in eligible if each is not None),
        granted_at=row.granted_at,
        started_at=row.started_at,
        released_at=max(row.ended_at, row.granted_at),
        memory=row.leased,
        outcome=Outcome(row.outcome),
        utilization=row.utilization,
    )


def reports_of(connection: Connection, job: JobId) -> Reports:
    """Return the reports of a job, oldest first."""
    rows = connection.execute(select(HookRow).where(HookRow.job == job).order_by(HookRow.at))
    return tuple(
        HookReport(
            pid=row.pid,
            framework=row.framework,
            version=row.version,
            state=HookState(row.state),
            at=row.at,
            limits=tuple((GpuUuid(gpu), limit) for gpu, limit in json.loads(row.limits).items()),
            why=row.why,
        )
        for row in rows
    )


def replace_reports(connection: Connection, job: JobId, reports: Reports) -> None:
    """Store the reports of a job in place of its former ones."""
    connection.execute(delete(HookRow).where(HookRow.job == job))
    if reports:
        connection.execute(insert(HookRow), [_report_values(job, each) for each in reports])


def _report_values(job: JobId, report: HookReport) -> dict[str, object]:
    return {
        "job": job,
        "pid": report.pid,
        "framework": report.framework,
        "version": report.version,
        "state": report.state.value,
        "limits": json.dumps(dict(report.limits)),
        "why": report.why,
        "at": report.at,
    }
