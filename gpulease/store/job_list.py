"""The jobs of a listing, in pages: a page reads the rows that it shows and few others."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    TextClause,
    exists,
    func,
    literal_column,
    or_,
    select,
    union_all,
)

from gpulease.domain.gpu import JobId
from gpulease.domain.job import NOT_FAILED, Job, Outcome
from gpulease.domain.lease import State
from gpulease.service.job_list import FAILED, EndedJob, EndedPage, JobPage, JobQuery
from gpulease.store.statements import LIVE, jobs_with
from gpulease.store.tables import HolderRow, Instant, JobRow, LeaseRow


def job_page(
    connection: Connection, query: JobQuery, live_job: Callable[[JobId], Job | None]
) -> JobPage:
    """Return a page of jobs; the rows of those that `live_job` knows are not read."""
    these = _wanted(query, select(JobRow.id)).subquery()
    # As one value: SQLAlchemy takes longer for 10,000 rows than SQLite to find them.
    found = connection.execute(select(func.json_group_array(these.c.id))).scalar_one()
    ids, following = _cut(query, json.loads(found))
    jobs = {job: live_job(job) for job in ids}
    jobs |= {job.id: job for job in jobs_with(connection, [job for job in ids if not jobs[job]])}
    is_all = query.after is None and following is None
    total = len(ids)
    if not is_all:
        counted = select(func.count(JobRow.id)).where(*_conditions(query, counts=True))
        total = connection.execute(counted).scalar_one()
    in_order = reversed(ids) if query.from_newest and not query.newest else ids
    return JobPage([job for each in in_order if (job := jobs[each])], total, following)


def ended_page(connection: Connection, query: JobQuery) -> EndedPage:
    """Return a page of ended jobs in brief."""
    of_job = LeaseRow.job == JobRow.id
    brief = select(
        JobRow.id, JobRow.array, JobRow.array_index, JobRow.name, JobRow.user,
        exists().where(HolderRow.job == JobRow.id), JobRow.slurm_job,
        JobRow.outcome, JobRow.exit_code, JobRow.exit_signal,
        JobRow.submitted_at, JobRow.granted_at, JobRow.ended_at, JobRow.gpus, JobRow.memory,
        select(func.max(LeaseRow.memory)).where(of_job).scalar_subquery(),
        select(func.max(LeaseRow.used)).where(of_job).scalar_subquery(),
        JobRow.utilization, JobRow.time_limit_us, JobRow.alike, JobRow.same,
        JobRow.out_of_memory, JobRow.ram_peak, JobRow.cpu_us,
    )  # fmt: skip
    rows = {row.id: row for row in connection.execute(_wanted(query, brief))}
    ids, following = _cut(query, [*rows])
    return EndedPage([EndedJob(*rows[job]) for job in ids], following)


def _wanted(query: JobQuery, columns: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
    """Return the statement for a page, and one job more, which says whether others follow."""
    # The sum is in no index: so live jobs are found by theirs, and not among those of a year.
    number = JobRow.id if query.has_ended else JobRow.id + 0
    wanted = columns.where(*_conditions(query))
    wanted = wanted.order_by(number.desc() if query.from_newest else number)
    if query.after is not None:
        wanted = wanted.where(number < query.after if query.from_newest else number > query.after)
    return wanted if query.most is None else wanted.limit(query.most + 1)


def _cut(query: JobQuery, ids: list[JobId]) -> tuple[list[JobId], JobId | None]:
    """Return the jobs of a page, and the one after which the next page begins."""
    if query.most is None or len(ids) <= query.most:
        return ids, None
    return ids[: query.most], ids[query.most - 1]


def _conditions(
    query: JobQuery, *, counts: bool = False
) -> Iterator[ColumnElement[bool] | TextClause]:
    yield from _in_state(query, counts=counts)
    if query.user is not None:
        yield JobRow.user == query.user
    if query.array is not None:
        yield JobRow.array == query.array
    if query.index is not None:
        yield JobRow.array_index == query.index
    if query.name is not None:
        # fnmatch(3) and GLOB of SQLite differ in how they negate a set.
        yield JobRow.name.op("GLOB", is_comparison=True)(query.name.replace("[!", "[^"))
        if query.name_of is not None:
            # Otherwise a pattern would find out names that are hidden.
            yield JobRow.user == query.name_of
    if query.since is not None:
        # The indexes of ends and of live jobs give the first id, without a row. From there the rows
        # are read by id, so that a page ends where it is full.
        first_ended = select(func.min(JobRow.id + 0).label("id")).where(
            JobRow.ended_at >= query.since
        )
        first_live = select(func.min(JobRow.id).label("id")).where(LIVE)
        first = union_all(first_ended, first_live).subquery()
        yield JobRow.id >= select(func.min(first.c.id)).scalar_subquery()
        # The plus keeps SQLite from reading the index of ends instead.
        yield or_(JobRow.ended_at.is_(None), _not_by_index("ended_at") >= query.since)


def _in_state(query: JobQuery, *, counts: bool) -> Iterator[ColumnElement[bool] | TextClause]:
    if query.state is None:
        if not query.ended:
            yield LIVE
    elif not query.has_ended:
        yield JobRow.state == query.state
        yield LIVE
    elif counts and query.state == State.ENDED:
        # An index has all that counts.
        yield JobRow.ended_at.is_not(None)
    else:
        yield JobRow.state == State.ENDED
        if query.state == FAILED:
            yield _has_failed()
        elif query.state != State.ENDED:
            yield JobRow.outcome == query.state


def _not_by_index(column: str) -> ColumnElement[Any]:
    return literal_column(f"+jobs.{column}", Instant)


def _has_failed() -> ColumnElement[bool]:
    """Return what `has_failed` of `domain.dependencies` is true of."""
    is_zero = JobRow.exit_code.is_not_distinct_from(0)
    return JobRow.outcome.not_in(NOT_FAILED) & ~((JobRow.outcome == Outcome.EXITED) & is_zero)
