"""The memory of each GPU and of each job over time, in rows that cover longer spans with age.

`MemoryHistory` writes and merges the rows, `MemorySeries` reads them.

A row has the largest value of its span, since peaks matter, and what the mean is made of: the sum
of the values times the seconds for which they held, and these seconds. Both stay exact when rows
are merged.

Of a GPU, one row covers a second for an hour, a minute for a day, and 15 minutes for a year. Of a
job on a GPU, one covers 10 seconds for 6 hours, a minute for a week, and 15 minutes for a year.
Samples are written in batches, so that the disk of an idle machine may sleep. A crash loses some
seconds of history, never a lease.

After the clock was set back, newer rows replace those of the same instants.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise, zip_longest
from typing import Any

from sqlalchemy import Connection, TextClause, bindparam, select, text

from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId, UnmanagedBefore
from gpulease.domain.memory_series import (
    HOLDS_FOR_S,
    JOB_SPAN_S,
    Figure,
    Figures,
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
from gpulease.errors import RecordUnwritable
from gpulease.store.statements import REMEMBER_GPU, seen_gpu
from gpulease.store.store import SqlStore
from gpulease.store.tables import GpuMemoryRow, Instant, JobRow, LeaseRow

_US = 1_000_000
NOW = 0
"""The `resolution` of the row that holds the latest sample."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The span of a row, and how long such rows are kept."""

    seconds: int
    """The span that one row covers."""
    keep_for: timedelta


RESOLUTIONS = (
    Resolution(1, timedelta(hours=1)),
    Resolution(60, timedelta(days=1)),
    Resolution(900, timedelta(days=365)),
)
JOB_RESOLUTIONS = (
    Resolution(JOB_SPAN_S, timedelta(hours=6)),
    Resolution(60, timedelta(days=7)),
    Resolution(900, timedelta(days=365)),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The ledgers of all GPUs at one instant."""

    at: datetime
    gpus: tuple[GpuMemory, ...]


_VALUES = ("used", "leased", "committed", "unmanaged", "utilization", "temperature", "power")
_JOB_VALUES = ("used", "pool", "utilization")


def _columns(values: Sequence[str], form: str = "{0}, {0}_sum, {0}_seconds") -> str:
    """Return the columns of some values, or what a form makes of each value."""
    return ", ".join(form.format(value) for value in values)


_MERGED = "max({0}), sum({0}_sum), sum({0}_seconds)"
_NAMED = ":{0}, :{0}_sum, :{0}_seconds"
_DELETE_NOW = text(
    f"DELETE FROM gpu_memory WHERE uuid IN (SELECT uuid FROM gpus) AND resolution = {NOW}"  # noqa: S608
)
_ADD_SAMPLE = text(
    f"""
    INSERT OR REPLACE INTO gpu_memory (uuid, resolution, at, {_columns(_VALUES)})
    VALUES (:uuid, :resolution, :at, {_columns(_VALUES, _NAMED)})
    """  # noqa: S608
).bindparams(bindparam("at", type_=Instant))
# A job may have been deleted since.
_ADD_JOB_SPAN = text(
    f"""
    INSERT OR REPLACE INTO job_memory (gpu, resolution, at, job, {_columns(_JOB_VALUES)})
    SELECT number, :resolution, :at, :job, {_columns(_JOB_VALUES, _NAMED)}
    FROM gpus WHERE uuid = :gpu AND EXISTS (SELECT 1 FROM jobs WHERE id = :job)
    """  # noqa: S608
)
_RAISE_PEAK = text(
    "UPDATE leases SET peak = :peak WHERE job = :job AND gpu = :gpu AND coalesce(peak, 0) < :peak"
)
_DELETE_OF_JOB = text(
    """
    DELETE FROM job_memory
    WHERE gpu = (SELECT number FROM gpus WHERE uuid = :gpu) AND resolution = :resolution
        AND at BETWEEN :begin AND :end AND job = :job
    """
).bindparams(bindparam("begin", type_=Instant), bindparam("end", type_=Instant))


class MemoryHistory:
    """Writes and thins the history of memory."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def record(
        self,
        samples: Sequence[Sample],
        peaks: Mapping[tuple[JobId, GpuUuid], int],
        spans: Sequence[JobSpan] = (),
        following: Sample | None = None,
    ) -> None:
        """Store samples, each of which holds until the next, and the latest also as the present.

        Args:
            samples: those since the last call.
            peaks: of running jobs, in bytes.
            spans: those of jobs that are over.
            following: the sample after `samples`, if there is one; it is one of the next call.
        """
        raised = [{"job": job, "gpu": gpu, "peak": peak} for (job, gpu), peak in peaks.items()]
        with self._store.write_connection() as connection:
            all_known = [*samples, *([] if following is None else [following])]
            if all_known and all_known[-1].gpus:
                _add_samples(connection, samples, all_known)
            if spans:
                connection.execute(_ADD_JOB_SPAN, [_span_values(each) for each in spans])
            if raised:
                connection.execute(_RAISE_PEAK, raised)

    def last_unmanaged(self, since: datetime) -> Mapping[GpuUuid, UnmanagedBefore]:
        """Return what was in use without a lease in the latest sample, if it was taken `since`.

        If the file cannot be read, return nothing.
        """
        wanted = select(GpuMemoryRow.uuid, GpuMemoryRow.unmanaged).where(
            GpuMemoryRow.resolution == NOW,
            GpuMemoryRow.at >= since,
            GpuMemoryRow.unmanaged.is_not(None),
        )
        with suppress(RecordUnwritable), self._store.reading() as connection:
            rows = connection.execute(wanted).all()
            return {GpuUuid(uuid): UnmanagedBefore(memory or 0) for uuid, memory in rows}
        return {}

    def thin(self, now: datetime) -> None:
        """Merge old rows into the next coarser resolution, and delete the oldest."""
        with self._store.write_connection() as connection:
            for table in _TABLES:
                oldest = table.resolutions[-1]
                for fine, coarse in pairwise(table.resolutions):
                    # One row for each coarse span that is entirely older than rows of this age.
                    before_s = int((now - fine.keep_for).timestamp())
                    border = datetime.fromtimestamp(
                        before_s // coarse.seconds * coarse.seconds, UTC
                    )
                    spans = {"fine": fine.seconds, "coarse": coarse.seconds}
                    width = coarse.seconds * _US
                    connection.execute(table.merge, {**spans, "width": width, "border": border})
                    gone = {"resolution": fine.seconds, "border": border}
                    connection.execute(table.delete, gone)
                gone = {"resolution": oldest.seconds, "border": now - oldest.keep_for}
                connection.execute(table.delete, gone)


