"""Decides about a job that uses more memory than its lease: nothing, warn, stop.

A pure rule, applied at each observation of the GPU: `OveruseState` is what is kept between two
observations, `judge` returns the next state and what to do. Instants are those of a monotonic
clock.

The time over the lease counts from one observation that shows overuse to the next. An observation
with unknown use counts neither way. Each second within the lease takes one second off, so a job
that drops below its lease for a moment gains only that moment.

The memory that a framework needs beside its pool is reserved by an estimate. A job that exceeds its
lease because the estimate was too low is warned and not stopped: its pool is within its limit, and
the user cannot change the rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, StrEnum, auto

from gpulease.units import GIB

_NOTHING = timedelta(0)
BARE_CONTEXT = 1 * GIB
"""Bytes allowed on a GPU that the job did not lease: frameworks open a context on each GPU that
they see, of 300 MiB to about 1 GiB (PyTorch issues 107667 and 28394)."""
MOST_EXCESS_OVERHEAD = 2 * GIB
"""Bytes over a lease that count as overhead, so that programs cannot take any amount outside their
pools. TensorFlow was seen to hold 1869 MiB in all (tensorflow issue 53822)."""
_WARNING_INTERVAL = timedelta(minutes=5)
"""A job that goes over its lease again within this time is not warned at once."""


class Consequence(StrEnum):
    """What happens to a job that stays over its lease."""

    WARN = "warn"
    STOP = "stop"


class OveruseAction(Enum):
    """What to do now."""

    NOTHING = auto()
    WARN = auto()
    STOP = auto()
    CLEAR = auto()
    """Tell its owner that the job is no longer about to be stopped."""


@dataclass(frozen=True, slots=True)
class OverusePolicy:
    """The settings for overuse."""

    consequence: Consequence = Consequence.STOP
    tolerance: int = 0
    """Bytes over the lease that are allowed."""
    grace: timedelta = _NOTHING
    """How long a job may be over by more than that before it is stopped."""
    elastic: bool = False
    """A job may be over its lease while no other job waits for the memory."""


@dataclass(frozen=True, slots=True)
class OveruseState:
    """How long a job has been over its lease, and what was done about it."""

    over_for: timedelta | None = None
    """Time over the lease, less time within it since; None: it is not over."""
    seen_at: timedelta | None = None
    """Time of the last observation, if it showed the job over."""
    warned: bool = False
    """The owner was warned since it went over."""
    warned_at: timedelta | None = None
    """When the owner was last warned, even about an earlier time over the lease."""
    stopped: bool = False
    """The job was asked to end because of this."""
    threatened: bool = False
    """The last notice to the owner announced a stop."""
    owed: timedelta = _NOTHING
    """For a job that is no longer over: the remaining time over the lease at `owed_at`."""
    owed_at: timedelta | None = None
    """The instant of `owed`."""
    within_since: timedelta | None = None
    """When it went back within its lease, if the owner gets a notice of that."""
    is_excused: bool = False
    """It is over only because the overhead of its framework was estimated too low."""

    def left(self, policy: OverusePolicy) -> timedelta | None:
        """Return the time until the job is stopped if nothing changes; None: it is not."""
        if self.over_for is None or self.is_excused or policy.consequence is Consequence.WARN:
            return None
        return max(policy.grace - self.over_for, _NOTHING)


def excess_overhead(memory: int, processes: Iterable[tuple[int, int]]) -> int:
    """Return the bytes over a lease of `memory` bytes that frameworks hold beside their pools.

    `processes` are those with a limited pool: what each uses, and the limit of its pools. Pools
    count with their limits, so memory within them is never taken for overhead.
    """
    known = tuple(processes)
    reserved = max(0, memory - sum(limit for _, limit in known))
    beside = sum(max(0, used - limit) for used, limit in known)
    return min(max(0, beside - reserved), MOST_EXCESS_OVERHEAD)


def judge(
    memory: int,
    used: int | None,
    before: OveruseState,
    policy: OverusePolicy,
    *,
    wanted: bool,
    now: timedelta,
    overhead: int = 0,
) -> tuple[OveruseState, OveruseAction]:
    """Return the state after one more observation, and what to do.

    Args:
        memory: leased bytes.
        used: bytes that the job's processes use on this GPU; None if unknown.
        before: the state after the observation before.
        policy: the settings.
        wanted: another job waits for memory of this GPU.
        now: the time of this observation.
        overhead: bytes over the lease that do not cause a stop (`excess_overhead`).
    """
    if used is None:
        return replace(before, seen_at=None), OveruseAction.NOTHING
    if used <= memory + policy.tolerance or (policy.elastic and not wanted):
        return _within(before, policy, now)
    state = _over(before, is_excused=used <= memory + policy.tolerance + overhead, now=now)
    if state.is_excused:
        policy = replace(policy, consequence=Consequence.WARN)
    stops = policy.consequence is Consequence.STOP
    if _should_stop(state, policy):
        return replace(state, stopped=True), OveruseAction.STOP
    if _should_warn(state, policy, now):
        return replace(state, warned=True, warned_at=now, threatened=stops), OveruseAction.WARN
    if state.threatened and not stops:
        return replace(state, threatened=False), OveruseAction.CLEAR
    return state, OveruseAction.NOTHING


def _within(
    before: OveruseState, policy: OverusePolicy, now: timedelta
) -> tuple[OveruseState, OveruseAction]:
    """Return the state of a job within its lease.

    The owner gets the all-clear once the job has stayed within for a whole grace period, so that a
    job around its limit does not cause a message each time.
    """
    quiet = OveruseState(warned_at=before.warned_at, owed=_owed(before, now), owed_at=now)
    if not before.threatened:
        return quiet, OveruseAction.NOTHING
    since = now if before.within_since is None else before.within_since
    if now - since < policy.grace:
        return replace(quiet, threatened=True, within_since=since), OveruseAction.NOTHING
    return quiet, OveruseAction.CLEAR


def _over(before: OveruseState, *, is_excused: bool, now: timedelta) -> OveruseState:
    """Return the state of a job over its lease.

    Excused time does not count towards the stop: it is paid back like time within the lease. Its
    notice announced no stop, so another one follows before the stop.
    """
    state = replace(
        before, seen_at=now, within_since=None, owed=_NOTHING, owed_at=None, is_excused=is_excused
    )
    if is_excused:
        return replace(state, over_for=_over_for(before, now), owed=_owed(before, now), owed_at=now)
    if before.is_excused:
        return replace(state, over_for=_owed(before, now), warned=False, warned_at=None)
    return replace(state, over_for=_over_for(before, now))


def _over_for(before: OveruseState, now: timedelta) -> timedelta:
    if before.over_for is None:
        return _owed(before, now)
    if before.seen_at is None:
        return before.over_for
    return before.over_for + max(now - before.seen_at, _NOTHING)


def _owed(before: OveruseState, now: timedelta) -> timedelta:
    """Return the time over the lease less the time within it since."""
    if before.over_for is not None and not before.is_excused:
        return before.over_for
    if before.owed_at is None:
        return before.owed
    return max(before.owed - max(now - before.owed_at, _NOTHING), _NOTHING)


def _should_stop(state: OveruseState, policy: OverusePolicy) -> bool:
    """Tell whether to stop the job now: only after a warning, and only once."""
    late = state.over_for is not None and state.over_for >= policy.grace
    may_stop = policy.consequence is Consequence.STOP
    return late and may_stop and state.warned and not state.stopped


def _should_warn(state: OveruseState, policy: OverusePolicy, now: timedelta) -> bool:
    if state.warned:
        return False
    warned_at = state.warned_at
    fresh = warned_at is None or now - warned_at >= _WARNING_INTERVAL
    return fresh or state.over_for is None or state.over_for >= policy.grace / 2
