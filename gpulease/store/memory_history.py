"""The memory of each GPU over time, in rows that cover longer spans with age.

One row covers a second for an hour, a minute for a day, and 15 minutes for a year. Samples are
written in batches, so that the disk of an idle machine may sleep. A crash loses some seconds of
history, never a lease.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from sqlalchemy import Connection, Delete, bindparam, delete, func, select, text, update
from sqlalchemy.dialects.sqlite import insert as upsert

from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.memory_series import JOB_SPAN_S, JobSpan
from gpulease.store.statements import remember_gpu
from gpulease.store.store import SqlStore
from gpulease.store.tables import GpuMemoryRow, GpuRow, Instant, LeaseRow

NOW = 0
"""The `resolution` of the row that holds the latest sample."""


_OF_ANY_GPU = GpuMemoryRow.uuid.in_(select(GpuRow.uuid))
"""For the primary key, which begins with the GPU: without it SQLite reads the whole table."""


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
    Resolution(60, timedelta(days=3)),
    Resolution(900, timedelta(days=365)),
)
"""For the memory of jobs."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The ledgers of all GPUs at one instant."""

    at: datetime
    gpus: tuple[GpuMemory, ...]


class MemoryHistory:
    """Writes and thins the history of GPU memory."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def record(
        self,
        samples: Sequence[Sample],
        peaks: Mapping[tuple[JobId, GpuUuid], int],
        spans: Sequence[JobSpan] = (),
    ) -> None:
        """Store samples, the latest also as the present.

        `peaks` of running jobs are in bytes, `spans` are those of jobs that are over.
        """
        rows = [row for sample in samples for row in _rows(sample)]
        if not rows:
            return
        with self._store.write_connection() as connection:
            latest = samples[-1]
            for gpu in latest.gpus:
                connection.execute(remember_gpu(gpu.reading, latest.at))
            self._replace_now(connection, latest)
            connection.execute(upsert(GpuMemoryRow).on_conflict_do_nothing(), rows)
            if spans:
                connection.execute(_ADD_JOB_SPAN, [_span_values(each) for each in spans])
            for (job, uuid), peak in peaks.items():
                connection.execute(
                    update(LeaseRow)
                    .where(LeaseRow.job == job, LeaseRow.gpu == uuid)
                    .where(func.coalesce(LeaseRow.peak, 0) < peak)
                    .values(peak=peak)
                )

    def _replace_now(self, connection: Connection, latest: Sample) -> None:
        connection.execute(delete(GpuMemoryRow).where(_OF_ANY_GPU, GpuMemoryRow.resolution == NOW))
        connection.execute(
            upsert(GpuMemoryRow), [{**row, "resolution": NOW} for row in _rows(latest)]
        )

    def thin(self, now: datetime) -> None:
        """Merge old samples into the next coarser resolution, and delete the oldest."""
        with self._store.write_connection() as connection:
            for fine, coarse in pairwise(RESOLUTIONS):
                _fold(connection, fine, coarse, now)
            oldest = RESOLUTIONS[-1]
            connection.execute(_older(oldest, now - oldest.keep_for))


_ADD_JOB_SPAN = text(
    """
    INSERT OR IGNORE INTO job_memory (gpu, resolution, at, job, used, pool, utilization)
    SELECT :gpu, :resolution, :at, :job, :used, :pool, :utilization
    WHERE EXISTS (SELECT 1 FROM jobs WHERE id = :job)
    """
)
"""A job may have been deleted since."""


def _span_values(span: JobSpan) -> dict[str, object]:
    return {
        "gpu": span.gpu,
        "resolution": JOB_SPAN_S,
        "at": span.at_s * 1_000_000,
        "job": span.job,
        "used": span.used,
        "pool": span.pool,
        "utilization": span.utilization,
    }


def gpu_values(gpu: GpuMemory) -> tuple[int | None, ...]:
    """Return what is stored of a ledger, in the order of `_VALUES`."""
    reading = gpu.reading
    power = None if reading.power is None else round(reading.power)
    return (
        reading.used, gpu.leased, gpu.committed, gpu.unmanaged,
        reading.utilization, reading.temperature, power,
    )  # fmt: skip


_VALUES = ("used", "leased", "committed", "unmanaged", "utilization", "temperature", "power")


def _rows(sample: Sample) -> Iterable[dict[str, object]]:
    for gpu in sample.gpus:
        yield {
            "uuid": gpu.uuid,
            "resolution": RESOLUTIONS[0].seconds,
            "at": sample.at.replace(microsecond=0),
            **dict(zip(_VALUES, gpu_values(gpu), strict=True)),
        }


_FOLD = text(
    """
    INSERT OR IGNORE INTO gpu_memory
        (uuid, resolution, at, used, committed, unmanaged, utilization)
    SELECT uuid, :coarse, at / :width * :width,
        max(used), max(committed), max(unmanaged), max(utilization)
    FROM gpu_memory
    WHERE uuid IN (SELECT uuid FROM gpus) AND resolution = :fine AND at < :border
    GROUP BY uuid, at / :width
    """
).bindparams(bindparam("border", type_=Instant))


def _fold(connection: Connection, fine: Resolution, coarse: Resolution, now: datetime) -> None:
    """Write one row for each coarse span that is entirely older than `fine.keep_for`."""
    border = _floor(now - fine.keep_for, coarse.seconds)
    connection.execute(
        _FOLD,
        {
            "coarse": coarse.seconds,
            "fine": fine.seconds,
            "width": coarse.seconds * 1_000_000,
            "border": border,
        },
    )
    connection.execute(_older(fine, border))


def _floor(at: datetime, seconds: int) -> datetime:
    return datetime.fromtimestamp(int(at.timestamp()) // seconds * seconds, UTC)


def _older(resolution: Resolution, border: datetime) -> Delete:
    return delete(GpuMemoryRow).where(
        _OF_ANY_GPU, GpuMemoryRow.resolution == resolution.seconds, GpuMemoryRow.at < border
    )
