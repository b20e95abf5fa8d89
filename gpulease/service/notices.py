"""What the owner of a job is told about its lease, in one line each."""

from datetime import timedelta

from gpulease.domain.idleness import Release
from gpulease.domain.overuse import Consequence
from gpulease.domain.sizing import enough_for
from gpulease.service.idleness import AtRest
from gpulease.service.overuse import Finding
from gpulease.service.shortfall import Shortfall
from gpulease.units import GIB, MIB, format_size, format_span

_NO_MORE = "no GPU here offers more"
_USE_OWN = "use the GPUs in the CUDA_VISIBLE_DEVICES that gpulease sets, or lease more with --gpus"
_A_SECOND = timedelta(seconds=1)


def size_to_ask_for(found: Finding, peak: int, most: int) -> str | None:
    """Return the size of a lease that would have held `peak` bytes, as far as a GPU here has it.

    None: a lease cannot be larger than this one. `most` are the bytes of the largest; 0: unknown.
    """
    size = enough_for(peak)
    size = min(size, most) if most else size
    lease = found.lease.memory
    return None if size <= lease or _shown(size) == _shown(lease) else _shown(size)


def overuse_warning(found: Finding, peak: int, most: int) -> str:
    """Say that a job holds more than its lease, and what comes of that."""
    if not found.is_leased:
        return _without_lease(found)
    why = ", and others wait for that memory" if found.policy.elastic and found.wanted else ""
    return f"{_holds(found)}{why}; {_what_comes(found, peak, most)}"


def _without_lease(found: Finding) -> str:
    what = f"{_shown(found.used)} of GPU {found.label}" if found.used else f"GPU {found.label}"
    said = f"job {found.job.id} uses {what}, which it did not lease"
    left = found.standing.left(found.policy)
    if left is None:
        return f"{said}; {_USE_OWN}"
    why = ", and others wait for that memory" if found.policy.elastic else ""
    return f"{said}{why}; unless that ends {_within(left)}, the job is stopped; {_USE_OWN}"


def _within(left: timedelta) -> str:
    return "now" if left < _A_SECOND else f"within {format_span(left)}"


def _what_comes(found: Finding, peak: int, most: int) -> str:
    ask = size_to_ask_for(found, peak, most)
    if found.job.holder is not None:
        return f"the rest is not yours: {f'hold {ask}, or ' if ask else ''}use less"
    next_time = f"next time {f'ask for --mem {ask}' if ask else f'let it use less: {_NO_MORE}'}"
    if found.policy.consequence is Consequence.WARN:
        return next_time
    left = found.standing.left(found.policy) or timedelta(0)
    return f"unless that ends {_within(left)}, the job is stopped; {next_time}"


def overuse_clear(found: Finding) -> str:
    """Say that a job is not stopped for what its owner was told of."""
    job, gpu = f"job {found.job.id}", f"GPU {found.label}"
    within = found.used <= found.lease.memory + found.policy.tolerance
    if within and not found.is_leased:
        return f"{job} holds no more than a context on {gpu} now, and is not stopped"
    if within:
        return f"{job} is within its lease of {gpu} again, and is not stopped"
    where = f"its lease of {gpu}" if found.is_leased else f"a context on {gpu}"
    if found.policy.consequence is Consequence.WARN:
        return f"{job} holds more than {where}, but is not stopped for it any more"
    if not found.is_leased:
        return f"{job} is not stopped: nobody waits for what it holds of {gpu} without a lease"
    return f"{job} is not stopped: nobody waits for what it holds of {gpu} beyond its lease"


def overuse_stop(found: Finding, peak: int, most: int) -> tuple[str, str]:
    """Say why a job is stopped: for the record, with a hint, and for its output."""
    after = format_span(found.policy.grace)
    at_most = f" ({_shown(peak)} at most)" if _shown(peak) != _shown(found.used) else ""
    held = f"it held {_shown(found.used)} of GPU {found.label}{at_most}"
    if found.is_leased:
        why = f"{held} under a lease of {format_size(found.lease.memory)} for longer than {after}"
        ask = size_to_ask_for(found, peak, most)
        hint = f"ask for --mem {ask}" if ask else f"{_NO_MORE}: let it use less, or more GPUs"
    else:
        why, hint = f"{held}, which it did not lease, for longer than {after}", _USE_OWN
    return f"{why}\n\nhint: {hint}", f"job {found.job.id} is stopped: {why}; {hint}"


def shortfall_warning(found: Shortfall) -> str:
    """Say that a job may not get all of its lease, and what its owner can do about it."""
    return (
        f"job {found.job.id} may run out of memory within its lease of "
        f"{format_size(found.lease.memory)} on GPU {found.label}: {_shown(found.unmanaged)} is "
        f"used there outside any lease, {_shown(found.promised)} of it promised to leases; save "
        "the job's work, and have the processes ended that gpulease status lists as in use "
        "without a lease, or run the job again"
    )


def idle_warning(found: AtRest) -> str:
    """Say that nothing happens under a lease, and what comes of that."""
    job = found.job.id
    said = (
        f"job {job} has done nothing on its {_gpus(found)} for {format_span(found.idle_for)}, "
        "and others wait for the memory"
    )
    if found.policy.release is Release.WARN:
        return f"{said}; gpulease cancel {job} gives it back"
    what = "the job is stopped" if found.job.holder is None else "the lease is taken back"
    return (
        f"{said}; unless that ends within {format_span(found.policy.grace)}, {what}; "
        f"gpulease keep {job} keeps it"
    )


def idle_release(found: AtRest) -> tuple[str, str]:
    """Say why a lease is taken back: for the record, with a hint, and for the job's output."""
    span = format_span(found.idle_for)
    why = f"it did nothing on its {_gpus(found)} for {span} while others waited"
    hint = "what is idle on purpose is kept by gpulease keep, where it is said in time"
    return f"{why}\n\nhint: {hint}", f"job {found.job.id} is stopped: {why}"


def _gpus(found: AtRest) -> str:
    return "GPU" if len(found.job.leases) == 1 else "GPUs"


def _holds(found: Finding) -> str:
    lease = format_size(found.lease.memory)
    return (
        f"job {found.job.id} holds {_shown(found.used)} of GPU {found.label}, "
        f"and its lease is {lease}"
    )


def _shown(size: int) -> str:
    """Write a size so that one over a lease is not shown as the lease itself."""
    return f"{size // MIB}M" if size < 4 * GIB and size % GIB else format_size(size)
