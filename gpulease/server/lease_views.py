"""A lease as the wire object that users see: its use, what enforces it, its GPU in frameworks."""

from collections.abc import Mapping, Sequence

from gpulease.domain.enforcement import EnforcementLevel, with_watch_level
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.hook_reports import HookReport, as_reported, summary
from gpulease.domain.job import Job
from gpulease.domain.lease import Lease, State
from gpulease.server.view_sources import ViewSources, instant
from gpulease.service.observation import Observation
from gpulease.service.scheduler import Scheduler
from gpulease.service.usage import PoolSeen
from gpulease.wire.jobs import DeviceView, HookLimitView, HookView, LeaseView, PoolView

FRAMEWORK = EnforcementLevel.FRAMEWORK


class LeaseViews:
    """Draws the leases of jobs from the latest observation of the scheduler. For one thread."""

    def __init__(self, scheduler: Scheduler, sources: ViewSources) -> None:
        self._scheduler = scheduler
        self._sources = sources
        self._used: tuple[Observation | None, Mapping[tuple[JobId, GpuUuid], int]] = (None, {})

    def of(self, job: Job, pools: Sequence[PoolSeen]) -> list[LeaseView]:
        """Return the leases of a job; `pools` are the memory pools of its frameworks."""
        if not job.leases:
            return []
        seen = self._scheduler.seen
        used = self._used_by_job(seen)
        peaks = self._scheduler.peaks
        return [
            LeaseView(
                gpu=lease.gpu,
                memory=lease.memory,
                used=seen.used(job.id, lease.gpu, used) if seen and job.holds_memory else None,
                peak=peaks.of(job.id, lease),
                enforced_by=self._enforced_by(job, lease, seen),
                driver_limit=lease.driver_limit,
                needed=lease.used,
                pools=[_pool_view(each, lease) for each in pools if each.gpu == lease.gpu],
                **self._over(job, lease.gpu, seen),
            )
            for lease in job.leases
        ]

    def _used_by_job(self, seen: Observation | None) -> Mapping[tuple[JobId, GpuUuid], int]:
        """Return what each job uses on each GPU, summed once for each observation."""
        if seen is not None and self._used[0] is not seen:
            self._used = seen, seen.used_by_job()
        return self._used[1]

    def _enforced_by(self, job: Job, lease: Lease, seen: Observation | None) -> list[str]:
        """Return the levels that hold the lease, or held it at its end."""
        if not job.holds_memory:
            return list(lease.enforced_by or ())
        users = () if seen is None else seen.users(job.id, lease.gpu)
        levels = as_reported(
            self._promised(job, lease), self._sources.hooks.of(job.id), lease.gpu, users
        )
        is_blind = seen is not None and seen.is_blind
        return list(
            with_watch_level(levels, stops=self._sources.overuse.stops(job) and not is_blind)
        )

    def _over(self, job: Job, gpu: GpuUuid, seen: Observation | None) -> dict[str, str | None]:
        """Return since when a job exceeds a lease, and when it is stopped for that."""
        overuse = self._sources.overuse.state(job.id, gpu)
        if overuse.over_for is None or seen is None or job.state is not State.ACTIVE:
            return {}
        left = overuse.left(self._sources.overuse.policy(job))
        return {
            "over_since_at": instant(seen.at - overuse.over_for),
            "stops_at": None if left is None else instant(seen.at + left),
        }

    def devices(self, job: Job, options: Mapping[str, object]) -> list[DeviceView]:
        """Return the GPUs of a job as frameworks name them, with its options for frameworks.

        An adopted process names its GPUs without a lease: that is not known.
        """
        if is_adopted(job):
            return []
        seen, simulated = self._scheduler.seen, self._sources.simulated
        readings = {each.uuid: each for each in seen.readings} if seen else {}
        sizes, split = options.get("split_sizes"), options.get("split")
        count = len(sizes) if isinstance(sizes, list) and sizes else split
        each = count if isinstance(count, int) else 1
        return [
            DeviceView(
                gpu=lease.gpu,
                names=device_names(place, each, simulated=simulated),
                name=known.name,
                bus=known.bus,
                simulated=simulated,
            )
            for place, lease in enumerate(job.leases)
            for known in [readings.get(lease.gpu) or self._scheduler.store.gpu(lease.gpu)]
        ]

    def hook(self, job: Job) -> str | None:
        """Return what the hooks of a job did in one word; None if they limit nothing here."""
        promised = any(FRAMEWORK in self._promised(job, lease) for lease in job.leases)
        return summary(self._sources.hooks.of(job.id)) if job.holds_memory and promised else None

    def _promised(self, job: Job, lease: Lease) -> Sequence[str]:
        """Return the levels that were set up for a lease; an adopted process has no hooks."""
        everywhere = self._sources.enforcement.everywhere
        levels = everywhere if lease.enforced_by is None else lease.enforced_by
        return [each for each in levels if each != FRAMEWORK] if is_adopted(job) else levels


def is_adopted(job: Job) -> bool:
    """Tell whether the process of a job used GPUs before it had the lease."""
    return job.holder is not None and job.holder.adopted


def device_names(place: int, split: int, *, simulated: bool) -> list[str]:
    """Return the names in frameworks of the GPU at `place`, which TensorFlow sees as `split`."""
    kind = "CPU" if simulated else "GPU"
    logical = [f"/{kind}:{place * split + part}" for part in range(split)]
    return logical if simulated else [*logical, f"cuda:{place}"]


def hook_view(report: HookReport) -> HookView:
    """Return a report of a hook as a wire object."""
    return HookView(
        pid=report.pid,
        framework=report.framework,
        version=report.version,
        state=report.state.value,
        why=report.why,
        limits=[HookLimitView(gpu, limit) for gpu, limit in report.limits],
        at=instant(report.at) or "",
    )


def _pool_view(seen: PoolSeen, lease: Lease) -> PoolView:
    return PoolView(
        framework=seen.kind.framework,
        version=seen.version,
        limit=seen.limit,
        peak=seen.peak,
        charged=None if seen.limit is None else max(0, lease.memory - seen.limit),
        beside=seen.overhead,
    )
