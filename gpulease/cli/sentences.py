"""What is said of a job before anyone is attached to it, and where nobody can be any more."""

import signal
from datetime import timedelta

from gpulease.cli.outcome import SIGNALED
from gpulease.cli.text import sentence, size
from gpulease.units import format_span
from gpulease.wire import JobView

_NO_RUN = {
    "gave_up": "gave up waiting",
    "launch_failed": "could not be started",
    "lost": "was lost, and how it ended is not known",
}


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
        case "cancelled":
            return "was cancelled"
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
