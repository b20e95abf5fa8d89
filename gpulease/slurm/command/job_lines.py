"""Words for jobs of Slurm that several pages use."""

from datetime import datetime, timedelta

from gpulease.drawing.words import SUSPENDED, UNKNOWN, clean, clock, instant, sentence, size
from gpulease.slurm.command.views import JobView
from gpulease.wire.text import spoken

_FAR = timedelta(days=300)
"""Jobs without a time limit count as a year long in the predictions of Slurm."""


def requested(job: JobView) -> str:
    """Write what a job asked for: 4G, or 2 GPUs."""
    claim = job.claim
    if claim.exclusive:
        return "1 GPU" if claim.gpus == 1 else f"{claim.gpus} GPUs"
    return size(claim.memory)


def outcome_of(job: JobView) -> str:
    """Write the state of a job, or how it ended."""
    if job.suspended:
        return SUSPENDED
    return spoken(job.outcome or job.state)


def nodes_of(job: JobView) -> str:
    """Write the nodes of a job."""
    return clean(job.nodes or ("" if job.state in ("queued", "ended") else UNKNOWN))


def gpus_of(job: JobView) -> str:
    """Write the indexes of the GPUs of a job, with the node where there are several."""
    if len(job.leases) == 1:
        return job.leases[0].gpu or UNKNOWN
    known = [f"{clean(lease.node)}:{lease.gpu}" for lease in job.leases if lease.gpu]
    return " ".join(known) or UNKNOWN


def code_of(job: JobView) -> str:
    """Write the exit code, where the state does not tell how the job ended."""
    has_code = job.outcome in ("exited", "signaled") and job.exit_status is not None
    return str(job.exit_status) if has_code else ""


def place_of(job: JobView) -> int:
    """Return how many places in the queue a job takes."""
    return 1 if job.array_waiting is None else job.array_waiting.jobs


def expected(job: JobView, now: datetime) -> str:
    """Write when Slurm expects a job to start."""
    at = job.expected_start_at
    return UNKNOWN if at is None or instant(at) - now > _FAR else clock(at, now)


def reason_of(job: JobView, now: datetime) -> str | None:
    """Write why a job waits or ended."""
    begins = f"not before {clock(job.begin_at, now)}" if job.begin_at else None
    parts = [begins, sentence(job.reason) if job.reason else None]
    return "; ".join(filter(None, parts)) or None
