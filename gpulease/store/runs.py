"""The runs of a script: what the jobs that are like another asked for and used."""

from collections.abc import Sequence

from sqlalchemy import Connection, func, or_, select

from gpulease.domain.account import Shape
from gpulease.domain.job import Outcome
from gpulease.domain.lease import State
from gpulease.domain.sizing import Run
from gpulease.store.tables import JobRow, LeaseRow

_TELLS = JobRow.out_of_memory | or_(
    (JobRow.outcome == Outcome.EXITED) & (JobRow.exit_code == 0),
    JobRow.outcome.in_((Outcome.CANCELLED, Outcome.TIME_LIMIT, Outcome.OVER_LEASE)),
)
"""Ends after which the use says something: a script that failed may have failed at its first
line."""


def runs_like(
    connection: Connection, uid: int, shape: Shape, gpus: int, most: int
) -> Sequence[Run]:
    """Return the latest runs like this one of which the use is known, latest first.

    Those that are the same in every word, or if there are none those that are alike.
    """
    like = (
        select(
            func.max(LeaseRow.memory), func.max(LeaseRow.used), JobRow.out_of_memory, JobRow.outcome
        )
        .join(LeaseRow, LeaseRow.job == JobRow.id)
        .where(JobRow.uid == uid, JobRow.alike == shape.alike, JobRow.gpus == gpus)
        .where(JobRow.state == State.ENDED, _TELLS)
        # Of one that ran out of memory, how much it had tells enough.
        .where(LeaseRow.used.is_not(None) | JobRow.out_of_memory)
        .group_by(JobRow.id)
        .order_by(JobRow.id.desc())
        .limit(most)
    )
    found = connection.execute(like.where(JobRow.same == shape.same)).all()
    if not found:
        found = connection.execute(like).all()
    return [
        Run(leased, used or 0, bool(ran_out), outcome == Outcome.OVER_LEASE)
        for leased, used, ran_out, outcome in found
    ]
