"""A planning pass over a long queue, compared with sorting as many jobs."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.timing import paired, seconds
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job, Owner, grant
from gpulease.domain.lease import Claim
from gpulease.domain.limits import UserLimits
from gpulease.domain.placement import Placement
from gpulease.domain.plan import plan
from gpulease.domain.queue_options import QueueOptions
from gpulease.service.observation import Observation
from gpulease.service.ports import Policy
from gpulease.service.queue_state import QueueState
from gpulease.store.store import SqlStore

G = 1024**3
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WAITING = 10_000
GPUS = 8
GOAL_MS = 20
READINGS = tuple(GpuReading(GpuUuid(f"GPU-{n}"), n, "Fake", 80 * G, 0, 0, ()) for n in range(GPUS))
_OWNERS = [Owner(1000 + n, 1000, f"user{n}") for n in range(10)]
_SHAPES = [Claim((n % 6 + 1) * 11 * G, n % 3 + 1) for n in range(18)]
_OLD = QueueOptions(aging_since_at=NOW - timedelta(hours=30))
POLICY = Policy(limits_of=lambda _: UserLimits(most_gpus=64, gib_hours_per_week=10**6))


def running() -> list[Job]:
    """Return a job with 70 of 80 GiB on each GPU."""
    jobs = [Job(JobId(n + 1), _OWNERS[n], "j", "true", Claim(70 * G), NOW) for n in range(GPUS)]
    return [
        grant(job, Placement(((reading.uuid, 70 * G),)), NOW)
        for job, reading in zip(jobs, READINGS, strict=True)
    ]


def waiting(begin: int, end: int) -> list[Job]:
    """Return queued jobs of ten users; the first ten of each have waited for long."""
    return [
        Job(
            JobId(GPUS + n + 1),
            _OWNERS[n % 10],
            "j",
            "true",
            _SHAPES[n // 10 % len(_SHAPES)],
            NOW,
            queue=_OLD if n < 100 else QueueOptions(),
        )
        for n in range(begin, end)
    ]


def measure(jobs: list[Job], readings: Sequence[GpuReading]) -> tuple[float, float, float]:
    """Return the seconds of the first pass, of one with a new job, and of sorting the jobs."""
    seen = Observation(tuple(readings), {}, NOW)
    new = iter(waiting(WAITING, WAITING + 100))
    with tempfile.TemporaryDirectory(prefix="gpulease-bench-") as name:
        state = QueueState(SqlStore(Path(name) / "gpulease.db"))

        def one_more() -> None:
            jobs.append(next(new))
            plan(state.snapshot(jobs, seen, POLICY, {}, NOW))

        first = seconds(one_more)
        return first, *paired(one_more, lambda: sorted(jobs, key=lambda job: job.id), 15)


def run() -> Iterator[Figure | str]:
    queue = waiting(0, WAITING)
    used = [replace(reading, used=75 * G) for reading in READINGS]
    for name, jobs, readings in (
        ("all GPUs leased", [*running(), *queue], READINGS),
        ("processes without a lease on all GPUs", queue, used),
    ):
        first, planned, sorted_ = measure(jobs, readings)
        yield Figure(f"planning pass of {WAITING}, {name}", planned * 1e3, "ms", GOAL_MS)
        yield (
            f"{planned / sorted_:.1f} times as long as sorting the jobs; the first pass takes "
            f"{first * 1e3:.0f} ms"
        )
