"""A job as the wire object that users see: its state, why it waits or ended, its leases."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from gpulease.domain.eligibility import Block, BlockKind
from gpulease.domain.enforcement import (
    EnforcementLevel,
    HookReport,
    Reports,
    as_reported,
    summary,
    with_watch_level,
)
from gpulease.domain.explain import Explanations
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.idle import Release
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim, Lease, State
from gpulease.domain.links import fewest_nvlinks
from gpulease.domain.memory_estimate import size_next_time
from gpulease.domain.overuse import Consequence, OverusePolicy
from gpulease.domain.plan import Plan
from gpulease.domain.queue_options import QueueOptions
from gpulease.server.queue_positions import QueuePositions, Row
from gpulease.server.reasons import (
    WaitExplanation,
    WaitReasonCache,
    block_sentence,
    exit_status,
    expected_start,
    label_of,
    reason,
    start_shown,
)
from gpulease.server.view_sources import ViewSources, claim_view, instant, seconds_of
from gpulease.service.explaining import Explainer
from gpulease.service.observation import Observation
from gpulease.service.ports import Event
from gpulease.service.scheduler import Scheduler
from gpulease.service.usage import PoolSeen
from gpulease.wire.jobs import (
    ArrayWaitingView,
    ClaimView,
    DeviceView,
    EventView,
    ExpectedStartView,
    HookLimitView,
    HookView,
    JobRowView,
    JobView,
    LeaseView,
    PoolView,
    QueueView,
    UnheldView,
)
from gpulease.wire.machine import OveruseView
from gpulease.wire.text import name_of_row, ranges

FRAMEWORK = EnforcementLevel.FRAMEWORK


class LeaseViews:
    """Draws the leases of jobs from the latest observation of the scheduler. For one thread."""

    def __init__(self, scheduler: Scheduler, sources: ViewSources) -> None:
        self._scheduler = scheduler
        self._sources = sources

    def of(self, job: Job, pools: Sequence[PoolSeen]) -> list[LeaseView]:
        """Return the leases of a job; `pools` are the memory pools of its frameworks."""
        if not job.leases:
            return []
        seen = self._scheduler.seen
        peaks = self._scheduler.peaks
        return [
            LeaseView(
                gpu=lease.gpu,
                memory=lease.memory,
                used=seen.used(job.id, lease.gpu) if seen and job.holds_memory else None,
                peak=peaks.of(job.id, lease),
                enforced_by=self._enforced_by(job, lease, seen),
                driver_limit=lease.driver_limit,
                needed=lease.used,
                pools=[_pool_view(each, lease) for each in pools if each.gpu == lease.gpu],
                shared_with=self._slowed_by(job, lease.gpu),
                memory_bound=lease.memory_bound,
                **self._over(job, lease.gpu, seen),
            )
            for lease in job.leases
        ]

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

    def _slowed_by(self, job: Job, gpu: GpuUuid) -> list[str]:
        """Return the jobs that keep a GPU busy together with `job`, as people see their ids."""
        plan = self._scheduler.plan
        jobs = () if plan is None or not job.holds_memory else plan.busy.get(gpu, ())
        labels = (label_of(self._scheduler.store, each) for each in jobs if each != job.id)
        return list(labels) if job.id in jobs else []

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

    def nvlinks(self, job: Job) -> int | None:
        """Return the fewest NVLinks between two GPUs of a job; None where none of them has any."""
        seen = self._scheduler.seen if len(job.leases) > 1 else None
        known = {} if seen is None else seen.by_gpu
        readings = [known[lease.gpu] for lease in job.leases if lease.gpu in known]
        has_any = any(link.nvlinks for reading in readings for link in reading.links)
        return fewest_nvlinks(readings) if has_any and len(readings) == len(job.leases) else None

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
                index=readings[lease.gpu].label if lease.gpu in readings else None,
            )
            for place, lease in enumerate(job.leases)
            for known in [readings.get(lease.gpu) or self._scheduler.store.gpu(lease.gpu)]
        ]

    def hook(self, job: Job) -> str | None:
        """Return what the hooks of a job did in one word; None if they limit nothing here."""
        if not job.holds_memory:
            return None
        promised = any(FRAMEWORK in self._promised(job, lease) for lease in job.leases)
        return summary(self._sources.hooks.of(job.id)) if promised else None

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
        charged=None if seen.limit is None else max(0, lease.most - seen.limit),
        beside=seen.overhead,
    )


class WaitState(NamedTuple):
    """Why a queued job waits, and until when."""

    reason: str | None
    position: int | None
    start_at: datetime | None = None
    """The expected start."""
    block: Block | None = None
    """What keeps it from starting apart from memory."""
    explanation: WaitExplanation | None = None
    """What it waits for, if nothing blocks it."""
    expected_start: ExpectedStartView | None = None


_NOT_WAITING = WaitState(None, None)


class JobViews:
    """Draws jobs from the latest plan and observation of the scheduler. For one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        is_stopped: Callable[[int], bool],
        sources: ViewSources,
        explainer: Explainer,
    ) -> None:
        """`is_stopped` tells whether a signal has stopped the process with a pid."""
        self._scheduler = scheduler
        self._explainer = explainer
        self._is_stopped = is_stopped
        self._sources = sources
        self._positions = QueuePositions(scheduler)
        self._wait_reasons = WaitReasonCache()
        self._pass: tuple[Plan | None, Explanations | None, str | None] | None = None
        self.leases = LeaseViews(scheduler, sources)

    def begin(self) -> None:
        """Draw from what is decided and explained now until this is called again.

        In one answer, alike jobs wait for the same, though a pass comes while it is drawn.
        """
        self._pass = self._scheduler.plan, self._explainer.latest, self._scheduler.closed

    def job(
        self,
        job: Job,
        *,
        to_owner: bool = False,
        events: Sequence[Event] = (),
        pools: Sequence[PoolSeen] | None = None,
        hooks: Reports | None = None,
    ) -> JobView:
        """Return a job as every user may see it, or as its owner may.

        `pools` are the memory pools of its frameworks; None: those of the running job.
        `hooks` are the reports of its hooks to show; None for their summary only.
        """
        waits = self.wait(job) if job.state is State.QUEUED else _NOT_WAITING
        explained = waits.explanation
        why, hint = reason(job, waits.reason)
        idle_since_at, idle_ends_at = self._idle(job)
        has_directory = to_owner and job.granted_at is not None and job.has_shim
        return JobView(
            id=job.id,
            name=job.name,
            user=job.owner.user,
            state=job.state.value,
            reason=why or None,
            hint=hint,
            outcome=job.outcome.value if job.outcome else None,
            position=waits.position,
            expected_start_at=instant(waits.start_at),
            expected_start=waits.expected_start,
            command=job.command,
            claim=self.claim(job.claim),
            leases=self.leases.of(job, self._sources.pools_of(job) if pools is None else pools),
            submitted_at=instant(job.submitted_at) or "",
            granted_at=instant(job.granted_at),
            started_at=instant(job.started_at),
            ended_at=instant(job.ended_at),
            expires_at=instant(job.expires_at) if job.holds_memory else None,
            exit_status=exit_status(job),
            pid=job.pid,
            directory=str(self._sources.directory_of(job.id)) if has_directory else None,
            kind=job.kind,
            adopted=is_adopted(job),
            slurm_job=None if job.slurm is None else job.slurm.id,
            notify=list(job.notify),
            terminal=job.terminal,
            nvlinks=self.leases.nvlinks(job),
            main_exited_at=instant(job.main_exited_at),
            suspended=self._is_suspended(job),
            grace=self.grace(job),
            gives_up_at=instant(job.gives_up_at) if job.state is State.QUEUED else None,
            kept_until_at=instant(job.kept_until_at) if job.holds_memory else None,
            idle_since_at=idle_since_at,
            idle_ends_at=idle_ends_at,
            refusals=explained.refusals if explained else [],
            waits_for=explained.waits_for if explained else [],
            behind=explained.behind if explained else None,
            waits_for_labels=explained.waits_for_labels if explained else [],
            behind_label=explained.behind_label if explained else None,
            unheld=[
                UnheldView(each.pid, each.command, each.why)
                for each in self._sources.unheld(job.id)
            ],
            hook=self.leases.hook(job),
            hooks=[hook_view(each) for each in hooks or ()],
            first_use_at=instant(job.activity.first_use_at),
            **self._activity(job),
            ram_peak=job.host_use.ram_peak,
            cpu_seconds=seconds_of(job.host_use.cpu_for),
            **self._held_on_host(job),
            sized=job.usage.size_reason,
            advised=size_next_time(job, self._scheduler.policy.smallest_lease),
            out_of_memory=job.usage.out_of_memory,
            retry_of=job.usage.retry_of,
            retried_as=job.usage.retried_as,
            label=job.label,
            queue=self.queue(job.queue, waits.block),
            events=[EventView(instant(each.at) or "", each.kind, each.detail) for each in events],
        )

    def brief(self, job: Job) -> JobRowView:
        """Return a job as a line of a listing shows it: a third of the bytes and of the work."""
        waits = self.wait(job) if job.state is State.QUEUED else _NOT_WAITING
        why, _ = reason(job, waits.reason)
        is_plain = job.queue.array is None and waits.block is None
        return JobRowView(
            id=job.id,
            label=job.label,
            name=job.name,
            user=job.owner.user,
            kind=job.kind,
            slurm_job=None if job.slurm is None else job.slurm.id,
            state=job.state.value,
            suspended=self._is_suspended(job),
            reason=why or None,
            outcome=job.outcome.value if job.outcome else None,
            exit_status=exit_status(job),
            out_of_memory=job.usage.out_of_memory,
            claim=self.claim(job.claim),
            queue=None if is_plain else self.queue(job.queue, waits.block),
            submitted_at=instant(job.submitted_at) or "",
            started_at=instant(job.started_at),
            ended_at=instant(job.ended_at),
            expected_start_at=instant(waits.start_at),
            expected_start=waits.expected_start,
            command=job.command,
        )

    def wait(self, job: Job) -> WaitState:
        """Return why a queued job waits, and until when."""
        plan, explained, closed = self._pass or (
            self._scheduler.plan, self._explainer.latest, self._scheduler.closed,
        )  # fmt: skip
        position = self._positions.of(job, explained, plan)
        if plan is None:
            return WaitState(closed, position)
        block = plan.blocked.get(job.id)
        waits = self._wait_reasons.of(job, plan) if block is None else None
        # Of other blocks nobody knows when they end.
        may_start = block is None or block.kind in (BlockKind.BEGIN, BlockKind.ARRAY)
        start = expected = None
        if explained and closed is None and may_start:
            first = self._explainer.first_starts.get(job.id)
            start = explained.starts.get(job.id)
            expected = expected_start(job.id, explained, first, self._scheduler.store)
        why = closed or (waits.why if waits else None)
        return WaitState(
            why if block is None else block_sentence(block, self._scheduler.store),
            position,
            None if start is None else start_shown(start),
            block,
            waits,
            expected,
        )

    def grace(self, job: Job) -> float | None:
        """Return the seconds between SIGTERM and SIGKILL of a job; None for a hold."""
        return seconds_of(self._scheduler.grace(job))

    def claim(self, claim: Claim) -> ClaimView:
        """Return a claim as a wire object."""
        return claim_view(claim, self._scheduler.observer.readings() if claim.named else {})

    def row(self, row: Row) -> JobView:
        """Return the first job of a row with its position. It stands for the others."""
        job, position = row[0]
        view = self.job(job)
        view.position = position
        if len(row) > 1 and view.queue is not None:
            arrays = (each.queue.array for each, _ in row)
            indices = sorted(array.index for array in arrays if array is not None)
            view.name = name_of_row([each.name for each, _ in row])
            view.queue.array_waiting = ArrayWaitingView(ranges(indices), len(indices))
        return view

    def rows(self, most: int | None) -> Sequence[Row]:
        """Return the first rows of the queue in its order; None: each job."""
        return self._positions.rows(self._explainer.latest, most)

    def _activity(self, job: Job) -> dict[str, Any]:
        """Return what a job did with its GPUs, so far or until its end."""
        if not job.holds_memory:
            done = job.activity
            rate, steps = done.steps_per_second, done.steps
            return {"utilization": job.utilization, "steps": steps, "steps_per_second": rate}
        counted = self._sources.hooks.steps(job.id)
        return {
            "utilization": self._sources.utilization(job.id),
            "steps": counted and counted.count,
            "steps_per_second": counted and counted.rate,
        }

    def _held_on_host(self, job: Job) -> dict[str, Any]:
        """Return what holds a running job to its RAM, and on which cores."""
        if job.state is not State.ACTIVE or not job.has_shim:
            return {}
        cores = () if job.claim.cpus is None else self._sources.cores(job.id)
        held = None if job.claim.ram is None else self._sources.ram_held_by(job)
        return {"ram_held_by": held, "cores": ranges(cores) or None}

    def queue(self, options: QueueOptions, block: Block | None) -> QueueView:
        """Return what was asked of the queue for a job, and what blocks it."""
        array, store = options.array, self._scheduler.store
        return QueueView(
            priority=options.priority.value,
            nice=options.nice,
            held=options.held,
            begin_at=instant(options.begin_at),
            after=[
                f"{each.job if each.whole_array else label_of(store, each.job)}:{each.condition}"
                for each in options.after
            ],
            requeue=options.requeue,
            preemptible=options.preemptible,
            array=None if array is None else array.job,
            array_index=None if array is None else array.index,
            array_most=None if array is None else array.most_running,
            requeued=options.requeued,
            blocked_by=None if block is None else block.kind.value,
            retries=options.retries,
            retried=options.retried,
            retry_on=list(options.retry_on),
            retry_delay=options.retry_delay.total_seconds() if options.retries else None,
        )

    def _is_suspended(self, job: Job) -> bool:
        """Tell whether the main process of a job, or the holder of a lease, is stopped."""
        if job.state is not State.ACTIVE or job.main_exited_at is not None or job.pid is None:
            return False
        try:
            return self._is_stopped(job.pid)
        except OSError:
            return False  # /proc cannot be read now

    def _idle(self, job: Job) -> tuple[str | None, str | None]:
        """Return since when a job is idle and when it ends for that, where the policy is on."""
        if not job.holds_memory:
            return None, None
        seen, idle = self._scheduler.seen, self._sources.idleness.state(job.id)
        policy = self._sources.idleness.policy(job)
        if seen is None or idle.idle_for is None or policy.release is Release.OFF:
            return None, None
        if job.is_kept(seen.at):
            # Kept since the latest observation: its idle time starts again at the end of that.
            return None, None
        left = idle.left(policy)
        ends_at = None if left is None else seen.at + left
        return instant(seen.at - idle.idle_for), instant(ends_at)


def overuse_view(policy: OverusePolicy) -> OveruseView:
    """Return what happens to jobs that exceed their lease as a wire object."""
    return OveruseView(
        policy.consequence is Consequence.STOP,
        policy.tolerance,
        policy.grace.total_seconds(),
        policy.elastic,
    )
