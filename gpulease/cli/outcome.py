"""With which number `run` leaves, and what it says of the end of a job."""

import signal
from dataclasses import dataclass

from gpulease.cli.text import sentence
from gpulease.errors import EXIT_GAVE_UP, EXIT_OWN_FAILURE, EXIT_TIME_LIMIT
from gpulease.wire import JobView

SIGNALED = 128
"""What a shell adds to the number of the signal that ended a command."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended, by its shim."""

    exit_code: int | None
    signal: int | None
    reason: str
    """ "exited", "signaled", or why it was asked to go: "cancelled", "time_limit" and others."""
    ctrl_c_typed: bool = False
    """Ctrl-C was typed on the terminal that was the job's."""


def status_of_ending(ending: Ending) -> int:
    """Return the exit code for what the shim says."""
    if ending.reason == "time_limit":
        return EXIT_TIME_LIMIT
    if ending.exit_code is not None:
        return ending.exit_code
    return SIGNALED + ending.signal if ending.signal is not None else EXIT_OWN_FAILURE


def status_of_job(job: JobView) -> int:
    """Return the exit code for a job that ended without us."""
    if job.exit_status is not None:
        return job.exit_status
    match job.outcome:
        case "gave_up":
            return EXIT_GAVE_UP
        case "time_limit":
            return EXIT_TIME_LIMIT
        case "cancelled":
            return SIGNALED + signal.SIGTERM
        case _:
            return EXIT_OWN_FAILURE


def last_words(job: JobView) -> str | None:
    """Say why a job ended, where its own output does not."""
    why = f": {sentence(job.reason, job.hint)}" if job.reason else ""
    if job.out_of_memory:
        return f"gpulease: job {job.id}{why}"
    said = {
        "gave_up": f"gave up waiting{why}",
        "launch_failed": f"could not be started{why}",
        "lost": f"was lost, and how it ended is not known{why}",
        "cancelled": f"was cancelled{why}",
        "time_limit": "reached its time limit",
    }.get(job.outcome or "")
    return None if said is None else f"gpulease: job {job.id} {said}"
