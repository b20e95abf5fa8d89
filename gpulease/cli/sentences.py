"""What is said of a job before anyone is attached to it, and where nobody can be any more."""

import signal
from datetime import timedelta

from gpulease.cli.outcome import SIGNALED
from gpulease.cli.text import clean, sentence, size
from gpulease.errors import TooMany
from gpulease.units import format_span
from gpulease.wire import JobView

_NO_RUN = {
    "gave_up": "gave up waiting",
    "launch_failed": "could not be started",
    "lost": "was lost, and how it ended is not known",
}

_ENDED_BY_US = {
    "cancelled": "was cancelled",
    "over_lease": "was stopped: it held more than its lease",
    "idle": "was stopped: it did nothing while others waited",
}


def not_followed(number: int, error: TooMany) -> str:
    """Say that a job cannot be followed now, and that nothing is lost by it."""
    return (
        f"gpulease: {clean(error.message)}; job {number} keeps its turn, "
        "and is looked at now and then"
    )


def shell_on(job: JobView, gpus: str) -> str:
    """Say what a shell has been given; `gpus` names them."""
    memory = size(job.leases[0].memory) if job.leases else size(job.claim.memory)
    each = " each" if len(job.leases) > 1 else ""
    return f"gpulease: a shell on {gpus}, {memory}{each}; exit gives the lease back"


def ended(job: JobView) -> str:
    """Say how a job ended that nobody can attach to any more."""
    logs = f"; gpulease logs {job.id} shows what it wrote" if job.started_at else ""
    return f"gpulease: job {job.id} {_how(job)}{logs}"


def _how(job: JobView) -> str:
    match job.outcome:
        case "time_limit":
            limit = job.claim.time_limit
            after = f" of {format_span(timedelta(seconds=limit))}" if limit else ""
            return f"ended at its time limit{after}"
        case "cancelled" | "over_lease" | "idle" as outcome:
            return _ENDED_BY_US[outcome]
        case "signaled" if job.exit_status is not None:
            return f"was ended by {_signal_name(job.exit_status - SIGNALED)}"
        case "gave_up" | "launch_failed" | "lost" as outcome:
            why = f": {sentence(job.reason, job.hint)}" if job.reason else ""
            return _NO_RUN[outcome] + why
        case _:
            with_status = "" if job.exit_status is None else f" with exit status {job.exit_status}"
            return f"has ended{with_status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
