"""Decides about idle leases while other jobs wait for the memory: nothing, warn, release.

A pure rule. A job is idle when it computes on none of its GPUs and its memory in use does not
change. If either is unknown, the job counts as busy.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, StrEnum, auto

_NOTHING = timedelta(0)


class Release(StrEnum):
    """What happens to an idle lease while other jobs wait."""

    OFF = "off"
    WARN = "warn"
    RELEASE = "release"


class IdleAction(Enum):
    """What to do now."""

    NOTHING = auto()
    WARN = auto()
    RELEASE = auto()


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """The settings for idle leases."""

    release: Release = Release.OFF
    after: timedelta = timedelta(minutes=30)
    """Idle time before the owner is warned."""
    grace: timedelta = timedelta(minutes=10)
    """Time between the warning and the release."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The use of one of a job's GPUs at one moment; None for unknown."""

    utilization: int | None
    """Percent, of the job; of the whole GPU if it is not reported by process."""
    used: int | None
    """Bytes that the job uses."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """The idle state of a job between two observations."""

    last: tuple[Activity, ...] = ()
    """The last observation, one for each GPU."""
    seen_at: timedelta | None = None
    """Time of the last observation, if it showed the job idle."""
    idle_for: timedelta | None = None
    """How long the job has been idle; None: it was busy."""
    warned_for: timedelta | None = None
    """Time since the owner was warned; None: not warned."""
    released: bool = False

    def left(self, policy: IdlePolicy) -> timedelta | None:
        """Return the time until the release if nothing changes; None for no release."""
        if self.warned_for is None or policy.release is not Release.RELEASE:
            return None
        return max(policy.grace - self.warned_for, _NOTHING)


def judge_idleness(
    seen: tuple[Activity, ...],
    before: IdleState,
    policy: IdlePolicy,
    *,
    wanted: bool,
    kept: bool,
    now: timedelta,
) -> tuple[IdleState, IdleAction]:
    """Return the idle state after one more observation, and what to do.

    Args:
        seen: the activity on each of its GPUs, always in the same order.
        before: the state after the observation before.
        policy: the settings.
        wanted: another job waits for memory of one of its GPUs.
        kept: the owner asked to keep the lease for now.
        now: the time of this observation, by a monotonic clock.
    """
    if kept or _is_busy(seen, before.last):
        return IdleState(seen), IdleAction.NOTHING
    elapsed = _NOTHING if before.seen_at is None else max(now - before.seen_at, _NOTHING)
    idle_for = (before.idle_for or _NOTHING) + elapsed
    state = replace(before, last=seen, seen_at=now, idle_for=idle_for)
    if policy.release is Release.OFF or not wanted or idle_for < policy.after:
        return replace(state, warned_for=None), IdleAction.NOTHING
    if before.warned_for is None:
        return replace(state, warned_for=_NOTHING), IdleAction.WARN
    state = replace(state, warned_for=before.warned_for + elapsed)
    late = before.warned_for + elapsed >= policy.grace
    if late and policy.release is Release.RELEASE and not state.released:
        return replace(state, released=True), IdleAction.RELEASE
    return state, IdleAction.NOTHING


def _is_busy(seen: tuple[Activity, ...], last: tuple[Activity, ...]) -> bool:
    """Tell whether a job is busy or may be; the first observation always counts as busy.

    Memory is compared with the observation before, so slow growth counts as busy.
    """
    if len(seen) != len(last):
        return True
    return any(
        each.utilization != 0 or each.used is None or each.used != former.used
        for each, former in zip(seen, last, strict=True)
    )
