"""Messages about a job that is not attached: while it waits, and after its end."""

from __future__ import annotations

from datetime import timedelta

from gpulease.cli.exit_codes import SIGNALED
from gpulease.cli.signals import name_of
from gpulease.drawing.words import (
    because,
    clean,
    clock,
    id_of,
    in_line,
    in_the_way,
    reason_of,
    shorten,
    size,
    starts_in,
    why_and_when,
)
from gpulease.units import format_span
from gpulease.wire.text import leased

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from gpulease.errors import TooMany
    from gpulease.wire.jobs import JobView

_LONGEST_VALUE = 100
_ENDS = {
    "gave_up": "gave up waiting",
    "launch_failed": "could not be started",
    "lost": "disappeared; how it ended is unknown",
    "dependency_failed": "did not start",
    "cancelled": "was cancelled",
    "over_lease": "was stopped",
    "idle": "was stopped",
    "preempted": "made way for another job",
    "requeued": "was stopped to be queued again",
}
"""What the output of a job does not tell."""
_NO_GPU = frozenset({"", "-1", "none", "nodevfiles"})
"""Values of CUDA_VISIBLE_DEVICES that choose the CPU."""


def preset_devices(environment: Mapping[str, str]) -> str | None:
    """Say that the caller's CUDA_VISIBLE_DEVICES chooses no GPU; None if there is nothing to say.

    Within a job the variable is that of its lease.
    """
    value = environment.get("CUDA_VISIBLE_DEVICES", "").strip()
    if value.lower() in _NO_GPU or environment.get("GPULEASE_JOB"):
        return None
    import shlex

    shown = clean(shorten(value, _LONGEST_VALUE))
    hint = f"to ask for {'these' if ',' in value else 'this one'}, use --gpu {shlex.quote(shown)}"
    if environment.get("SLURM_JOB_ID"):
        # Slurm may number the GPUs of an allocation from 0; these are the machine's numbers.
        numbers = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS")
        these = clean(shorten(numbers, _LONGEST_VALUE)) if numbers else "and their numbers"
        hint = f"to stay within the GPUs that Slurm allocated, use --gpu {these}"
    return f"gpulease: CUDA_VISIBLE_DEVICES={shown} has no effect: gpulease chooses the GPU; {hint}"


def not_followed(job: JobView, error: TooMany) -> str:
    """Say that a job is not followed live, and keeps its place."""
    return (
        f"gpulease: {clean(error.message)}; job {id_of(job)} keeps its place in the queue, "
        "and is checked every few seconds"
    )


def shell_on(job: JobView, gpus: str) -> str:
    """Describe the lease of a shell; `gpus` names its GPUs."""
    memory = leased(job.leases[0]) if job.leases else size(job.claim.memory)
    each = " each" if len(job.leases) > 1 else ""
    return f"gpulease: a shell on {gpus}, {memory}{each}; exit releases the lease"


def ended(job: JobView) -> str:
    """Say how a job ended."""
    logs = f"; gpulease logs {id_of(job)} shows its output" if job.started_at else ""
    return f"gpulease: job {id_of(job)} {_how(job)}{logs}"


def _how(job: JobView) -> str:
    match job.outcome:
        case "time_limit":
            limit = job.claim.time_limit
            after = f" of {format_span(timedelta(seconds=limit))}" if limit else ""
            return f"reached its time limit{after}"
        case "signaled" if job.exit_status is not None:
            return f"was ended by {name_of(job.exit_status - SIGNALED)}"
        case outcome if outcome in _ENDS:
            return f"{_ENDS[outcome]}{because(job)}"
        case _:
            with_status = "" if job.exit_status is None else f" with exit status {job.exit_status}"
            return f"ended{with_status}"


def last_words(job: JobView) -> str | None:
    """Say why a job ended, if its own output does not."""
    if job.outcome == "time_limit":
        return f"gpulease: job {id_of(job)} reached its time limit"
    if job.out_of_memory or job.retried_as is not None:
        return f"gpulease: job {id_of(job)}{because(job)}"
    return f"gpulease: job {id_of(job)} {_how(job)}" if job.outcome in _ENDS else None


def waiting_text(job: JobView, blocker: JobView | None, now: datetime) -> str:
    """Say where a job is in the queue, why it waits, and after which job."""
    if job.state != "queued":
        return f"gpulease: job {id_of(job)} is starting"
    owner = "" if blocker is None else _owner(blocker, now)
    return f"gpulease: job {id_of(job)} waits{in_line(job)}{why_and_when(job, now, owner)}"


def waiting_line(job: JobView, now: datetime, keys: str) -> str:
    """Say on a terminal what a waiting job does, what matters most first: the right end is cut.

    `keys` says what keys do.
    """
    if job.state != "queued":
        return f"job {id_of(job)} · starting"
    when, after = starts_in(job, now), in_the_way(job)
    likely = "probably " if when not in ("soon", "late") else ""
    start = f"starts {likely}{when}" if when else "waits"
    parts = (
        f"job {id_of(job)}",
        f"{start}, after {after}" if after else start,
        reason_of(job, now),
        in_line(job).removeprefix(", "),
        keys,
    )
    return " · ".join(filter(None, parts))


def started_line(job: JobView, again: str | None = None) -> str:
    """Say where a job runs: job 3 · GPU 0 · 4G; `again` is the job that it repeats."""
    gpus = ",".join(clean(each.index) for each in job.devices if each.index)
    sizes = dict.fromkeys(leased(each) for each in job.leases)
    parts = (
        f"job {id_of(job)}",
        again and f"again of {again}",
        gpus and f"GPU{'s' * (len(job.leases) > 1)} {gpus}",
        f"{' and '.join(sizes)}{' each' * (len(job.leases) > 1 and len(sizes) == 1)}",
        any(each.simulated for each in job.devices) and "simulated: no real GPU is used",
    )
    return " · ".join(each for each in parts if each)


def _owner(blocker: JobView, now: datetime) -> str:
    ends = f", which ends by {clock(blocker.expires_at, now)}" if blocker.expires_at else ""
    return f" of {clean(blocker.user)}{ends}"
