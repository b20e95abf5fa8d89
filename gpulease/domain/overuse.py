"""What to do about a lease that holds more than it was granted.

A pure rule, asked at each look at the GPU: `Standing` is what is remembered of a lease between two
looks, `judge` says how it stands after one more, and what to do. All instants are readings of a
clock that nobody can set, as spans since whenever it began.

What is counted is the time for which a lease was *seen* to be over: from one look that showed it to
the next one. A look that could not tell counts for nothing, neither way. Time within the lease pays
back what was over, second for second, so that who goes back for a moment gains that moment alone.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, StrEnum, auto

from gpulease.units import GIB

_NOTHING = timedelta(0)
BARE_CONTEXT = 1 * GIB
"""What a process may hold on a GPU that its job did not lease: frameworks open a context on each
GPU that they see, which takes 300 MiB to about 1 GiB (PyTorch issues 107667 and 28394)."""
_QUIET_FOR = timedelta(minutes=5)
"""So long a lease that comes and goes over its edge is not warned at once again each time."""


class Consequence(StrEnum):
    """What becomes of a job that stays over its lease."""

    WARN = "warn"
    STOP = "stop"


class OveruseAction(Enum):
    """What to do now."""

    NOTHING = auto()
    WARN = auto()
    STOP = auto()
    CLEAR = auto()
    """Tell its owner that what they were told of does not come."""


@dataclass(frozen=True, slots=True)
class OverusePolicy:
    """What an admin lets jobs do."""

    consequence: Consequence = Consequence.STOP
    tolerance: int = 0
    """Bytes over the lease that are let be."""
    grace: timedelta = _NOTHING
    """How long a lease may be over by more than that, before the job is stopped."""
    elastic: bool = False
    """A lease may be over while nobody waits for the memory."""


@dataclass(frozen=True, slots=True)
class OveruseState:
    """How a lease stands: for how long it has been over, and what was done about it."""

    over_for: timedelta | None = None
    """For how long it was seen to be over, less what was paid back; None: it is not over."""
    seen_at: timedelta | None = None
    """When the last look saw it over; None if the last look did not."""
    warned: bool = False
    """Its owner was told, since it has been over."""
    warned_at: timedelta | None = None
    """When its owner was last told, also if that was another time."""
    stopped: bool = False
    """The job was asked to go for it."""
    threatened: bool = False
    """The last that its owner was told is that the job is stopped unless that ends."""
    owed: timedelta = _NOTHING
    """Of one that is not over any more: for how long it was, less what was paid back by then."""
    owed_at: timedelta | None = None
    """When that was."""
    within_since: timedelta | None = None
    """Since when it is not over any more, where its owner is to be told of that."""

    def left(self, policy: OverusePolicy) -> timedelta | None:
        """Return how long until the job is stopped, if nothing changes; None: it is not."""
        if self.over_for is None or policy.consequence is Consequence.WARN:
            return None
        return max(policy.grace - self.over_for, _NOTHING)


def judge(
    memory: int,
    used: int | None,
    before: OveruseState,
    policy: OverusePolicy,
    *,
    wanted: bool,
    now: timedelta,
) -> tuple[OveruseState, OveruseAction]:
    """Return how a lease stands after one more look, and what to do about it.

    Args:
        memory: leased bytes.
        used: bytes that the job's processes use of this GPU; None where nobody can tell.
        before: how it stood after the look before.
        policy: what is let be.
        wanted: somebody waits for memory of this GPU.
        now: when this look was.
    """
    if used is None:
        return replace(before, seen_at=None), OveruseAction.NOTHING
    if used <= memory + policy.tolerance or (policy.elastic and not wanted):
        return _within(before, policy, now)
    over_for = _over_for(before, now)
    standing = replace(
        before, over_for=over_for, seen_at=now, within_since=None, owed=_NOTHING, owed_at=None
    )
    stops = policy.consequence is Consequence.STOP
    if _is_to_stop(standing, policy):
        return replace(standing, stopped=True), OveruseAction.STOP
    if _is_to_be_told(standing, policy, now):
        return replace(standing, warned=True, warned_at=now, threatened=stops), OveruseAction.WARN
    if standing.threatened and not stops:
        return replace(standing, threatened=False), OveruseAction.CLEAR
    return standing, OveruseAction.NOTHING


def _within(
    before: OveruseState, policy: OverusePolicy, now: timedelta
) -> tuple[OveruseState, OveruseAction]:
    """Return how a lease stands that is not over.

    That a threat is over is told when the lease has stayed within for a whole grace: one that comes
    and goes over its edge is not told so each time.
    """
    quiet = OveruseState(warned_at=before.warned_at, owed=_owed(before, now), owed_at=now)
    if not before.threatened:
        return quiet, OveruseAction.NOTHING
    since = now if before.within_since is None else before.within_since
    if now - since < policy.grace:
        return replace(quiet, threatened=True, within_since=since), OveruseAction.NOTHING
    return quiet, OveruseAction.CLEAR


def _over_for(before: OveruseState, now: timedelta) -> timedelta:
    if before.over_for is None:
        return _owed(before, now)
    if before.seen_at is None:
        return before.over_for
    return before.over_for + max(now - before.seen_at, _NOTHING)


def _owed(before: OveruseState, now: timedelta) -> timedelta:
    """Return what is left of the time over the lease, after the time within it since."""
    if before.over_for is not None:
        return before.over_for
    if before.owed_at is None:
        return before.owed
    return max(before.owed - max(now - before.owed_at, _NOTHING), _NOTHING)


def _is_to_stop(standing: OveruseState, policy: OverusePolicy) -> bool:
    """Tell whether it is time: never unwarned, and once is enough."""
    late = standing.over_for is not None and standing.over_for >= policy.grace
    may_stop = policy.consequence is Consequence.STOP
    return late and may_stop and standing.warned and not standing.stopped


def _is_to_be_told(standing: OveruseState, policy: OverusePolicy, now: timedelta) -> bool:
    if standing.warned:
        return False
    told_at = standing.warned_at
    fresh = told_at is None or now - told_at >= _QUIET_FOR
    return fresh or standing.over_for is None or standing.over_for >= policy.grace / 2
