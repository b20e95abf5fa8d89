"""Refusals of what the limits of a user never allow, or do not allow now.

Runs inside the transaction that adds or changes the job. What waits for a limit waits in the queue:
see `domain.limits`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.limits import (
    Beyond,
    LimitCheck,
    OverLimit,
    RecentUse,
    UserLimits,
    memory_of,
    never_within,
)
from gpulease.errors import BadValue, CannotLease, TooMany
from gpulease.service.ports import Submission
from gpulease.units import format_span


def with_time_limit(submission: Submission, limits: UserLimits) -> Submission:
    """Return `submission`; if it names no time limit, with the usual one of its user.

    Raises:
        BadValue: it names one that is too long.
    """
    hold = submission.holder is not None
    limit = submission.claim.time_limit
    if limit is None:
        usual = limits.usual_time(hold=hold)
        limit = None if usual is None else usual[0]
        return replace(submission, claim=replace(submission.claim, time_limit=limit))
    refuse_longer(limit, limits, "hold a lease" if hold else "submit", hold=hold)
    return submission


def refuse_longer(limit: timedelta, limits: UserLimits, verb: str, *, hold: bool) -> None:
    """Check that a time limit is within what a user may ask for.

    Raises:
        BadValue: it is longer.
    """
    longest = limits.longest(hold=hold)
    if longest is None or limit <= longest[0]:
        return
    most, setting = format_span(longest[0]), longest[1]
    raise BadValue(
        f"cannot {verb}: a time limit of {format_span(limit)} is over the {most} that the "
        f"settings allow ({setting})",
        f"ask for at most {most}; an admin can extend the time of a job further",
    )


def refuse_what_is_never_within(claim: Claim, limits: UserLimits, largest: int, user: str) -> None:
    """Check that a user could have `claim` while they hold nothing else.

    Raises:
        CannotLease: a limit is smaller.
    """
    found = never_within(limits, claim, largest, user)
    if found is not None:
        raise CannotLease(*found)


def refuses_more(limits: UserLimits) -> bool:
    """Return whether what is over a limit is refused: else it waits in the queue."""
    return limits.over_limit is not Beyond.WAIT and limits.restrict_starts


def refuse_over_limit(
    new: Sequence[Job],
    others: Iterable[Job],
    limits: UserLimits,
    used: Mapping[int, RecentUse],
    largest: int,
    at: datetime,
    verb: str = "submit",
) -> None:
    """Check that a job, or the elements of an array, are within the limits of their user.

    This is so if the limits refuse more. The user's queued jobs count as if they ran, so the user
    never has more than the limit. A job over a limit of a group waits: it may be for others' jobs.

    Raises:
        TooMany: it is not.
    """
    if not refuses_more(limits):
        return
    owner, ids = new[0].owner, {each.id for each in new}
    mine = [each for each in others if each.owner.uid == owner.uid and each.id not in ids]
    holders = (each for each in mine if each.holds_memory)
    limits = replace(limits, groups=())
    check = LimitCheck.of({owner.uid: limits}, used, holders, largest, at)
    for each in mine:
        if not each.holds_memory:
            check.start(each, memory_of(each.claim, largest))
    for fitting, each in enumerate(new):
        over = check.exceeded_by(each)
        if over is not None:
            raise _too_many(over, owner.user, fitting, len(new), verb)
        check.start(each, memory_of(each.claim, largest))


def _too_many(over: OverLimit, user: str, fitting: int, elements: int, verb: str) -> TooMany:
    what = "" if elements == 1 else f" an array of {elements} elements"
    limit = f"cannot {verb}{what}: the limit of {user} is {over.most} ({over.setting})"
    if fitting > 0:
        return TooMany(
            f"{limit}, and only {fitting} of them fit beside the jobs that run or wait",
            f"{verb} at most {fitting} elements now; gpulease list --user {user} shows the jobs",
        )
    return TooMany(
        f"{limit}, and {over.has}, with what waits",
        f"{verb} again when some jobs have ended; gpulease list --user {user} shows them",
    )
