"""What is shown of leases: what they hold, what holds them, and what comes of it.

What is told of those who wait, and of what they ask for.

Why a job waits, and how it ended, in a sentence and as a number.

Instants as the wire has them: ISO 8601, UTC, milliseconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from gpulease.domain.enforcement import UncoveredProcess, with_watch_level
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.idle import Release
from gpulease.domain.job import Job, Outcome
from gpulease.domain.lease import Claim, Lease, State
from gpulease.domain.overuse import Consequence, OverusePolicy
from gpulease.domain.placement import Obstacle, ObstacleKind
from gpulease.domain.plan import Plan, WaitReason
from gpulease.errors import EXIT_TIME_LIMIT, split_hint, with_hint
from gpulease.service.idleness import IdleWatch
from gpulease.service.observation import Observation
from gpulease.service.overuse import OveruseWatch
from gpulease.service.scheduler import Scheduler
from gpulease.service.usage import PoolSeen
from gpulease.units import Share
from gpulease.wire.requests import spoken
from gpulease.wire.views import (
    ClaimView,
    EnforcementLevelView,
    LeaseView,
    OveruseView,
    PoolView,
    RefusalView,
)


def instant(at: datetime | None) -> str | None:
    """Return an instant as text; None stays None."""
    if at is None:
        return None
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def pool_view(seen: PoolSeen, lease: Lease) -> PoolView:
    """Return what is known of a pool in a lease as a wire object."""
    charged = None if seen.limit is None else max(0, lease.memory - seen.limit)
    return PoolView(
        framework=seen.kind.framework,
        version=seen.version,
        limit=seen.limit,
        peak=seen.peak,
        charged=charged,
        beside=seen.overhead,
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change while the daemon runs."""

    driver: Callable[[], str | None]
    simulated: bool
    directory_of: Callable[[JobId], Path]
    """Where a job's record, output and socket are."""
    holds: "Rungs"
    unheld: Callable[[JobId], Sequence[UncoveredProcess]] = lambda _: ()
    pools_of: Callable[[Job], Sequence[PoolSeen]] = lambda _: ()


class Rungs(Protocol):
    """What holds leases on this machine."""

    @property
    def everywhere(self) -> tuple[str, ...]:
        """The rungs on which all leases stand that are granted now."""

    def rungs(self) -> list[EnforcementLevelView]:
        """Return each rung, and what there is to say of it."""


@dataclass(frozen=True, slots=True)
class Watches:
    """What is known of leases that hold too much, and of jobs that do nothing."""

    overuse: OveruseWatch
    idle: IdleWatch


def overuse_view(policy: OverusePolicy) -> OveruseView:
    """Return what becomes of jobs that are over their lease as a wire object."""
    return OveruseView(
        policy.consequence is Consequence.STOP,
        policy.tolerance,
        policy.grace.total_seconds(),
        policy.elastic,
    )


class LeaseViews:
    """Draws the leases of jobs from the keeper's latest look."""

    def __init__(self, keeper: Scheduler, machine: Machine, watches: Watches) -> None:
        self._keeper = keeper
        self._machine = machine
        self._overuse = watches.overuse
        self._idle = watches.idle
        self._used: tuple[Observation | None, dict[tuple[JobId, GpuUuid], int]] = (None, {})

    def of(self, job: Job, pools: Sequence[PoolSeen]) -> list[LeaseView]:
        """Return the leases of a job; `pools` are those of its frameworks."""
        seen = self._keeper.seen
        used = self._used_by_job()
        peaks = self._keeper.peaks.by_lease
        return [
            LeaseView(
                gpu=lease.gpu,
                memory=lease.memory,
                used=seen.used(job.id, lease.gpu, used) if seen and job.holds_memory else None,
                peak=peaks.get((job.id, lease.gpu), lease.peak),
                enforced_by=self._rungs(job, lease),
                driver_limit=lease.driver_limit,
                needed=lease.used,
                pools=[pool_view(each, lease) for each in pools if each.gpu == lease.gpu],
                **self._over(job, lease.gpu, seen),
            )
            for lease in job.leases
        ]

    def _over(self, job: Job, gpu: GpuUuid, seen: Observation | None) -> dict[str, str | None]:
        """Return since when a lease is over, and when that ends its job."""
        standing = self._overuse.state(job.id, gpu)
        if standing.over_for is None or seen is None or job.state is not State.ACTIVE:
            return {}
        left = standing.left(self._overuse.policy(job))
        return {
            "over_since_at": instant(seen.at - standing.over_for),
            "stops_at": None if left is None else instant(seen.at + left),
        }

    def idle(self, job: Job) -> tuple[str | None, str | None]:
        """Return since when a job does nothing, and when that ends it, where that matters."""
        seen, rest = self._keeper.seen, self._idle.state(job.id)
        policy = self._idle.policy(job)
        if seen is None or rest.idle_for is None or policy.release is Release.OFF:
            return None, None
        if job.kept_until_at is not None and seen.at < job.kept_until_at:
            # Kept since the last look: its time counts anew afterwards.
            return None, None
        left = rest.left(policy)
        ends_at = None if left is None else seen.at + left
        return instant(seen.at - rest.idle_for), instant(ends_at)

    def _rungs(self, job: Job, lease: Lease) -> list[str]:
        """Return what holds the lease, or held it at its end."""
        if not job.holds_memory:
            return list(lease.enforced_by or ())
        rungs = self._machine.holds.everywhere if lease.enforced_by is None else lease.enforced_by
        seen = self._keeper.seen
        stops = self._overuse.stops(job) and not (seen is not None and seen.is_blind)
        return list(with_watch_level(rungs, stops=stops))

    def _used_by_job(self) -> Mapping[tuple[JobId, GpuUuid], int]:
        """Return what each job uses on each GPU, summed once for each look."""
        seen = self._keeper.seen
        if seen is not None and self._used[0] is not seen:
            self._used = seen, seen.used_by_job()
        return self._used[1]


