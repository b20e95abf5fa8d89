"""The lease under which a process runs, and a part of it. Nothing is queued for a part: the job has
been granted the memory, and its lease counts as before.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gpulease.domain.choice import enough_of, sets_of, suits
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import Claim, Lease
from gpulease.errors import AlreadyLeased
from gpulease.server.auth import Caller
from gpulease.server.context import RequestContext
from gpulease.server.validation import Defaults, bytes_string, claim_of, gpu_names, options_of
from gpulease.service.refusals import uuids_of
from gpulease.units import counted, format_size
from gpulease.wire.requests import NestedRequest, WorkerOptionsRequest

JobsOf = Callable[[Iterable[int], Sequence[Job]], Mapping[int, JobId]]
"""Returns the job of each pid that belongs to one of some jobs."""

_DEFAULT_OPTIONS = options_of(WorkerOptionsRequest())
_MOST_DIGITS = 19
"""Of a number of bytes; int() refuses thousands of digits."""


async def job_of_caller(
    caller: Caller, environment: Mapping[str, str], context: RequestContext
) -> Job | None:
    """Return the job under whose lease `caller` runs."""
    live, jobs_of = context.scheduler.store.live(), context.processes.jobs_of
    # A process can block the read of its environment.
    return await asyncio.to_thread(job_around, caller, environment, live, jobs_of)


def job_around(
    caller: Caller, environment: Mapping[str, str], live: Sequence[Job], jobs_of: JobsOf
) -> Job | None:
    """Return the job under whose lease `caller` runs. Reads /proc.

    The environment alone proves nothing: processes that outlive the job inherit it. A hold counts
    only if the environment names it too: a process below the holder may run without the lease.
    """
    named = environment.get("GPULEASE_JOB")
    running = {
        job.id: job
        for job in live
        if job.holds_memory and (job.holder is None or named == str(job.id))
    }
    if caller.pid <= 0 or not running:
        return None
    job: JobId | None = jobs_of([caller.pid], list(running.values())).get(caller.pid)
    return None if job is None else running.get(job)


def part_of(
    job: Job, request: NestedRequest, environment: Mapping[str, str], defaults: Defaults,
    allocatable: Mapping[GpuUuid, int], gpus: Mapping[GpuUuid, GpuReading], *, by_index: bool,
) -> Job:  # fmt: skip
    """Return `job` with the requested part of its leases; without a size, with all their memory.

    `allocatable` is the base of shares. `by_index`: the GPUs are to be named by index.

    Raises:
        BadValue: a field is out of range.
        NoSuchGpu: a name stands for no GPU of this machine.
        AlreadyLeased: the request exceeds what the job has.
    """
    claim = claim_of(request.claim, defaults)
    names = gpu_names(request.claim.named)
    claim = replace(claim, named=uuids_of(names, list(gpus.values())))
    if claim.time_limit is not None:
        raise _exceeds(job, "only a job has a time limit", "for a command: timeout 4h COMMAND")
    if claim.exclusive and not job.claim.exclusive:
        raise _exceeds(job, "its GPUs are not exclusive", "leave out --exclusive")
    visible = visible_leases(job, environment, by_index=by_index)
    visible = _asked_for(job, claim, visible, gpus, by_index=by_index)
    if claim.gpus > len(visible):
        has = counted(len(visible), "GPU")
        raise _exceeds(job, f"it has {has} here, and this asks for {claim.gpus}", f"ask for {has}")
    most = [_limited(job, lease, environment) for lease in visible[: claim.gpus]]
    if request.claim.memory is None and request.claim.share is None:
        return replace(job, leases=tuple(most))
    sizes = [allocatable.get(lease.gpu, lease.most) for lease in most]
    wanted = [claim.bound_on(size) or claim.memory_on(size) for size in sizes]
    if any(size > lease.most for size, lease in zip(wanted, most, strict=True)):
        has = format_size(min(lease.most for lease in most))
        want = format_size(max(wanted))
        raise _exceeds(
            job, f"it has {has} here, and this asks for {want}", f"ask for at most {has}"
        )
    parts = zip(most, wanted, strict=True)
    return replace(job, leases=tuple(_part(lease, size) for lease, size in parts))


def _asked_for(
    job: Job,
    claim: Claim,
    visible: Sequence[Lease],
    gpus: Mapping[GpuUuid, GpuReading],
    *,
    by_index: bool,
) -> Sequence[Lease]:
    """Return the leases on the GPUs that a claim asks for.

    Raises:
        AlreadyLeased: there are too few of them, or they have no index here.
    """
    if claim.choice is None:
        return visible
    known = [lease for lease in visible if lease.gpu in gpus and suits(claim, gpus[lease.gpu])]
    chosen = enough_of(claim, known, lambda lease: gpus[lease.gpu])
    if chosen is None:
        sets = sets_of(claim, known, lambda lease: gpus[lease.gpu]).values()
        most = max(map(len, sets), default=0)
        why = f"it has {most or 'none'} of the GPUs asked for here"
        if most >= claim.gpus:
            why = "not enough of its GPUs here are linked by NVLink"
        raise _exceeds(job, why, f"gpulease show {job.label} lists its GPUs")
    if by_index and tuple(chosen[: claim.gpus]) != tuple(job.leases[: claim.gpus]):
        raise _not_by_index(job)
    return chosen


def _not_by_index(job: Job) -> AlreadyLeased:
    return _exceeds(
        job,
        "--visible index counts from its first GPU, and CUDA_VISIBLE_DEVICES or --gpu name others",
        "run the job with --visible uuid",
    )


def invocation_of(
    job: Invocation, request: NestedRequest, environment: Mapping[str, str]
) -> Invocation:
    """Return how frameworks are set up: as in the job, except for what the request asks."""
    asked = options_of(request.options)
    changed = {name: value for name, value in asked.items() if value != _DEFAULT_OPTIONS[name]}
    if "split" in changed:
        # The job's equal parts are replaced as well.
        changed["split_sizes"] = asked["split_sizes"]
    argv = tuple(bytes_string("argument", each) for each in request.argv)
    return Invocation(argv, "/", environment, options={**job.options, **changed})


def _exceeds(job: Job, why: str, hint: str) -> AlreadyLeased:
    return AlreadyLeased(f"cannot run within the lease of {job.title}: {why}", hint)


def visible_leases(job: Job, environment: Mapping[str, str], *, by_index: bool) -> Sequence[Lease]:
    """Return the leases on the GPUs that the caller sees, which may be some of the job's.

    Raises:
        AlreadyLeased: the caller sees GPUs that have no index here.
    """
    chosen = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    seen = tuple(lease for lease in job.leases if lease.gpu in chosen)
    if not by_index:
        return seen or job.leases
    # Indices count from the first GPU that the job can open.
    is_first = chosen == [str(index) for index in range(len(chosen))]
    if not (is_first or seen == job.leases[: len(chosen)] or len(chosen) >= len(job.leases)):
        raise _not_by_index(job)
    return job.leases[: len(chosen)] or job.leases


def _limited(job: Job, lease: Lease, environment: Mapping[str, str]) -> Lease:
    """Return a lease with no more memory than the part in which the caller runs."""
    size = environment.get("GPULEASE_MEMORY", "")
    is_size = size.isascii() and size.isdigit() and len(size) <= _MOST_DIGITS
    if environment.get("GPULEASE_JOB") != str(job.id) or not is_size:
        return lease
    return _part(lease, max(1, min(lease.most, int(size))))


def _part(lease: Lease, size: int) -> Lease:
    """Return the lease of a part that may use `size` bytes; the job's guarantee stays the same."""
    if lease.memory_bound is None or size < lease.memory:
        return replace(lease, memory=size, memory_bound=None)
    return replace(lease, memory_bound=size)
