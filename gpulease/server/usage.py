"""The routes about use: what frameworks report of their pools, the report by user, shares, and the
memory of a GPU and of a job over time.

The hook in a job reports as the user of the job. A report is checked for ranges and otherwise not
trusted.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Annotated

from msgspec import Meta

from gpulease.domain.enforcement import HookReport, HookState
from gpulease.domain.explain import UserStanding
from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.domain.job import Job, PredictionErrors, UsageBy, UsageTotal, UserWaits
from gpulease.domain.lease import LONGEST_TIME
from gpulease.domain.memory_series import JOB_SPAN_S, GpuSeries, Grid, JobSeries, Mean, grid_over
from gpulease.domain.past_jobs import HALF_LIFE
from gpulease.errors import BadValue, NotAllowed
from gpulease.server.context import Request, RequestContext
from gpulease.server.messages import Response, json_response
from gpulease.server.validation import LookBack
from gpulease.server.view_sources import instant
from gpulease.service.hook_reports import Steps
from gpulease.service.ports import MemoryReader
from gpulease.service.usage import FrameworkReport, PoolReport
from gpulease.wire.history import (
    MOST_POINTS,
    SOME_POINTS,
    GpuHistoryView,
    JobGpuSeriesView,
    JobMemoryView,
    MeanView,
    OwnerSeriesView,
)
from gpulease.wire.requests import PoolUsage, UsageRequest
from gpulease.wire.text import clean
from gpulease.wire.usage import (
    PredictionsView,
    ReportView,
    SharesView,
    ShareView,
    UsePartView,
    UseView,
)

FRAMEWORKS = frozenset({"tensorflow", "torch", "jax", "cupy", "rmm", "onnxruntime"})
_MOST_GPUS = 64
_LARGEST = 1 << 50
_WEEK_S = 7 * 86400.0
_LONGEST_VERSION = 40
_LONGEST_WHY = 500
_LONGEST_UUID = 96
_HOUR_S = 3600.0
_LONGEST_S = LONGEST_TIME.total_seconds()
_Until = Annotated[float, Meta(ge=0, le=_LONGEST_S)]
_Points = Annotated[int, Meta(ge=2, le=MOST_POINTS)]


TotalsOf = Callable[[UsageBy, str | None, datetime | None, datetime], Sequence[UsageTotal]]
"""Sums up the jobs of one or all users, from some time on until now."""


@dataclass(frozen=True, slots=True)
class ReportParts:
    """What the reports are made from."""

    totals: TotalsOf
    """What the jobs of one or all users asked for and used, from some time on."""
    prediction_errors: Callable[[str | None, datetime | None], PredictionErrors]
    """How good predictions for the same jobs were."""
    waits_by_user: Callable[[datetime], Mapping[str, UserWaits]]
    """How long the jobs that got memory from some time on had waited."""


class UsageHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext, reports: ReportParts) -> None:
        self._context = context
        self._reports = reports

    async def usage(self, request: Request, job_id: int) -> Response:
        """Record what a framework in a job reports of its memory pools."""
        caller, context = request.caller, self._context
        job = context.existing_job(job_id)
        content = request.read(UsageRequest)
        report, state, now = report_of(content), hook_state(content), context.clock.now()
        steps = steps_of(content)
        if not job.holds_memory:
            return Response(status=204)
        if content.state is None:
            context.usage.hear(job, caller.pid, report, now)
        if steps is not None:
            context.hooks.note_steps(job, caller.pid, steps)
        if state is not None:
            limits = tuple((pool.gpu, pool.limit) for pool in report.pools)
            why = None if content.why is None else clean(content.why[:_LONGEST_WHY])
            heard = HookReport(
                caller.pid, report.framework, report.version, state, now, limits, why
            )
            await context.hooks.hear(job, heard)
        return Response(status=204)

    async def report(
        self,
        request: Request,
        user: str | None = None,
        since: LookBack | None = None,
        by: str = UsageBy.USER,
    ) -> Response:
        """Show what jobs asked for and used, by user, group, week or month.

        `since` is in seconds ago, no `user` means all.
        """
        context = self._context
        if by not in set(UsageBy):
            raise BadValue(f"cannot report by {by[:40]!r}", f"by: {', '.join(UsageBy)}")
        viewer = context.redacted_for(request.caller)
        if viewer is not None and user != viewer:
            raise NotAllowed(
                "cannot report on other users: what they run is hidden on this machine",
                "gpulease report, without --user and --all, shows your own jobs",
            )
        now = context.clock.now()
        begin = None if since is None else now - timedelta(seconds=since)
        # A year of jobs takes a while to add up.
        await request.slot.for_expensive()
        used, errors = await asyncio.gather(
            asyncio.to_thread(self._reports.totals, UsageBy(by), user, begin, now),
            asyncio.to_thread(self._reports.prediction_errors, user, begin),
        )
        return json_response(report_view(UsageBy(by), used, begin, errors))

    async def shares(self, request: Request, since: LookBack = _WEEK_S) -> Response:
        """Show the users of the queue: use, share, turn, and waits in the last `since` seconds."""
        context = self._context
        begin = context.clock.now() - timedelta(seconds=since)
        await request.slot.for_expensive()
        users = await context.scheduler.shares()
        waits = await asyncio.to_thread(self._reports.waits_by_user, begin)
        policy = context.scheduler.policy.queue
        return json_response(
            SharesView(
                policy=policy.name.value,
                half_life=HALF_LIFE.total_seconds(),
                since=instant(begin) or "",
                users=[_share_view(each, waits.get(each.user)) for each in users],
            )
        )


def _share_view(user: UserStanding, waits: UserWaits | None) -> ShareView:
    return ShareView(
        user=user.user,
        use=user.use,
        share=user.share,
        factor=user.factor,
        held=user.held,
        running=user.running,
        waiting=user.waiting,
        turn=user.turn,
        next_job=None if user.next_job is None else user.next_job.label,
        started=0 if waits is None else waits.started,
        mean_wait=None if waits is None else waits.mean_s,
        longest_wait=None if waits is None else waits.longest_s,
    )


def report_of(request: UsageRequest) -> FrameworkReport:
    """Return the report of a hook.

    Raises:
        BadValue: a field is out of range.
    """
    # A hook that fails before any framework names none.
    failed_early = request.framework == "" and request.state == "failed"
    counts_steps = request.framework == "keras" and request.steps is not None
    if request.framework not in FRAMEWORKS and not failed_early and not counts_steps:
        raise BadValue(f"cannot read the report: unknown framework {request.framework[:40]!r}")
    if len(request.gpus) > _MOST_GPUS:
        raise BadValue(f"cannot read the report: more than {_MOST_GPUS} GPUs")
    version = clean(request.version[:_LONGEST_VERSION])
    return FrameworkReport(request.framework, version, tuple(_pool(each) for each in request.gpus))


def hook_state(request: UsageRequest) -> HookState | None:
    """Return what a hook did; None if the report says nothing of it.

    Raises:
        BadValue: there is no such state.
    """
    match request.state:
        case "limited" | "failed":
            return HookState(request.state)
        case None:
            # A hook that started before an upgrade reports the limits of its pools only.
            is_limit = any(pool.limit is not None for pool in request.gpus)
            return HookState.LIMITED if is_limit else None
        case state:
            raise BadValue(f"cannot read the report: no state {state[:40]!r}")


def steps_of(request: UsageRequest) -> Steps | None:
    """Return the training steps that a process counted.

    Raises:
        BadValue: a number is out of range.
    """
    if request.steps is None or request.seconds is None:
        return None
    if not (0 <= request.steps <= _LARGEST and 0 <= request.seconds <= _LARGEST):
        raise BadValue("cannot read the report: a number of steps is out of range")
    return Steps(request.steps, request.seconds)


def _pool(reported: PoolUsage) -> PoolReport:
    for size in (reported.pool, reported.peak, reported.limit):
        if size is not None and not 0 <= size <= _LARGEST:
            raise BadValue("cannot read the report: a size in it is out of range")
    uuid = GpuUuid(reported.gpu[:_LONGEST_UUID])
    return PoolReport(uuid, reported.pool, reported.peak, reported.limit)


def report_view(
    by: UsageBy, totals: Sequence[UsageTotal], since: datetime | None, errors: PredictionErrors
) -> ReportView:
    """Return what jobs asked for and used as a wire object."""
    rows = [astuple(each) for each in totals]
    by_user = by is UsageBy.USER
    return ReportView(
        since=instant(since),
        users=[UseView(*row) for row in rows if by_user],
        predictions=PredictionsView(*astuple(errors)),
        by=by.value,
        parts=[UsePartView(*row) for row in rows if not by_user],
    )


class MemorySeriesHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext, series: Callable[[], MemoryReader]) -> None:
        """`series` returns the memory of GPUs and jobs over time, until now."""
        self._context = context
        self._series = series

    async def gpu(
        self,
        request: Request,
        gpu: str,
        since: LookBack = _HOUR_S,
        until: _Until = 0.0,
        points: _Points = SOME_POINTS,
    ) -> Response:
        """Show the memory of a GPU over time, from `since` to `until` seconds ago."""
        context = self._context
        begin, end = _range(context.clock.now(), since, until)
        found = await context.gpu(gpu)
        grid = grid_over(begin, end, points)
        await request.slot.for_expensive()
        series = await asyncio.to_thread(self._series().gpu, found.uuid, grid)
        return json_response(gpu_history_view(found, grid, series))

    async def job(
        self,
        request: Request,
        job_id: int,
        since: LookBack = _LONGEST_S,
        until: _Until = 0.0,
        points: _Points = SOME_POINTS,
    ) -> Response:
        """Show the memory of a job on each of its GPUs, while it held them in a range of time."""
        context = self._context
        job = context.existing_job(job_id)
        begin, end = _range(now := context.clock.now(), since, until)
        held_from, held_to = job.granted_at or job.submitted_at, job.ended_at or now
        if begin <= held_to and held_from <= end:
            begin, end = max(begin, held_from), min(end, held_to)
        grid = grid_over(begin, end, points, JOB_SPAN_S)
        gpus = [lease.gpu for lease in job.leases]
        await request.slot.for_expensive()
        reader = self._series()
        series = [await asyncio.to_thread(reader.job, job.id, gpu, grid) for gpu in gpus]
        return json_response(job_memory_view(job, grid, series, context.gpu_labels(gpus)))


def _range(now: datetime, since: float, until: float) -> tuple[datetime, datetime]:
    """Return the instants `since` and `until` seconds ago. Raises: BadValue."""
    if until >= since:
        raise BadValue.of_field(
            "until", f"{until:g}", "it is before since", "since=7200, until=3600"
        )
    return now - timedelta(seconds=since), now - timedelta(seconds=until)


def gpu_history_view(gpu: GpuReading, grid: Grid, series: GpuSeries) -> GpuHistoryView:
    """Return a GPU over time as a wire object."""
    return GpuHistoryView(
        gpu=gpu.uuid,
        label=gpu.label,
        name=gpu.name,
        total=gpu.total,
        begins_at=instant(grid.begins_at) or "",
        step=grid.step_s,
        used=series.used,
        leased=series.leased,
        committed=series.committed,
        unmanaged=series.unmanaged,
        utilization=series.utilization,
        temperature=series.temperature,
        power=series.power,
        owners=[
            OwnerSeriesView(user, list(used), _mean_view(mean))
            for (user, used), mean in zip(series.owners, series.owner_means, strict=True)
        ],
        means={name: _mean_view(mean) for name, mean in series.means.items()},
    )


def _mean_view(mean: Mean) -> MeanView:
    return MeanView([_rounded(each) for each in mean.values], _rounded(mean.overall))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def job_memory_view(
    job: Job, grid: Grid, series: list[JobSeries], labels: dict[GpuUuid, str]
) -> JobMemoryView:
    """Return a job over time as a wire object; `series` are those of its leases."""
    return JobMemoryView(
        job=job.id,
        label=job.label,
        begins_at=instant(grid.begins_at) or "",
        step=grid.step_s,
        gpus=[
            JobGpuSeriesView(
                gpu=lease.gpu,
                label=labels[lease.gpu],
                leased=lease.memory,
                used=each.used,
                pool=each.pool,
                utilization=each.utilization,
                means={name: _mean_view(mean) for name, mean in each.means.items()},
            )
            for lease, each in zip(job.leases, series, strict=True)
        ],
    )
