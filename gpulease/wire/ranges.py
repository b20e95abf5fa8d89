"""Which values of a request are in range, whoever grants the lease.

The daemon checks every request. A cluster has no daemon that sees it, so that there the command
checks the request itself. Every function raises BadValue.
"""

from __future__ import annotations

from datetime import timedelta

from gpulease.errors import BadValue
from gpulease.units import LONGEST_SPAN, format_size, format_span
from gpulease.wire.text import LONGEST_NAME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.wire.requests import ClaimRequest, SubmitRequest, WorkerOptionsRequest

MOST_GPUS = 1024
LARGEST_SIZE = 1 << 60
SMALLEST_RAM = 32 << 20
"""For gpulease's own process beside the job, and an interpreter."""
_MOST_THREADS = 4096
"""Also of processes, and of cores."""
_COUNTS = ("inter_op_threads", "intra_op_threads", "omp_threads", "processes")


def written_span(seconds: float) -> str:
    """Return seconds as in 1d12h, or as a number where no span is that short or long."""
    is_usual = 1 <= seconds <= timedelta(days=36500).total_seconds()
    return format_span(timedelta(seconds=seconds)).replace(" ", "") if is_usual else f"{seconds:g}s"


def check_claim(asked: ClaimRequest) -> None:
    """Check what a job asks for."""
    if asked.memory is not None and asked.share is not None:
        raise BadValue.of_field("claim.share", asked.share, "the claim has a size as well")
    _check_bound(asked)
    if not 1 <= asked.gpus <= MOST_GPUS:
        raise BadValue.of_field(
            "claim.gpus",
            asked.gpus,
            f"a job has 1 to {MOST_GPUS} GPUs",
            "write --gpus 1 for one GPU",
        )
    if asked.share is not None and not 0 < asked.share <= 100:
        raise BadValue.of_field(
            "claim.share", f"{asked.share:g}%", "a share is above 0% and at most 100%"
        )
    for field in ("memory", "min_vram", "memory_bound"):
        size = getattr(asked, field)
        if size is not None and not 1 <= size <= LARGEST_SIZE:
            why = "a size must be above zero" if size < 1 else "no GPU has so many bytes"
            raise BadValue.of_field(f"claim.{field}", size, why)
    _check_machine(asked)
    limit = asked.time_limit
    if limit is not None and not 1 <= limit <= LONGEST_SPAN.total_seconds():
        raise BadValue.of_field(
            "claim.time_limit",
            written_span(limit),
            f"a time limit is 1s to {format_span(LONGEST_SPAN)}",
            "write a time as 90s, 30m, 4h or 1d12h",
        )
    model = asked.model
    if model is not None and (
        not model.strip() or not model.isprintable() or len(model) > LONGEST_NAME
    ):
        raise BadValue.of_field(
            "claim.model",
            repr(model[:40]),
            "it is no name of a model",
            "use a part of the name that gpulease status shows, such as --gpu-model A100",
        )


def _check_bound(asked: ClaimRequest) -> None:
    """Check the bound of a range; a size and a share can be compared on a GPU only."""
    memory, share = asked.memory_bound, asked.share_bound
    if memory is None and share is None:
        return
    field = "claim.memory_bound" if share is None else "claim.share_bound"
    shown = f"{share:g}%" if memory is None else format_size(memory)
    why, hint = None, "write the smaller size first: --mem 4G..10G"
    if memory is not None and share is not None:
        why = "the range has a size as its bound"
    elif asked.memory is None and asked.share is None:
        why = "the range guarantees nothing"
    elif share is not None and not 0 < share <= 100:
        why = "a share is above 0% and at most 100%"
    elif _is_less(memory, asked.memory) or _is_less(share, asked.share):
        why = "the bound is below what the range guarantees"
    elif asked.exclusive:
        why = "no job waits for the rest of the GPU of an exclusive one"
        hint = "with --exclusive use one size, or leave out --mem for the whole GPU"
    if why is not None:
        raise BadValue.of_field(field, shown, why, hint)


def _check_machine(asked: ClaimRequest) -> None:
    """Check the RAM and the cores."""
    if asked.ram is not None and not SMALLEST_RAM <= asked.ram <= LARGEST_SIZE:
        too_small = f"a job needs at least {format_size(SMALLEST_RAM)} to start"
        why = too_small if asked.ram < SMALLEST_RAM else "no machine has so many bytes"
        raise BadValue.of_field("claim.ram", format_size(asked.ram), why, "such as --ram 32G")
    if asked.cpus is not None and not 1 <= asked.cpus <= _MOST_THREADS:
        raise BadValue.of_field(
            "claim.cpus", asked.cpus, f"a job has 1 to {_MOST_THREADS} cores", "such as --cpus 8"
        )


def _is_less(bound: float | None, least: float | None) -> bool:
    return bound is not None and least is not None and bound < least


def check_counts(asked: WorkerOptionsRequest) -> None:
    """Check the numbers of threads and processes."""
    for name in _COUNTS:
        count = getattr(asked, name)
        if count is not None and not 1 <= count <= _MOST_THREADS:
            raise BadValue.of_field(f"options.{name}", count, f"it is 1 to {_MOST_THREADS}")


def checked_name(name: str) -> str:
    """Return the name of a job, if listings can show it."""
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        raise BadValue.of_field(
            "name",
            repr(name[:40]),
            f"a name is 1 to {LONGEST_NAME} printable characters on one line",
            "write a name such as --name train-7",
        )
    return name


def checked_nice(nice: int) -> int:
    """Return a nice value that is in range."""
    if not -20 <= nice <= 19:
        raise BadValue.of_field(
            "queue.nice",
            nice,
            "a nice value is between -20 and 19",
            "use a value from 0 to 19; only admins may go below 0",
        )
    return nice


def check_submission(request: SubmitRequest) -> None:
    """Check all that is in range or not wherever the job will run."""
    check_claim(request.claim)
    check_counts(request.options)
    checked_nice(request.queue.nice)
    if request.name is not None:
        checked_name(request.name)
