"""A job as the wire object that users see: its state, why it waits or ended, what it did."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import takewhile
from math import inf
from typing import Any

from gpulease.domain.eligibility import Block, BlockKind
from gpulease.domain.explain import Explanations, Suggestion
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.hook_reports import Reports
from gpulease.domain.idle import Release
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim, State
from gpulease.domain.overuse import Consequence, OverusePolicy
from gpulease.domain.plan import Plan
from gpulease.domain.queue_options import QueueOptions
from gpulease.server.lease_views import LeaseViews, hook_view, is_adopted
from gpulease.server.reasons import WaitReasonCache, exit_status, reason
from gpulease.server.view_sources import ViewSources, instant, whole_minute
from gpulease.service.explaining import Explainer
from gpulease.service.ports import Event, ProcessFinder, Store
from gpulease.service.scheduler import Scheduler
from gpulease.service.usage import PoolSeen
from gpulease.units import Share
from gpulease.wire.jobs import ClaimView, EventView, JobView, QueueView, SuggestionView, UnheldView
from gpulease.wire.machine import OveruseView

_LAST = inf


class JobViews:
    """Draws jobs from the latest plan and observation of the scheduler. For one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        processes: ProcessFinder,
        sources: ViewSources,
        explainer: Explainer,
    ) -> None:
        self._scheduler = scheduler
        self._explainer = explainer
        self._processes = processes
        self._sources = sources
        self._positions = QueuePositions(scheduler)
        self._wait_reasons = WaitReasonCache()
        self.leases = LeaseViews(scheduler, sources)

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
        plan = self._scheduler.plan if job.state is State.QUEUED else None
        block = None if plan is None else plan.blocked.get(job.id)
        waits = None if plan is None or block is not None else self._wait_reasons.of(job, plan)
        explained = self._explainer.latest
        may_start = plan is not None and self._scheduler.closed is None and _may_start(block)
        start = explained.starts.get(job.id) if explained and may_start else None
        why_now = self._scheduler.closed or (waits.why if waits else None)
        why_now = why_now if block is None else block_sentence(block, self._scheduler.store)
        why, hint = reason(job, why_now)
        idle_since_at, idle_ends_at = self._idle(job)
        has_directory = to_owner and job.granted_at is not None and job.holder is None
        return JobView(
            id=job.id,
            name=job.name,
            user=job.owner.user,
            state=job.state.value,
            reason=why or None,
            hint=hint,
            outcome=job.outcome.value if job.outcome else None,
            position=self._positions.of(job, explained),
            expected_start_at=instant(whole_minute(start.at)) if start else None,
            command=job.command,
            claim=claim_view(
                job.claim, self._scheduler.observer.readings() if job.claim.named else {}
            ),
            leases=self.leases.of(job, self._sources.pools_of(job) if pools is None else pools),
            submitted_at=instant(job.submitted_at) or "",
            granted_at=instant(job.granted_at),
            started_at=instant(job.started_at),
            ended_at=instant(job.ended_at),
            expires_at=instant(job.expires_at) if job.holds_memory else None,
            exit_status=exit_status(job),
            pid=job.pid,
            directory=str(self._sources.directory_of(job.id)) if has_directory else None,
            kind="run" if job.holder is None else "hold",
            adopted=is_adopted(job),
            terminal=job.terminal,
            main_exited_at=instant(job.main_exited_at),
            suspended=self._is_suspended(job),
            grace=_seconds(self._scheduler.grace(job)),
            gives_up_at=instant(job.gives_up_at) if job.state is State.QUEUED else None,
            kept_until_at=instant(job.kept_until_at) if job.holds_memory else None,
            idle_since_at=idle_since_at,
            idle_ends_at=idle_ends_at,
            refusals=waits.refusals if waits else [],
            waits_for=waits.waits_for if waits else [],
            behind=waits.behind if waits else None,
            unheld=[
                UnheldView(each.pid, each.command, each.why)
                for each in self._sources.unheld(job.id)
            ],
            hook=self.leases.hook(job),
            hooks=[hook_view(each) for each in hooks or ()],
            first_use_at=instant(job.activity.first_use_at),
            **self._activity(job),
            sized=job.usage.size_reason,
            out_of_memory=job.usage.out_of_memory,
            retry_of=job.usage.retry_of,
            retried_as=job.usage.retried_as,
            label=job.label,
            queue=self._queue_view(job.queue, block),
            events=[EventView(instant(each.at) or "", each.kind, each.detail) for each in events],
        )

    def in_order(self, waiting: Sequence[Job]) -> Sequence[Job]:
        """Return queued jobs in the order of the queue; those without a place come last."""
        explained = self._explainer.latest
        places = {job.id: self._positions.of(job, explained) for job in waiting}
        return sorted(waiting, key=lambda job: places[job.id] or _LAST)

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

    def _queue_view(self, options: QueueOptions, block: Block | None) -> QueueView:
        array, store = options.array, self._scheduler.store
        return QueueView(
            priority=options.priority.value,
            nice=options.nice,
            held=options.held,
            begin_at=instant(options.begin_at),
            after=[
                f"{each.job if each.whole_array else _label(store, each.job)}:{each.condition}"
                for each in options.after
            ],
            requeue=options.requeue,
            preemptible=options.preemptible,
            array=None if array is None else array.job,
            array_index=None if array is None else array.index,
            array_most=None if array is None else array.most_running,
            requeued=options.requeued,
            blocked_by=None if block is None else block.kind.value,
        )

    def _is_suspended(self, job: Job) -> bool:
        """Tell whether the main process of a job, or the holder of a lease, is stopped."""
        if job.state is not State.ACTIVE or job.main_exited_at is not None or job.pid is None:
            return False
        try:
            return self._processes.is_stopped(job.pid)
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
        if job.kept_until_at is not None and seen.at < job.kept_until_at:
            # Kept since the latest observation: its idle time starts again at the end of that.
            return None, None
        left = idle.left(policy)
        ends_at = None if left is None else seen.at + left
        return instant(seen.at - idle.idle_for), instant(ends_at)


