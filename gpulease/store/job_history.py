"""Ended jobs in pages, for listings: a page reads the rows that it shows and few others."""

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, exists, func, literal_column, select

from gpulease.domain.job import NOT_FAILED, Outcome
from gpulease.domain.lease import State
from gpulease.service.job_history import FAILED, EndedJob, EndedJobsQuery
from gpulease.store.engine import translate_errors
from gpulease.store.store import SqlStore
from gpulease.store.tables import HolderRow, Instant, JobRow, LeaseRow


class JobHistory:
    """Reads ended jobs."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def page(self, query: EndedJobsQuery) -> Sequence[EndedJob]:
        """Return a page of ended jobs, those with the highest ids first."""
        with translate_errors(self._store.path), self._store.engine.connect() as connection:
            return [EndedJob(*row) for row in connection.execute(_statement(query)).all()]


def _statement(query: EndedJobsQuery) -> Select[*tuple[Any, ...]]:
    of_job = LeaseRow.job == JobRow.id
    return (
        select(
            JobRow.id, JobRow.array, JobRow.array_index, JobRow.name, JobRow.user,
            exists().where(HolderRow.job == JobRow.id), JobRow.slurm_job,
            JobRow.outcome, JobRow.exit_code, JobRow.exit_signal,
            JobRow.submitted_at, JobRow.granted_at, JobRow.ended_at, JobRow.gpus, JobRow.memory,
            select(func.max(LeaseRow.memory)).where(of_job).scalar_subquery(),
            select(func.max(LeaseRow.used)).where(of_job).scalar_subquery(),
            JobRow.utilization, JobRow.time_limit_us, JobRow.alike, JobRow.same,
            JobRow.out_of_memory,
        )
        .where(*_conditions(query))
        .order_by(JobRow.id.desc())
        .limit(query.limit)
    )  # fmt: skip


def _conditions(query: EndedJobsQuery) -> Iterator[ColumnElement[bool]]:
    yield JobRow.state == State.ENDED
    if query.before is not None:
        yield JobRow.id < query.before
    if query.user is not None:
        yield JobRow.user == query.user
    if query.since is not None:
        # The index of ends gives the first id, without a row. From there the rows are read by id,
        # so that a page ends where it is full.
        first = select(func.min(JobRow.id + 0)).where(JobRow.ended_at >= query.since)
        yield JobRow.id >= first.scalar_subquery()
        yield literal_column("+jobs.ended_at", Instant) >= query.since
    if query.outcome is not None:
        yield _has_failed() if query.outcome == FAILED else JobRow.outcome == query.outcome
    if query.name is not None:
        yield JobRow.name.op("GLOB")(query.name.replace("[!", "[^"))
    if query.name_of is not None:
        yield JobRow.user == query.name_of


def _has_failed() -> ColumnElement[bool]:
    """Return what `has_failed` of `domain.dependencies` is true of."""
    is_zero = JobRow.exit_code.is_not_distinct_from(0)
    return JobRow.outcome.not_in(NOT_FAILED) & ~((JobRow.outcome == Outcome.EXITED) & is_zero)
