"""The routes about memory over time: of a GPU, and of a job on each of its GPUs."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.domain.job import Job
from gpulease.domain.memory_series import JOB_SPAN_S, GpuSeries, Grid, JobSeries, Mean, grid_over
from gpulease.server.context import RequestContext, json_response, slot_of_request
from gpulease.server.messages import Request, Response
from gpulease.server.validation import refuse, span, within
from gpulease.server.view_sources import instant
from gpulease.service.ports import MemoryReader
from gpulease.wire.history import (
    MOST_POINTS,
    SOME_POINTS,
    GpuHistoryView,
    JobGpuSeriesView,
    JobMemoryView,
    MeanView,
    OwnerSeriesView,
)

_HOUR_S = 3600.0
_GPU_VERB, _JOB_VERB = "show the history of a GPU", "show the memory of a job"
_LEAST_POINTS = 2


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
        since: float = _HOUR_S,
        until: float = 0.0,
        points: int = SOME_POINTS,
    ) -> Response:
        """Show the memory of a GPU over time, from `since` to `until` seconds ago."""
        context = self._context
        _check_points(points, _GPU_VERB)
        begin = span("time to look back", since, at_least=1, verb=_GPU_VERB) or timedelta()
        end = span("end of the time", until, at_least=0, verb=_GPU_VERB) or timedelta()
        if end >= begin:
            refuse("it would end before it begins", "since=7200, until=3600", _GPU_VERB)
        now, found = context.clock.now(), await context.gpu(gpu)
        grid = grid_over(now - begin, now - end, points)
        await slot_of_request(request).for_expensive()
        series = await asyncio.to_thread(self._series().gpu, found.uuid, grid)
        return json_response(gpu_history_view(found, grid, series))

    async def job(self, request: Request, job_id: int, points: int = SOME_POINTS) -> Response:
        """Show the memory of a job over time, on each of its GPUs."""
        context = self._context
        _check_points(points, _JOB_VERB)
        job = context.existing_job(job_id)
        begin = job.granted_at or job.submitted_at
        grid = grid_over(begin, job.ended_at or context.clock.now(), points, JOB_SPAN_S)
        gpus = [lease.gpu for lease in job.leases]
        await slot_of_request(request).for_expensive()
        reader = self._series()
        series = [await asyncio.to_thread(reader.job, job.id, gpu, grid) for gpu in gpus]
        return json_response(job_memory_view(job, grid, series, context.gpu_labels(gpus)))


def _check_points(points: int, verb: str) -> None:
    within("number of points", points, _LEAST_POINTS, MOST_POINTS, verb)


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
