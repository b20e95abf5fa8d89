"""What `gpulease run` says about a job of Slurm."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from gpulease.cli.format import clean, clock
from gpulease.errors import SlurmFailed
from gpulease.slurm.allocations import Unclear, allocation_on
from gpulease.slurm.commands import run_slurm
from gpulease.slurm.shards import DEFAULT_SHARD

_SOON = timedelta(days=7)
"""Slurm takes a job without a time limit for one of a year."""
_NEVER = frozenset({"DependencyNeverSatisfied", "BadConstraints"})


def started(job: int, node: str | None) -> str:
    """Say where a job has started."""
    where = f" on {clean(node)}" if node else ""
    return f"gpulease: job {job} started{where}{_gpus(job, node)}"


def _gpus(job: int, node: str | None) -> str:
    try:
        shown = run_slurm(["scontrol", "show", "job", "-d", str(job)])
        gpus = allocation_on(shown, job, node or "").gpus
    except (SlurmFailed, Unclear):  # a short job may be over already
        return ""
    return f", {'GPU' if len(gpus) == 1 else 'GPUs'} {', '.join(map(str, gpus))}" if gpus else ""


def waiting(row: Mapping[str, str], now: datetime) -> str:
    """Say why a job waits, and when Slurm expects it to start."""
    from gpulease.cli.cluster.jobs import view

    job = view(row, DEFAULT_SHARD)
    why = f": {clean(job.reason)}" if job.reason else ""
    expected = job.expected_start_at and datetime.fromisoformat(job.expected_start_at)
    if expected and timedelta() < expected - now < _SOON:
        why += f" (expected at {clock(expected.isoformat(), now)}, a prediction)"
    return f"gpulease: job {job.label} waits{why}"


def never_starts(row: Mapping[str, str]) -> str | None:
    """Return why a job can never start, if that is so; Slurm would let it wait without end."""
    return row.get("reason") if row.get("reason") in _NEVER else None


def no_log(error: OSError) -> str:
    """Say that the output is not kept."""
    return (
        f"gpulease: the output is shown here only, and not kept for gpulease logs: {error.strerror}"
    )
