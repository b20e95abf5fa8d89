"""The memory pools of frameworks by job, and the memory that jobs leased and used by user."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from statistics import median
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Float,
    Integer,
    String,
    and_,
    case,
    cast,
    func,
    literal,
    literal_column,
    select,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import SHOWS_NO_RUN_TIME, PredictionErrors, UsageBy, UsageTotal, UserWaits
from gpulease.domain.lease import HOLDS_MEMORY
from gpulease.domain.memory_estimate import LATEST, OverheadKey
from gpulease.errors import RecordUnwritable
from gpulease.service.usage import PoolSeen
from gpulease.store.statements import LIVE
from gpulease.store.store import SqlStore
from gpulease.store.tables import Instant, JobRow, LeaseRow, PoolRow

_MOST_READ = 20_000
"""The most rows that a start of the daemon reads."""


class PoolUsage:
    """Stores and reads the observed memory pools of frameworks."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def record(self, seen: Iterable[PoolSeen]) -> None:
        """Store observations; each replaces the former one of the same pool.

        Raises:
            RecordUnwritable: the file cannot be written now.
        """
        rows = [_values(each) for each in seen]
        if not rows:
            return
        adding = upsert(PoolRow)
        changed = {
            name: adding.excluded[name] for name in ("version", "pool_limit", "pool_peak", "beside")
        }
        with self._store.write_connection() as connection:
            connection.execute(adding.on_conflict_do_update(set_=changed), rows)

    def of(self, job: JobId) -> Sequence[PoolSeen]:
        """Return the observations of one job."""
        with self._store.reading() as connection:
            rows = connection.execute(select(PoolRow).where(PoolRow.job == job))
            return [_seen(row) for row in rows]

    def observed(self) -> Mapping[OverheadKey, Mapping[int, Sequence[int]]]:
        """Return the overheads of the latest jobs in bytes, by key and uid, latest first.

        If the file cannot be read, return nothing: jobs start with the default overhead.
        """
        found: dict[OverheadKey, dict[int, list[int]]] = {}
        wanted = (
            select(PoolRow)
            .where(PoolRow.beside.is_not(None))
            .order_by(PoolRow.job.desc())
            .limit(_MOST_READ)
        )
        with suppress(RecordUnwritable), self._store.reading() as connection:
            for row in connection.execute(wanted):
                of_user = found.setdefault(_seen(row).kind, {}).setdefault(row.uid, [])
                if len(of_user) < LATEST and row.beside is not None:
                    of_user.append(row.beside)
        return found


def _values(seen: PoolSeen) -> dict[str, object]:
    return {
        "job": seen.job,
        "gpu": seen.gpu,
        "framework": seen.kind.framework,
        "version": seen.version,
        "uid": seen.uid,
        "model": seen.kind.model,
        "driver": seen.kind.driver,
        "gpus": seen.kind.gpus,
        "pool_limit": seen.limit,
        "pool_peak": seen.peak,
        "beside": seen.overhead,
        "at": seen.at,
    }


def _seen(row: Any) -> PoolSeen:
    return PoolSeen(
        job=JobId(row.job),
        uid=row.uid,
        gpu=GpuUuid(row.gpu),
        kind=OverheadKey(row.framework, row.model, row.driver, row.gpus),
        version=row.version,
        limit=row.pool_limit,
        peak=row.pool_peak,
        overhead=row.beside,
        at=row.at,
    )


_MICROSECONDS = 1_000_000
_BY_USER = literal_column("+jobs.user", String)
"""Without the index of users: that of ends leads to the few jobs that count."""


