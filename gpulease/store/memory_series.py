"""Reads the memory of GPUs and jobs over time, in rows of all resolutions and from memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, TextClause, text

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.memory_series import (
    HOLDS_FOR_S,
    JOB_SPAN_S,
    Figure,
    GpuSeries,
    Grid,
    JobSeries,
    JobSpan,
    Span,
    by_owner,
    held,
    means_of_owners,
    ranked,
    series_of,
    total,
)
from gpulease.store.memory_history import (
    JOB_MERGED,
    JOB_RESOLUTIONS,
    JOB_VALUES,
    MERGED,
    RESOLUTIONS,
    SAMPLES,
    VALUES,
    Resolution,
    Sample,
    gpu_values,
)
from gpulease.store.store import SqlStore

_US = 1_000_000
# Rows move from a finer resolution to a coarser one, so an instant is in one of them only. The
# database merges what is in one step: rows that are longer than a step stay alone. What is outside
# the range that was asked for is not merged with what is in it.
_STEP = "(at - :begin) / :step, at >= :first AND at < :last"
_OF_JOBS = "gpu = (SELECT number FROM gpus WHERE uuid = :gpu) AND resolution = :resolution"


def _merging(values: str, source: str, where: str) -> TextClause:
    return text(
        f"""
        SELECT min(at) / {_US}, {values} FROM {source}
        WHERE {where} AND at >= :begin AND at < :end
        GROUP BY {_STEP}
        """  # noqa: S608
    )


_SAMPLES = _merging(MERGED, SAMPLES.format(gpus="(:gpu)"), "1")
_GPU = _merging(MERGED, "gpu_memory", "uuid = :gpu AND resolution = :resolution")
_JOB = _merging(JOB_MERGED, "job_memory", f"{_OF_JOBS} AND job = :job")
_OWNERS = text(
    f"""
    SELECT min(at) / {_US}, user, max(used), sum(used_sum), sum(used_seconds)
    FROM (
        SELECT at, user, sum(used) AS used, sum(used_sum) AS used_sum,
            sum(used_seconds) AS used_seconds
        FROM job_memory CROSS JOIN jobs ON jobs.id = job
        WHERE {_OF_JOBS} AND at >= :begin AND at < :end
        GROUP BY at, user
    )
    GROUP BY user, {_STEP}
    """  # noqa: S608
)


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
        with self._store.reading() as connection:
            rows = [*self._gpu_rows(connection, gpu, grid), *self._gpu_samples(gpu, grid)]
            owners = self._owners(connection, gpu, grid)
        found = series_of(grid, rows, len(VALUES))
        peaks, means = [peak for peak, _ in found], [mean for _, mean in found]
        largest = {user: series_of(grid, each, 1)[0][0] for user, each in owners.items()}
        names = ranked(largest)
        by_name = by_owner(peaks[0], largest, names)
        known_s = total(grid, rows, len(VALUES))[0].seconds
        owner_means = means_of_owners(grid, owners, names, means[0], known_s)
        return GpuSeries(by_name, owner_means, dict(zip(VALUES, means, strict=True)), *peaks)

    def job(self, job: JobId, gpu: GpuUuid, grid: Grid) -> JobSeries:
        """Return the series of a job on a GPU. Raises as `gpu` does."""
        with self._store.reading() as connection:
            wanted = {"gpu": gpu, "job": job}
            rows = [
                _span(row, each.seconds, len(JOB_VALUES))
                for each in JOB_RESOLUTIONS
                for row in _ask(connection, _JOB, each, grid, wanted)
            ]
        rows += [
            Span(each.at_s, JOB_SPAN_S, each.figures)
            for each in self._spans
            if each.job == job and each.gpu == gpu
        ]
        # The first row began before the job, if it is long.
        found = series_of(replace(grid, first_s=0), rows, len(JOB_VALUES))
        peaks, means = [peak for peak, _ in found], [mean for _, mean in found]
        return JobSeries(dict(zip(JOB_VALUES, means, strict=True)), *peaks)

    def _owners(self, connection: Connection, gpu: GpuUuid, grid: Grid) -> dict[str, list[Span]]:
        spans: dict[str, list[Span]] = {}
        for each in JOB_RESOLUTIONS:
            for at_s, user, *figure in _ask(connection, _OWNERS, each, grid, {"gpu": gpu}):
                spans.setdefault(user, []).append(_span((at_s, *figure), each.seconds, 1))
        unwritten: dict[tuple[str, int], Figure] = {}
        for span in self._spans:
            if span.gpu == gpu:
                key, used = (span.user, span.at_s), span.used
                found = unwritten.get(key, Figure(0))
                unwritten[key] = Figure(
                    (found.most or 0) + (used.most or 0),
                    found.sum + used.sum, found.seconds + used.seconds,
                )  # fmt: skip
        for (user, at_s), together in unwritten.items():
            spans.setdefault(user, []).append(Span(at_s, JOB_SPAN_S, (together,)))
        return spans

    def _gpu_rows(self, connection: Connection, gpu: GpuUuid, grid: Grid) -> Iterator[Span]:
        # The latest sample holds until now, which is the end of its range.
        next_s = int(self._samples[0].at.timestamp()) if self._samples else grid.last_s
        wanted = {"gpu": gpu, "next": next_s * _US}
        for each in RESOLUTIONS:
            lasts_s = max(each.seconds, HOLDS_FOR_S)
            query = _SAMPLES if each is RESOLUTIONS[0] else _GPU
            for row in _ask(connection, query, each, grid, wanted):
                yield _span(row, lasts_s, len(VALUES))

    def _gpu_samples(self, uuid: GpuUuid, grid: Grid) -> Iterator[Span]:
        instants = [int(sample.at.timestamp()) for sample in self._samples]
        until = [*instants[1:], grid.last_s]
        for sample, at_s, next_s in zip(self._samples, instants, until, strict=False):
            seconds = max(0, min(HOLDS_FOR_S, next_s - at_s))
            for gpu in sample.gpus:
                if gpu.uuid == uuid:
                    yield Span(at_s, HOLDS_FOR_S, held(gpu_values(gpu), seconds))


def _span(row: Sequence[Any], lasts_s: int, width: int) -> Span:
    """Return a row: its instant, and the largest value, the sum and the seconds of each value."""
    figures = tuple(
        Figure(row[place], row[place + 1] or 0, row[place + 2] or 0)
        for place in range(1, 1 + 3 * width, 3)
    )
    return Span(row[0], lasts_s, figures)


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
            "first": grid.first_s * _US,
            "last": grid.last_s * _US,
        },
    ).all()