class QueuePositions:
    """The position of each queued job, as of the latest explanations."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._explanations: Explanations | None = None
        self._newer: list[JobId] = []
        """Jobs that the plan does not know, by id: until the next pass they come last."""

    def of(self, job: Job, explanations: Explanations | None) -> int | None:
        """Return the position of a job, 1 for the next; None unless it is queued."""
        if job.state is not State.QUEUED:
            return None
        if explanations is not self._explanations:
            self._explanations, self._newer = explanations, []
        if _is_blocked(job, self._scheduler.plan):
            return None
        positions = explanations.positions if explanations else {}
        newest = explanations.newest if explanations else JobId(0)
        if job.id <= newest:
            return positions.get(job.id)
        newer = self._newer
        if not newer or job.id > newer[-1]:
            newer.extend(self._newer_than(newer[-1] if newer else newest))
        index = bisect_left(newer, job.id)
        found = index < len(newer) and newer[index] == job.id
        return len(positions) + index + 1 if found else None

    def _newer_than(self, last: JobId) -> list[JobId]:
        newer = takewhile(lambda each: each.id > last, reversed(self._scheduler.store.live()))
        return [
            each.id
            for each in newer
            if each.state is State.QUEUED and not _is_blocked(each, self._scheduler.plan)
        ][::-1]


def block_sentence(block: Block, store: Store) -> str:
    """Return what blocks a job as text; it names jobs as people do."""
    return block.sentence({each.job: _label(store, each.job) for each in block.after})


def _label(store: Store, job_id: JobId) -> str:
    job = store.job(job_id)
    return str(job_id) if job is None else job.label


def _is_blocked(job: Job, plan: Plan | None) -> bool:
    if job.queue.held or job.queue.after:
        return True
    # The explanations may be of an earlier plan.
    return plan is not None and (job.id in plan.blocked or plan.limits.exceeded_by(job) is not None)


def _may_start(block: Block | None) -> bool:
    """Tell whether it is known when a block ends."""
    return block is None or block.kind in (BlockKind.BEGIN, BlockKind.ARRAY)


def suggestion_view(suggestion: Suggestion) -> SuggestionView:
    """Return a suggestion as a wire object."""
    return SuggestionView(suggestion.options, suggestion.before)


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


def claim_view(claim: Claim, gpus: Mapping[GpuUuid, GpuReading]) -> ClaimView:
    """Return a claim as a wire object; `gpus` are the GPUs that are known."""
    share = claim.memory if isinstance(claim.memory, Share) else None
    return ClaimView(
        memory=None if isinstance(claim.memory, Share) else claim.memory,
        share=float(share.percent) if share else None,
        gpus=claim.gpus,
        exclusive=claim.exclusive,
        time_limit=_seconds(claim.time_limit),
        named=list(claim.named),
        named_labels=[gpus[uuid].label if uuid in gpus else uuid for uuid in claim.named],
        model=claim.model,
        min_vram=claim.min_vram,
        same_model=claim.same_model,
    )


def overuse_view(policy: OverusePolicy) -> OveruseView:
    """Return what happens to jobs that exceed their lease as a wire object."""
    return OveruseView(
        policy.consequence is Consequence.STOP,
        policy.tolerance,
        policy.grace.total_seconds(),
        policy.elastic,
    )