def _key(by: UsageBy, now: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return what is summed up by; the functions are those of sqlite.org/lang_datefunc.html."""
    ended = func.coalesce(JobRow.ended_at, now)
    at = cast(ended, Integer) / _MICROSECONDS, "unixepoch", "localtime"
    match by:
        case UsageBy.USER:
            return _BY_USER
        case UsageBy.GROUP:
            return literal_column("+jobs.gid", Integer)
        case UsageBy.WEEK:
            return func.date(*at, "weekday 0", "-6 days", type_=String)
        case UsageBy.MONTH:
            return func.date(*at, "start of month", type_=String)


def _waited() -> ColumnElement[float]:
    """Return the seconds from the submission of a job to its leases."""
    waited = cast(JobRow.granted_at - JobRow.submitted_at, Float) / _MICROSECONDS
    # After a change of the clock.
    return func.max(waited, 0.0)


def _ended_or_holds(since: datetime | None) -> ColumnElement[bool]:
    """Select the jobs that ended from `since` on, and those that hold memory now."""
    ended = JobRow.ended_at.is_not(None) if since is None else JobRow.ended_at >= since
    return ended | and_(JobRow.state.in_(HOLDS_MEMORY), LIVE)


class UsageTotals:
    """Sums the memory that jobs leased and used."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def totals(
        self, by: UsageBy, user: str | None, since: datetime | None, now: datetime
    ) -> Sequence[UsageTotal]:
        """Return the totals of jobs that held memory, for one user or all, by their key.

        They are of the jobs that ended from `since` on, None for no bound, and of those that hold
        memory `now`, up to now. Waits are those of `waits`.
        """
        at = literal(now, Instant())
        key = _key(by, at)
        held_for = func.coalesce(LeaseRow.released_at, at) - LeaseRow.granted_at
        held_for = func.max(cast(held_for, Float) / _MICROSECONDS, 0.0)
        # Of a job that runs, its peak until now.
        running = case((LeaseRow.released_at.is_(None), LeaseRow.peak))
        used = func.coalesce(LeaseRow.used, running)
        known = case((used.is_not(None), held_for))
        # A job on several GPUs waited once.
        counts = LeaseRow.place == 0
        if since is not None:
            counts = and_(counts, JobRow.granted_at >= since)
        wanted = (
            select(
                key,
                func.count(JobRow.id.distinct()),
                func.count(JobRow.id.distinct()).filter(JobRow.out_of_memory),
                func.total(held_for),
                func.total(held_for * LeaseRow.memory),
                func.total(held_for * used),
                func.total(held_for * func.max(LeaseRow.memory - used, 0)),
                func.avg(_waited()).filter(counts),
                func.max(_waited()).filter(counts),
                func.total(known * LeaseRow.memory),
                func.total(known),
                func.sum(JobRow.cpu_us).filter(LeaseRow.place == 0) / float(_MICROSECONDS),
                func.max(JobRow.ram_peak),
            )
            .join(LeaseRow, LeaseRow.job == JobRow.id)
            .where(_ended_or_holds(since))
            .group_by(key)
            .order_by(key)
        )
        if user is not None:
            wanted = wanted.where(JobRow.user == user)
        with self._store.reading() as connection:
            return [UsageTotal(str(key), *row) for key, *row in connection.execute(wanted)]

    def predictions(self, user: str | None, since: datetime | None) -> PredictionErrors:
        """Return how good predictions were, for the latest ended jobs of one user or all.

        `since` is the earliest end; None for no bound.
        """
        # SQLite subtracts: reading the instants of so many jobs takes five times as long.
        ran_us = cast(JobRow.ended_at - JobRow.started_at, Integer)
        shows_run_time = JobRow.outcome.not_in(SHOWS_NO_RUN_TIME)
        wanted = (
            select(
                func.abs(cast(JobRow.granted_at - JobRow.predicted_start_at, Integer)),
                case((shows_run_time, func.abs(ran_us - JobRow.predicted_run_us))),
                JobRow.granted_at.between(JobRow.predicted_from_at, JobRow.predicted_until_at),
            )
            .where(JobRow.ended_at.is_not(None), JobRow.started_at.is_not(None))
            .order_by(JobRow.ended_at.desc())
            .limit(_MOST_READ)
        )
        if user is not None:
            wanted = wanted.where(JobRow.user == user)
        if since is not None:
            wanted = wanted.where(JobRow.ended_at >= since)
        with self._store.reading() as connection:
            rows = connection.execute(wanted).all()
        starts = [start / _MICROSECONDS for start, _, _ in rows if start is not None]
        runs = [run / _MICROSECONDS for _, run, _ in rows if run is not None]
        hits = [is_in_range for _, _, is_in_range in rows if is_in_range is not None]
        return PredictionErrors(
            len(starts),
            median(starts) if starts else None,
            len(runs),
            median(runs) if runs else None,
            len(hits),
            sum(hits),
        )

    def waits(self, since: datetime) -> Mapping[str, UserWaits]:
        """Return how long the jobs that got memory from `since` on had waited for it, by user.

        It is the one meaning of a mean wait, whether these jobs have ended or not.
        """
        wanted = (
            select(JobRow.user, func.count(), func.avg(_waited()), func.max(_waited()))
            .where(_ended_or_holds(since), JobRow.granted_at >= since)
            .group_by(_BY_USER)
        )
        with self._store.reading() as connection:
            return {user: UserWaits(*row) for user, *row in connection.execute(wanted)}
