"""Why a job waits, and how it ended, in a sentence and as a number."""

from collections.abc import Sequence

from gpulease.domain.claim import Claim
from gpulease.domain.job import Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.memory import JobId
from gpulease.domain.placement import Obstacle
from gpulease.domain.plan import Waiting
from gpulease.errors import EXIT_TIME_LIMIT
from gpulease.wire import spoken

_LIMITS = frozenset({Outcome.TIME_LIMIT, Outcome.OVER_LEASE, Outcome.IDLE})
"""Ends that gpulease made of a job, whatever it exited with when it was asked to."""


def reason(job: Job, waiting: Waiting | None, gpus: int | None = None) -> str | None:
    """Return why a job waits or why it ended, as a sentence without a full stop.

    `gpus` is how many there are now, which may be fewer than when the job came.
    """
    match job.state:
        case State.ENDED:
            return job.detail or _ending(job)
        case State.RELEASING:
            left = "" if job.holder is not None else "; its processes are still there"
            why, mark, hint = (job.detail or "asked to go").partition("\n\nhint: ")
            return f"{why}{left}{mark}{hint}"
        case State.QUEUED:
            return None if waiting is None else why_it_waits(job.claim, waiting, gpus)
        case State.GRANTED | State.ACTIVE:
            return None if job.main_exited_at is None else _what_goes_on(job)


def _what_goes_on(job: Job) -> str:
    how = "" if job.exit is None else f" ({job.exit})"
    return f"its main process has ended{how}; what it left behind keeps the lease"


def _ending(job: Job) -> str | None:
    if job.outcome is Outcome.EXITED and job.exit is not None:
        return f"exited with {job.exit.code}"
    if job.outcome is Outcome.SIGNALED and job.exit is not None:
        return f"ended by signal {job.exit.signal}"
    return spoken(job.outcome) if job.outcome else None


def why_it_waits(claim: Claim, waiting: Waiting, gpus: int | None = None) -> str | None:
    """Return why a claim has not been granted, as a sentence without a full stop."""
    if gpus is not None and gpus < claim.gpus:
        return f"it asks for {claim.gpus} GPUs, and the driver shows {gpus} now"
    hindrances = waiting.refusal.hindrances
    leased = [each for each in hindrances if each.obstacle is Obstacle.LEASED]
    if leased:
        holders = sorted({job for each in leased for job in each.waits_for})
        return f"no room for {claim} before {_one_of(holders)} ends"
    first = sorted({job for each in hindrances for job in each.waits_for})
    if first:
        return f"waits its turn behind {_one_of(first)}"
    if hindrances:
        return "; ".join(f"GPU {each.label}: {each.why}" for each in hindrances)
    # Just submitted: the queue is looked at within moments, and most jobs never wait at all.
    return None


def _one_of(jobs: Sequence[JobId]) -> str:
    if len(jobs) == 1:
        return f"job {jobs[0]}"
    return f"one of the jobs {', '.join(map(str, jobs[:5]))}{', ...' if len(jobs) > 5 else ''}"


def exit_status(job: Job) -> int | None:
    """Return how a job ended as a shell shows it; None while it has not, or never ran."""
    if job.outcome in _LIMITS and job.state is State.ENDED:
        return EXIT_TIME_LIMIT
    if job.exit is None or job.state is not State.ENDED:
        return None
    return job.exit.code if job.exit.signal is None else 128 + job.exit.signal