def _add_samples(
    connection: Connection, samples: Sequence[Sample], all_known: Sequence[Sample]
) -> None:
    latest = all_known[-1]
    connection.execute(REMEMBER_GPU, [seen_gpu(gpu.reading, latest.at) for gpu in latest.gpus])
    connection.execute(_DELETE_NOW)
    until = [int(each.at.timestamp()) for each in all_known[1:]]
    rows = [
        row
        for sample, next_s in zip_longest(samples, until[: len(samples)])
        for row in _rows(sample, next_s, RESOLUTIONS[0].seconds)
    ]
    connection.execute(_ADD_SAMPLE, [*rows, *_rows(latest, None, NOW)])


def _gpu_values(gpu: GpuMemory) -> tuple[int | None, ...]:
    """Return what is stored of a ledger, in the order of `_VALUES`."""
    reading = gpu.reading
    power = None if reading.power is None else round(reading.power)
    return (
        reading.used, gpu.leased, gpu.committed, gpu.unmanaged,
        reading.utilization, reading.temperature, power,
    )  # fmt: skip


def _rows(sample: Sample, next_s: int | None, resolution: int) -> Iterable[dict[str, object]]:
    """Yield the rows of a sample that holds until an instant; None: for a second."""
    at = sample.at.replace(microsecond=0)
    lasts_s = 1 if next_s is None else next_s - int(at.timestamp())
    seconds = max(0, min(HOLDS_FOR_S, lasts_s))
    for gpu in sample.gpus:
        figures = held(_gpu_values(gpu), seconds)
        key = {"uuid": gpu.uuid, "resolution": resolution, "at": at}
        yield {**key, **_figure_values(_VALUES, figures)}


def _span_values(span: JobSpan) -> dict[str, object]:
    key = {"gpu": span.gpu, "resolution": JOB_SPAN_S, "at": span.at_s * _US, "job": span.job}
    return {**key, **_figure_values(_JOB_VALUES, span.figures)}


def _figure_values(names: Sequence[str], figures: Figures) -> dict[str, int | None]:
    return {
        f"{name}{part}": known
        for name, figure in zip(names, figures, strict=True)
        for part, known in zip(("", "_sum", "_seconds"), figure, strict=True)
    }


_GPUS_SEEN = "(SELECT uuid FROM gpus)"
_GPU_KEY, _JOB_KEY = f"uuid IN {_GPUS_SEEN}", "gpu IN (SELECT number FROM gpus)"
"""The GPU is first in both primary keys."""


def _merge(table: str, key: Sequence[str], where: str, values: Sequence[str]) -> TextClause:
    """Return the statement that merges the rows of one resolution into those of the next."""
    others = ", ".join(key)
    return text(
        f"""
        INSERT OR REPLACE INTO {table} (resolution, at, {others}, {_columns(values)})
        SELECT :coarse, at / :width * :width, {others}, {_columns(values, _MERGED)}
        FROM {table} WHERE {where} AND resolution = :fine AND at < :border
        GROUP BY {others}, at / :width
        """  # noqa: S608
    ).bindparams(bindparam("border", type_=Instant))


def _deletion(table: str, where: str) -> TextClause:
    return text(
        f"DELETE FROM {table} WHERE {where} AND resolution = :resolution AND at < :border"  # noqa: S608
    ).bindparams(bindparam("border", type_=Instant))


