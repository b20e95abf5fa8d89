"""What to do about a lease under which nothing happens while others wait for the memory.

A pure rule, like the one of `overuse.py`. Nothing happens when the job computes on none of its
GPUs and what it holds on each stays the same. Where one of these cannot be told, the job counts as
busy: idleness has to be seen.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, StrEnum, auto

_NOTHING = timedelta(0)


class Release(StrEnum):
    """What becomes of a lease that is not used while others wait."""

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
    """What an admin lets leases do."""

    release: Release = Release.OFF
    after: timedelta = timedelta(minutes=30)
    """How long nothing may happen before the owner is told."""
    grace: timedelta = timedelta(minutes=10)
    """Between that and the release."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What one look shows of one GPU of a job; unknown is None."""

    utilization: int | None
    """Percent, of the job; of the whole GPU where the job cannot be told apart."""
    used: int | None
    """Bytes, of the job."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """How a job rests."""

    last: tuple[Activity, ...] = ()
    """What the last look showed, GPU by GPU."""
    seen_at: timedelta | None = None
    """When that was, if it showed nothing happening."""
    idle_for: timedelta | None = None
    """For how long nothing was seen to happen; None: it was busy."""
    warned_for: timedelta | None = None
    """For how long of that its owner knows that the lease goes if this goes on."""
    released: bool = False

    def left(self, policy: IdlePolicy) -> timedelta | None:
        """Return how long until the lease goes, if nothing changes; None: it does not."""
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
    """Return how a job rests after one more look, and what to do about it.

    Args:
        seen: what the look shows of each of its GPUs, always in the same order.
        before: how it rested after the look before.
        policy: what is let be.
        wanted: somebody waits for memory of one of its GPUs.
        kept: its owner said that it is to be kept for now.
        now: when this look was, by a clock that nobody can set.
    """
    if kept or _is_busy(seen, before.last):
        return IdleState(seen), IdleAction.NOTHING
    went = _NOTHING if before.seen_at is None else max(now - before.seen_at, _NOTHING)
    idle_for = (before.idle_for or _NOTHING) + went
    rest = replace(before, last=seen, seen_at=now, idle_for=idle_for)
    if policy.release is Release.OFF or not wanted or idle_for < policy.after:
        return replace(rest, warned_for=None), IdleAction.NOTHING
    if before.warned_for is None:
        return replace(rest, warned_for=_NOTHING), IdleAction.WARN
    rest = replace(rest, warned_for=before.warned_for + went)
    late = before.warned_for + went >= policy.grace
    if late and policy.release is Release.RELEASE and not rest.released:
        return replace(rest, released=True), IdleAction.RELEASE
    return rest, IdleAction.NOTHING


def _is_busy(seen: tuple[Activity, ...], last: tuple[Activity, ...]) -> bool:
    """Tell whether something happens, or may happen; the first look cannot tell that nothing does.

    Memory is compared with the look before, so that what grows by a little at a time is busy.
    """
    if len(seen) != len(last):
        return True
    return any(
        each.utilization != 0 or each.used is None or each.used != former.used
        for each, former in zip(seen, last, strict=True)
    )