_LIMITS = frozenset({Outcome.TIME_LIMIT, Outcome.OVER_LEASE, Outcome.IDLE})
"""Ends that gpulease made of a job, whatever it exited with when it was asked to."""


def reason(job: Job, waiting: WaitReason | None, gpus: int | None = None) -> str | None:
    """Return why a job waits or why it ended, as a sentence without a full stop.

    `gpus` is how many there are now, which may be fewer than when the job came.
    """
    match job.state:
        case State.ENDED:
            return job.detail or _ending(job)
        case State.RELEASING:
            left = "" if job.holder is not None else "; its processes are still there"
            why, hint = split_hint(job.detail or "asked to go")
            return with_hint(why + left, hint)
        case State.QUEUED:
            return None if waiting is None else why_it_waits(job.claim, waiting, gpus)
        case State.GRANTED | State.ACTIVE:
            return None if job.main_exited_at is None else _what_goes_on(job)


def _what_goes_on(job: Job) -> str:
    how = "" if job.exit is None else f" ({job.exit})"
    return f"its main process has ended{how}; what it left behind keeps the lease"


def _ending(job: Job) -> str | None:
    if job.outcome is Outcome.EXITED and job.exit is not None:
        return f"exited with {job.exit.code}"
    if job.outcome is Outcome.SIGNALED and job.exit is not None:
        return f"ended by signal {job.exit.signal}"
    return spoken(job.outcome) if job.outcome else None


def why_it_waits(claim: Claim, waiting: WaitReason, gpus: int | None = None) -> str | None:
    """Return why a claim has not been granted, as a sentence without a full stop."""
    if gpus is not None and gpus < claim.gpus:
        return f"it asks for {claim.gpus} GPUs, and the driver shows {gpus} now"
    obstacles = waiting.refusal.obstacles
    leased = [each for each in obstacles if each.kind is ObstacleKind.LEASED]
    if leased:
        holders = sorted({job for each in leased for job in each.waits_for})
        return f"no room for {claim} before {_one_of(holders)} ends"
    first = sorted({job for each in obstacles for job in each.waits_for})
    if first:
        return f"waits its turn behind {_one_of(first)}"
    if obstacles:
        return "; ".join(f"GPU {each.label}: {each.why}" for each in obstacles)
    # Just submitted: the queue is looked at within moments, and most jobs never wait at all.
    return None


def _one_of(jobs: Sequence[JobId]) -> str:
    if len(jobs) == 1:
        return f"job {jobs[0]}"
    return f"one of the jobs {', '.join(map(str, jobs[:5]))}{', ...' if len(jobs) > 5 else ''}"


def exit_status(job: Job) -> int | None:
    """Return how a job ended as a shell shows it; None while it has not, or never ran."""
    if job.outcome in _LIMITS and job.state is State.ENDED:
        return EXIT_TIME_LIMIT
    if job.exit is None or job.state is not State.ENDED:
        return None
    return job.exit.code if job.exit.signal is None else 128 + job.exit.signal


@dataclass(frozen=True, slots=True)
class Words:
    """What is the same of all who ask for the same and wait for the same."""

    waiting: WaitReason
    claim: ClaimView
    why: str | None
    refusals: list[RefusalView]
    waits_for: list[int]


class Told:
    """What is told of those who wait, as of one plan: in long queues, much the same of many."""

    def __init__(self, plan: Plan | None, before: "Told | None" = None) -> None:
        self.plan = plan
        self._before = before._latest if before is not None else {}
        self._latest: dict[Claim, WaitReason] = {}
        self._settled: dict[int, tuple[WaitReason, WaitReason]] = {}
        self._words: dict[tuple[Claim, int], Words] = {}

    def settled(self, claim: Claim, waiting: WaitReason) -> WaitReason:
        """Return `waiting`, or its equal from an earlier plan."""
        known = self._settled.get(id(waiting))
        if known is None:
            former = self._before.get(claim)
            known = waiting, former if former == waiting and former is not None else waiting
            self._settled[id(waiting)] = known
            self._latest[claim] = known[1]
        return known[1]

    def of(self, claim: Claim, waiting: WaitReason) -> Words:
        """Return what is told of a claim that waits like this."""
        key = claim, id(waiting)
        if key not in self._words:
            self._words[key] = Words(
                waiting,
                claim_view(claim),
                why_it_waits(claim, waiting, None if self.plan is None else len(self.plan.gpus)),
                [refusal_view(each) for each in waiting.refusal.obstacles],
                list(waiting.refusal.waits_for),
            )
        return self._words[key]


def claim_view(claim: Claim) -> ClaimView:
    """Return a claim as a wire object."""
    share = claim.memory if isinstance(claim.memory, Share) else None
    return ClaimView(
        memory=None if isinstance(claim.memory, Share) else claim.memory,
        share=float(share.percent) if share else None,
        gpus=claim.gpus,
        exclusive=claim.exclusive,
        time_limit=seconds(claim.time_limit),
    )


def refusal_view(each: Obstacle) -> RefusalView:
    """Return why one GPU cannot take a job, as a wire object."""
    return RefusalView(each.gpu, each.index, each.why, each.label)


def seconds(span: timedelta | None) -> float | None:
    """Return a span as the wire has it."""
    return None if span is None else span.total_seconds()
