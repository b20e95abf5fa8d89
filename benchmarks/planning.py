"""A planning pass over a long queue, compared with sorting as many jobs."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from benchmarks.timing import paired
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job, Owner, grant
from gpulease.domain.lease import Claim
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Snapshot, plan

G = 1024**3
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WAITING = 10_000
GPUS = 8


def queue() -> Snapshot:
    """Return eight full GPUs and 10,000 queued jobs with various claims."""
    readings = [GpuReading(GpuUuid(f"GPU-{n}"), n, "Fake", 80 * G, 0, 0, ()) for n in range(GPUS)]
    owner = Owner(1000, 1000, "alice")
    jobs = [
        grant(
            Job(JobId(n + 1), owner, "j", "true", Claim(70 * G), NOW),
            Placement(((GpuUuid(f"GPU-{n}"), 70 * G),)),
            NOW,
        )
        for n in range(GPUS)
    ]
    jobs += [
        Job(JobId(GPUS + n + 1), owner, "j", "true", Claim((n % 60 + 11) * G, n % 3 + 1), NOW)
        for n in range(WAITING)
    ]
    return Snapshot(jobs, readings, NOW)


def hopeless(snapshot: Snapshot) -> Snapshot:
    """Return the same queue with unmanaged use: no job can start, so each is considered."""
    used = [replace(reading, used=75 * G) for reading in snapshot.readings]
    waiting = [job for job in snapshot.jobs if not job.holds_memory]
    return replace(snapshot, jobs=waiting, readings=used)


def run() -> Iterator[str]:
    full = queue()
    for name, snapshot in (("all GPUs leased", full), ("strangers on all GPUs", hopeless(full))):
        jobs = list(snapshot.jobs)
        planned, sorted_ = paired(
            lambda s=snapshot: plan(s), lambda j=jobs: sorted(j, key=lambda job: job.id), 9
        )
        yield (
            f"{name}, {WAITING} waiting: a pass takes {planned * 1e3:.1f} ms, "
            f"{planned / sorted_:.1f} times as long as sorting them"
        )