@dataclass(frozen=True, slots=True)
class _Table:
    """How the rows of a table are merged and deleted."""

    resolutions: Sequence[Resolution]
    merge: TextClause
    """Of each resolution but the last into the next."""
    delete: TextClause


_TABLES = (
    _Table(
        RESOLUTIONS,
        _merge("gpu_memory", ("uuid",), _GPU_KEY, _VALUES),
        _deletion("gpu_memory", _GPU_KEY),
    ),
    _Table(
        JOB_RESOLUTIONS,
        _merge("job_memory", ("gpu", "job"), _JOB_KEY, _JOB_VALUES),
        _deletion("job_memory", _JOB_KEY),
    ),
)


def delete_job_memory(connection: Connection, jobs: Sequence[JobId]) -> None:
    """Delete the memory over time of ended jobs.

    Rows from before the clock was set are not found, and are deleted when they are a year old.
    """
    leases = select(LeaseRow.job, LeaseRow.gpu, LeaseRow.granted_at, JobRow.ended_at)
    leases = leases.join(JobRow, JobRow.id == LeaseRow.job).where(LeaseRow.job.in_(jobs))
    spans = [
        {
            "job": job,
            "gpu": gpu,
            "resolution": each.seconds,
            "begin": begin - timedelta(seconds=each.seconds),
            "end": end,
        }
        for job, gpu, begin, end in connection.execute(leases).all()
        for each in JOB_RESOLUTIONS
    ]
    if spans:
        connection.execute(_DELETE_OF_JOB, spans)


# Rows move from a finer resolution to a coarser one, so an instant is in one of them only. The
# database merges what is in one step: rows that are longer than a step stay alone. What is outside
# the range that was asked for is not merged with what is in it.
_STEP = "(at - :begin) / :step, at >= :first AND at < :last"
_OF_JOBS = "gpu = (SELECT number FROM gpus WHERE uuid = :gpu) AND resolution = :resolution"


def _merging(values: Sequence[str], table: str, where: str) -> TextClause:
    return text(
        f"""
        SELECT min(at) / {_US}, {_columns(values, _MERGED)} FROM {table}
        WHERE {where} AND at >= :begin AND at < :end
        GROUP BY {_STEP}
        """  # noqa: S608
    )


_GPU = _merging(_VALUES, "gpu_memory", "uuid = :gpu AND resolution = :resolution")
_JOB = _merging(_JOB_VALUES, "job_memory", f"{_OF_JOBS} AND job = :job")
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
            rows = [
                _span(row, max(each.seconds, HOLDS_FOR_S), len(_VALUES))
                for each in RESOLUTIONS
                for row in _ask(connection, _GPU, each, grid, {"gpu": gpu})
            ]
            rows += self._gpu_samples(gpu, grid)
            owners = self._owners(connection, gpu, grid)
        found = series_of(grid, rows, len(_VALUES))
        peaks, means = [peak for peak, _ in found], [mean for _, mean in found]
        largest = {user: series_of(grid, each, 1)[0][0] for user, each in owners.items()}
        names = ranked(largest)
        by_name = by_owner(peaks[0], largest, names)
        known_s = total(grid, rows, len(_VALUES))[0].seconds
        owner_means = means_of_owners(grid, owners, names, means[0], known_s)
        return GpuSeries(by_name, owner_means, dict(zip(_VALUES, means, strict=True)), *peaks)

    def job(self, job: JobId, gpu: GpuUuid, grid: Grid) -> JobSeries:
        """Return the series of a job on a GPU. Raises as `gpu` does."""
        with self._store.reading() as connection:
            wanted = {"gpu": gpu, "job": job}
            rows = [
                _span(row, each.seconds, len(_JOB_VALUES))
                for each in JOB_RESOLUTIONS
                for row in _ask(connection, _JOB, each, grid, wanted)
            ]
        rows += [
            Span(each.at_s, JOB_SPAN_S, each.figures)
            for each in self._spans
            if each.job == job and each.gpu == gpu
        ]
        # The first row began before the job, if it is long.
        found = series_of(replace(grid, first_s=0), rows, len(_JOB_VALUES))
        peaks, means = [peak for peak, _ in found], [mean for _, mean in found]
        return JobSeries(dict(zip(_JOB_VALUES, means, strict=True)), *peaks)

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

    def _gpu_samples(self, uuid: GpuUuid, grid: Grid) -> Iterator[Span]:
        instants = [int(sample.at.timestamp()) for sample in self._samples]
        until = [*instants[1:], grid.last_s]
        for sample, at_s, next_s in zip(self._samples, instants, until, strict=False):
            seconds = max(0, min(HOLDS_FOR_S, next_s - at_s))
            for gpu in sample.gpus:
                if gpu.uuid == uuid:
                    yield Span(at_s, HOLDS_FOR_S, held(_gpu_values(gpu), seconds))


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
