"""A lease within a lease: what a process of a job may have of the lease that it runs under.

Nothing is queued for it: the job has been granted the memory, and its lease counts as before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import Lease
from gpulease.errors import AlreadyLeased
from gpulease.server.auth import Caller
from gpulease.server.submissions import JobsOf
from gpulease.server.validation import Defaults, claim_of, options_of
from gpulease.units import format_size
from gpulease.wire.requests import NestedRequest, WorkerOptionsRequest

_DEFAULTS = options_of(WorkerOptionsRequest())
_MOST_DIGITS = 19
"""Of a number of bytes in the environment; int() refuses thousands of them."""


def job_around(
    caller: Caller, environment: Mapping[str, str], live: Sequence[Job], jobs_of: JobsOf
) -> Job | None:
    """Return the job under whose lease `caller` runs. Reads /proc.

    What the environment says is not believed by itself: it outlives the job in whatever inherits
    it. The lease of a hold counts only where the environment names it as well, since a process
    below the holder may have been started without it.
    """
    named = environment.get("GPULEASE_JOB")
    running = {
        job.id: job
        for job in live
        if job.holds_memory and (job.holder is None or named == str(job.id))
    }
    # The kernel says 0 for a caller whom the daemon cannot see, as from another container.
    if caller.pid <= 0 or not running:
        return None
    found: JobId | None = jobs_of([caller.pid], list(running.values())).get(caller.pid)
    return None if found is None else running.get(found)


def part_of(
    job: Job, asked: NestedRequest, environment: Mapping[str, str], defaults: Defaults,
    allocatable: Mapping[GpuUuid, int], *, by_index: bool,
) -> Job:  # fmt: skip
    """Return `job` with the part of its leases that is asked for.

    Where no size is named, the part has all the memory on its GPUs. `allocatable` is what each GPU
    has to lease, of which a share is taken. `by_index`: its GPUs are to be named by their numbers.

    Raises:
        BadValue: a field cannot be what it is.
        AlreadyLeased: it asks for more than the job has.
    """
    claim = claim_of(asked.claim, defaults)
    if claim.time_limit is not None:
        raise _more(job, "only a job has a time limit", "for a command: timeout 4h COMMAND")
    if claim.exclusive and not job.claim.exclusive:
        raise _more(job, "its GPUs are not exclusive", "leave out --exclusive")
    visible = _visible(job, environment, by_index)
    if claim.gpus > len(visible):
        has = "1 GPU" if len(visible) == 1 else f"{len(visible)} GPUs"
        raise _more(job, f"it has {has} here, and this asks for {claim.gpus}", f"ask for {has}")
    most = [_bounded(job, lease, environment) for lease in visible[: claim.gpus]]
    if asked.claim.memory is None and asked.claim.share is None:
        return replace(job, leases=tuple(most))
    wanted = [claim.memory_on(allocatable.get(lease.gpu, lease.memory)) for lease in most]
    if any(size > lease.memory for size, lease in zip(wanted, most, strict=True)):
        has = format_size(min(lease.memory for lease in most))
        want = format_size(max(wanted))
        raise _more(job, f"it has {has} here, and this asks for {want}", f"ask for at most {has}")
    parts = zip(most, wanted, strict=True)
    return replace(job, leases=tuple(replace(lease, memory=size) for lease, size in parts))


def invocation_of(
    job: Invocation, asked: NestedRequest, environment: Mapping[str, str]
) -> Invocation:
    """Return how the frameworks are to be set up: as in the job, but for what is asked for."""
    options = {name: it for name, it in options_of(asked.options).items() if it != _DEFAULTS[name]}
    return Invocation((), "/", environment, options={**job.options, **options})


def _more(job: Job, why: str, hint: str) -> AlreadyLeased:
    return AlreadyLeased(f"cannot run within the lease of job {job.id}: {why}", hint)


def _visible(job: Job, environment: Mapping[str, str], by_index: bool) -> Sequence[Lease]:
    """Return the leases on the GPUs that the caller sees: it may have chosen some of them.

    Raises:
        AlreadyLeased: it has chosen some that cannot be given by their index.
    """
    chosen = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    seen = tuple(lease for lease in job.leases if lease.gpu in chosen)
    if not by_index:
        return seen or job.leases
    # Indices count from the first GPU that the job can open.
    is_first = chosen == [str(index) for index in range(len(chosen))]
    if not (is_first or seen == job.leases[: len(chosen)] or len(chosen) >= len(job.leases)):
        raise _more(
            job,
            "--visible index counts from its first GPU, and CUDA_VISIBLE_DEVICES names others",
            "run the job with --visible uuid",
        )
    return job.leases[: len(chosen)] or job.leases


def _bounded(job: Job, lease: Lease, environment: Mapping[str, str]) -> Lease:
    """Return a lease, or as much of it as a part around this one has."""
    told = environment.get("GPULEASE_MEMORY", "")
    is_size = told.isascii() and told.isdigit() and len(told) <= _MOST_DIGITS
    if environment.get("GPULEASE_JOB") != str(job.id) or not is_size:
        return lease
    return replace(lease, memory=max(1, min(lease.memory, int(told))))
