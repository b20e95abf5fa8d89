"""Reads the memory of GPUs and jobs over time, in rows of all resolutions and from memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, TextClause, text

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.memory_series import (
    HOLDS_FOR_S,
    JOB_SPAN_S,
    GpuSeries,
    Grid,
    JobSeries,
    JobSpan,
    Series,
    Span,
    by_owner,
    series_of,
)
from gpulease.store.engine import translate_errors
from gpulease.store.memory_history import (
    JOB_RESOLUTIONS,
    RESOLUTIONS,
    Resolution,
    Sample,
    gpu_values,
)
from gpulease.store.store import SqlStore

_US = 1_000_000
# Rows move from a finer resolution to a coarser one, so an instant is in one of them only. The
# database merges what is in one step: rows that are longer than a step stay alone.
_GPU = text(
    """
    SELECT min(at) / 1000000, max(used), max(leased), max(committed), max(unmanaged),
        max(utilization), max(temperature), max(power)
    FROM gpu_memory
    WHERE uuid = :gpu AND resolution = :resolution AND at >= :begin AND at < :end
    GROUP BY (at - :begin) / :step
    """
)
_JOB = text(
    """
    SELECT min(at) / 1000000, max(used), max(pool), max(utilization)
    FROM job_memory
    WHERE gpu = (SELECT number FROM gpus WHERE uuid = :gpu) AND resolution = :resolution
        AND at >= :begin AND at < :end AND job = :job
    GROUP BY (at - :begin) / :step
    """
)
_OWNERS = text(
    """
    SELECT min(at) / 1000000, user, max(used)
    FROM (
        SELECT at, user, sum(used) AS used
        FROM job_memory CROSS JOIN jobs ON jobs.id = job
        WHERE gpu = (SELECT number FROM gpus WHERE uuid = :gpu) AND resolution = :resolution
            AND at >= :begin AND at < :end
        GROUP BY at, user
    )
    GROUP BY user, (at - :begin) / :step
    """
)
_GPU_WIDTH, _JOB_WIDTH = 7, 3


class MemorySeries:
    """Series over any range, with what is not written yet as of the construction."""

    def __init__(
        self, store: SqlStore, samples: Sequence[Sample] = (), spans: Sequence[JobSpan] = ()
    ) -> None:
        self._store = store
        self._samples = samples
        self._spans = spans

    def gpu(self, gpu: GpuUuid, grid: Grid) -> GpuSeries:
        """Return the series of a GPU.

        Raises:
            RecordUnwritable: the file cannot be read now.
        """
        with self._reading() as connection:
            rows = [*_gpu_rows(connection, gpu, grid), *self._gpu_samples(gpu)]
            owners = self._owners(connection, gpu, grid)
        found = series_of(grid, rows, _GPU_WIDTH)
        return GpuSeries(by_owner(found[0], owners), *found)

    def job(self, job: JobId, gpu: GpuUuid, grid: Grid) -> JobSeries:
        """Return the series of a job on a GPU. Raises as `gpu` does."""
        with self._reading() as connection:
            wanted = {"gpu": gpu, "job": job}
            rows = [
                Span(row[0], each.seconds, tuple(row[1:]))
                for each in JOB_RESOLUTIONS
                for row in _ask(connection, _JOB, each, grid, wanted)
            ]
        rows += [
            Span(each.at_s, JOB_SPAN_S, (each.used, each.pool, each.utilization))
            for each in self._spans
            if each.job == job and each.gpu == gpu
        ]
        return JobSeries(*series_of(grid, rows, _JOB_WIDTH))

    def _owners(self, connection: Connection, gpu: GpuUuid, grid: Grid) -> Mapping[str, Series]:
        spans: dict[str, list[Span]] = {}
        for each in JOB_RESOLUTIONS:
            for at_s, user, used in _ask(connection, _OWNERS, each, grid, {"gpu": gpu}):
                spans.setdefault(user, []).append(Span(at_s, each.seconds, (used,)))
        unwritten: dict[tuple[str, int], int] = {}
        for span in self._spans:
            if span.gpu == gpu:
                key = span.user, span.at_s
                unwritten[key] = unwritten.get(key, 0) + (span.used or 0)
        for (user, at_s), used in unwritten.items():
            spans.setdefault(user, []).append(Span(at_s, JOB_SPAN_S, (used,)))
        return {user: series_of(grid, each, 1)[0] for user, each in spans.items()}

    def _gpu_samples(self, uuid: GpuUuid) -> Iterator[Span]:
        for sample in self._samples:
            for gpu in sample.gpus:
                if gpu.uuid == uuid:
                    yield Span(int(sample.at.timestamp()), HOLDS_FOR_S, gpu_values(gpu))

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with translate_errors(self._store.path), self._store.engine.connect() as connection:
            yield connection


def _gpu_rows(connection: Connection, gpu: GpuUuid, grid: Grid) -> Iterator[Span]:
    for each in RESOLUTIONS:
        lasts_s = max(each.seconds, HOLDS_FOR_S)
        for row in _ask(connection, _GPU, each, grid, {"gpu": gpu}):
            yield Span(row[0], lasts_s, tuple(row[1:]))


def _ask(
    connection: Connection,
    query: TextClause,
    resolution: Resolution,
    grid: Grid,
    wanted: Mapping[str, object],
) -> Iterable[Sequence[Any]]:
    """Return the rows of one resolution, those that begin before the grid and last into it too."""
    steps_before = -(-max(resolution.seconds, HOLDS_FOR_S) // grid.step_s)
    begin_s = grid.begin_s - steps_before * grid.step_s
    return connection.execute(
        query,
        {
            **wanted,
            "resolution": resolution.seconds,
            "begin": begin_s * _US,
            "end": grid.end_s * _US,
            "step": grid.step_s * _US,
        },
    ).all()
