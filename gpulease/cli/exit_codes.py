"""The exit code of `run` and `attach`."""

from __future__ import annotations

import signal

from gpulease.errors import EXIT_GAVE_UP, EXIT_OWN_FAILURE, EXIT_TIME_LIMIT
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.wire.jobs import JobView

SIGNALED = 128
"""A shell adds this to the number of the signal that ended a command."""
_LIMITS = frozenset({"time_limit", "over_lease", "idle"})
QUEUED_AGAIN = frozenset({"preempted", "requeued"})
"""Ends after which the job is queued again."""


@record(frozen=True)
class JobEnd:
    """How a job ended, as its shim reports it."""

    exit_code: int | None
    signal: int | None
    reason: str
    """ "exited", "signaled", or why it was stopped: "cancelled", "time_limit" and others."""
    ctrl_c_typed: bool = False
    """Ctrl-C was typed on the terminal of the job."""


def status_of_ending(ending: JobEnd) -> int:
    """Return the exit code for an end that the shim reported."""
    if ending.reason in _LIMITS:
        return EXIT_TIME_LIMIT
    if ending.exit_code is not None:
        return ending.exit_code
    return SIGNALED + ending.signal if ending.signal is not None else EXIT_OWN_FAILURE


def status_of_job(job: JobView) -> int:
    """Return the exit code for an end that only the daemon knows."""
    if job.exit_status is not None:
        return job.exit_status
    match job.outcome:
        case "gave_up":
            return EXIT_GAVE_UP
        case "time_limit" | "over_lease" | "idle":
            return EXIT_TIME_LIMIT
        case "released":
            return 0
        case "cancelled" | "preempted" | "requeued":
            return SIGNALED + signal.SIGTERM
        case _:
            return EXIT_OWN_FAILURE
