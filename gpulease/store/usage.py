"""The memory pools of frameworks by job, and the memory that ended jobs leased and used by user."""

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
    cast,
    func,
    literal_column,
    select,
)
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.orm import Session

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import PredictionErrors, UsageBy, UsageTotal, UserWaits
from gpulease.domain.lease import HOLDS_MEMORY, State
from gpulease.domain.memory_estimate import LATEST, OverheadKey
from gpulease.errors import RecordUnwritable
from gpulease.service.usage import PoolSeen
from gpulease.store.engine import translate_errors
from gpulease.store.statements import LIVE
from gpulease.store.store import SqlStore
from gpulease.store.tables import JobRow, LeaseRow, PoolRow

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
        with translate_errors(self._store.path), Session(self._store.engine) as session:
            rows = session.scalars(select(PoolRow).where(PoolRow.job == job))
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
        with (
            suppress(RecordUnwritable),
            translate_errors(self._store.path),
            Session(self._store.engine) as session,
        ):
            for row in session.scalars(wanted):
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


def _seen(row: PoolRow) -> PoolSeen:
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


_ENDED = "jobs.ended_at / 1000000, 'unixepoch', 'localtime'"
_KEYS: dict[UsageBy, ColumnElement[Any]] = {
    UsageBy.USER: _BY_USER,
    UsageBy.GROUP: literal_column("+jobs.gid", Integer),
    UsageBy.WEEK: literal_column(f"date({_ENDED}, 'weekday 0', '-6 days')", String),
    UsageBy.MONTH: literal_column(f"date({_ENDED}, 'start of month')", String),
}
"""The functions are those of sqlite.org/lang_datefunc.html."""


class UsageTotals:
    """Sums the memory that jobs leased and used."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def totals(self, by: UsageBy, user: str | None, since: datetime | None) -> Sequence[UsageTotal]:
        """Return the totals of ended jobs with known use, for one user or all, by their key.

        `since` is the earliest end; None for no bound.
        """
        key = _KEYS[by]
        held_for = cast(LeaseRow.released_at - LeaseRow.granted_at, Float) / _MICROSECONDS
        waited = cast(JobRow.granted_at - JobRow.submitted_at, Float) / _MICROSECONDS
        # After a change of the clock.
        waited = func.max(waited, 0.0)
        wanted = (
            select(
                key,
                func.count(JobRow.id.distinct()),
                func.count(JobRow.id.distinct()).filter(JobRow.out_of_memory),
                func.total(held_for),
                func.total(held_for * LeaseRow.memory),
                func.total(held_for * LeaseRow.used),
                func.total(held_for * func.max(LeaseRow.memory - LeaseRow.used, 0)),
                # A job on several GPUs waited once.
                func.avg(waited).filter(LeaseRow.place == 0),
                func.max(waited),
            )
            .join(LeaseRow, LeaseRow.job == JobRow.id)
            .where(JobRow.state == State.ENDED, LeaseRow.used.is_not(None))
            .group_by(key)
            .order_by(key)
        )
        if user is not None:
            wanted = wanted.where(JobRow.user == user)
        if since is not None:
            wanted = wanted.where(JobRow.ended_at >= since)
        with translate_errors(self._store.path), Session(self._store.engine) as session:
            return [UsageTotal(str(key), *row) for key, *row in session.execute(wanted)]

    def predictions(self, user: str | None, since: datetime | None) -> PredictionErrors:
        """Return how good predictions were, for the latest ended jobs of one user or all.

        `since` is the earliest end; None for no bound.
        """
        # SQLite subtracts: reading the instants of so many jobs takes five times as long.
        ran_us = cast(JobRow.ended_at - JobRow.started_at, Integer)
        wanted = (
            select(
                func.abs(cast(JobRow.granted_at - JobRow.predicted_start_at, Integer)),
                func.abs(ran_us - JobRow.predicted_run_us),
            )
            .where(JobRow.ended_at.is_not(None), JobRow.started_at.is_not(None))
            .order_by(JobRow.ended_at.desc())
            .limit(_MOST_READ)
        )
        if user is not None:
            wanted = wanted.where(JobRow.user == user)
        if since is not None:
            wanted = wanted.where(JobRow.ended_at >= since)
        with translate_errors(self._store.path), Session(self._store.engine) as session:
            rows = session.execute(wanted).all()
        starts = [start / _MICROSECONDS for start, _ in rows if start is not None]
        runs = [run / _MICROSECONDS for _, run in rows if run is not None]
        return PredictionErrors(
            len(starts),
            median(starts) if starts else None,
            len(runs),
            median(runs) if runs else None,
        )

    def waits(self, since: datetime) -> Mapping[str, UserWaits]:
        """Return how long the jobs that got memory from `since` on had waited for it, by user."""
        waited = cast(JobRow.granted_at - JobRow.submitted_at, Float) / _MICROSECONDS
        # After a change of the clock.
        waited = func.max(waited, 0.0)
        wanted = (
            select(JobRow.user, func.count(), func.avg(waited), func.max(waited))
            .where((JobRow.ended_at >= since) | and_(JobRow.state.in_(HOLDS_MEMORY), LIVE))
            .where(JobRow.granted_at >= since)
            .group_by(_BY_USER)
        )
        with translate_errors(self._store.path), Session(self._store.engine) as session:
            return {user: UserWaits(*row) for user, *row in session.execute(wanted)}
