"""What is shown of leases: what they hold, what holds them, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpulease.domain.enforcement import as_watched
from gpulease.domain.idleness import Release
from gpulease.domain.job import Job
from gpulease.domain.lease import Lease, State
from gpulease.domain.memory import GpuUuid, JobId
from gpulease.domain.overuse import Consequence, OverusePolicy
from gpulease.domain.reach import Unheld
from gpulease.server.instants import instant
from gpulease.server.usage import pool_view
from gpulease.service.idleness import RestWatch
from gpulease.service.keeper import Keeper
from gpulease.service.look import Look
from gpulease.service.overuse import OveruseWatch
from gpulease.service.usage import PoolSeen
from gpulease.wire import LeaseView, OveruseView, RungView


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change while the daemon runs."""

    driver: Callable[[], str | None]
    simulated: bool
    directory_of: Callable[[JobId], Path]
    """Where a job's record, output and socket are."""
    holds: "Rungs"
    unheld: Callable[[JobId], Sequence[Unheld]] = lambda _: ()
    pools_of: Callable[[Job], Sequence[PoolSeen]] = lambda _: ()


class Rungs(Protocol):
    """What holds leases on this machine."""

    @property
    def everywhere(self) -> tuple[str, ...]:
        """The rungs on which all leases stand that are granted now."""

    def rungs(self) -> list[RungView]:
        """Return each rung, and what there is to say of it."""


@dataclass(frozen=True, slots=True)
class Watches:
    """What is known of leases that hold too much, and of jobs that do nothing."""

    overuse: OveruseWatch
    rests: RestWatch


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

    def __init__(self, keeper: Keeper, machine: Machine, watches: Watches) -> None:
        self._keeper = keeper
        self._machine = machine
        self._overuse = watches.overuse
        self._rests = watches.rests
        self._used: tuple[Look | None, dict[tuple[JobId, GpuUuid], int]] = (None, {})

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

    def _over(self, job: Job, gpu: GpuUuid, seen: Look | None) -> dict[str, str | None]:
        """Return since when a lease is over, and when that ends its job."""
        standing = self._overuse.standing(job.id, gpu)
        if standing.over_for is None or seen is None or job.state is not State.ACTIVE:
            return {}
        left = standing.left(self._overuse.policy(job))
        return {
            "over_since_at": instant(seen.at - standing.over_for),
            "stops_at": None if left is None else instant(seen.at + left),
        }

    def idle(self, job: Job) -> tuple[str | None, str | None]:
        """Return since when a job does nothing, and when that ends it, where that matters."""
        seen, rest = self._keeper.seen, self._rests.rest(job.id)
        policy = self._rests.policy(job)
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
        return list(as_watched(rungs, stops=stops))

    def _used_by_job(self) -> Mapping[tuple[JobId, GpuUuid], int]:
        """Return what each job uses on each GPU, summed once for each look."""
        seen = self._keeper.seen
        if seen is not None and self._used[0] is not seen:
            self._used = seen, seen.used_by_job()
        return self._used[1]
