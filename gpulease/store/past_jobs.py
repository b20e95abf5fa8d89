"""The jobs that ended lately, as the queue learns from them. Read once, when the daemon starts."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

from sqlalchemy import Connection, func, select

from gpulease.domain.job import CommandFingerprint, Outcome, Owner
from gpulease.domain.lease import Claim
from gpulease.service.ports import PastJob
from gpulease.store.tables import JobRow, LeaseRow
from gpulease.units import Share

_MOST_READ = 50_000
"""The latest jobs that a start of the daemon reads, in about a second."""


def ended_since(connection: Connection, since: datetime) -> Sequence[PastJob]:
    """Return the latest jobs that ended since then after they held memory, the earliest first."""
    leased = select(func.sum(LeaseRow.memory)).where(LeaseRow.job == JobRow.id).scalar_subquery()
    wanted = (
        select(
            JobRow.uid, JobRow.gid, JobRow.user, JobRow.memory, JobRow.share, JobRow.gpus,
            JobRow.exclusive, JobRow.time_limit_us, JobRow.alike, JobRow.same,
            JobRow.submitted_at, JobRow.granted_at, JobRow.started_at, JobRow.ended_at,
            JobRow.outcome, JobRow.utilization, leased.label("leased"),
        )
        .where(JobRow.ended_at >= since, JobRow.granted_at.is_not(None), leased.is_not(None))
        .order_by(JobRow.ended_at.desc())
        .limit(_MOST_READ)
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
    return PastJob(
        owner=Owner(row.uid, row.gid, row.user),
        claim=claim,
        fingerprint=None if row.alike is None else CommandFingerprint(row.alike, row.same),
        submitted_at=row.submitted_at,
        granted_at=row.granted_at,
        started_at=row.started_at,
        released_at=max(row.ended_at, row.granted_at),
        memory=row.leased,
        outcome=Outcome(row.outcome),
        utilization=row.utilization,
    )
