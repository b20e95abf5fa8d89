"""What one user may have at once, so that a machine full of one user's jobs still serves others.

Checked inside the transaction that adds a job: two submissions at once cannot both slip past.
"""

from dataclasses import dataclass, field

from gpulease.errors import TooMany
from gpulease.service.ports import Submission, UserCount
from gpulease.units import MIB, format_size


@dataclass(frozen=True, slots=True)
class Quotas:
    """The bounds of each user, but for those who are none: root, and the daemon's own user."""

    waiting: int = 10_000
    """Jobs and leases in the queue."""
    waiting_bytes: int = 256 * MIB
    """Of those, what their arguments and environments take in the record."""
    holds: int = 100
    """Leases without a job, waiting or held."""
    unbounded: frozenset[int] = field(default=frozenset({0}))
    """The uids that none of it is for."""


def refuse_one_more(bounds: Quotas, order: Submission, before: UserCount) -> None:
    """Check that the user may have one more job, before it is added.

    Raises:
        TooMany: they may not.
    """
    if order.owner.uid in bounds.unbounded:
        return
    user = order.owner.user
    if before.waiting >= bounds.waiting:
        raise TooMany(
            f"cannot submit: {before.waiting} jobs of {user} wait already, "
            f"and one user may have {bounds.waiting} in the queue",
            "submit again when some have started, or cancel some; "
            f"gpulease list --user {user} shows them",
        )
    if order.holder is not None and before.holds >= bounds.holds:
        raise TooMany(
            f"cannot hold another lease: {user} has {before.holds}, "
            f"and one user may have {bounds.holds} without a job",
            f"give one back with gpulease cancel JOB; gpulease list --user {user} shows them",
        )


def refuse_too_much(bounds: Quotas, order: Submission, after: UserCount) -> None:
    """Check that what the user's waiting jobs keep is within bounds, with the new one added.

    Raises:
        TooMany: it is not.
    """
    if order.owner.uid in bounds.unbounded or after.waiting_bytes <= bounds.waiting_bytes:
        return
    raise TooMany(
        f"cannot submit: the arguments and environments of {order.owner.user}'s waiting jobs "
        f"would take more than {format_size(bounds.waiting_bytes)}, the most for one user",
        "unset large variables before you submit, or submit again when some jobs have started",
    )
