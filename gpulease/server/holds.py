"""The routes about leases without a job: holds, and a process's part of the lease of its job.

Nothing is queued for a part: the job has been granted the memory, and its lease counts as before.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gpulease.domain.choice import sets_of, suits
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Holder, Invocation, Job, Process
from gpulease.domain.lease import Claim, Lease, State
from gpulease.errors import AlreadyLeased, BadValue, NotAllowed, WrongState
from gpulease.server.adoptions import LARGEST_PID, adopt, adoption_of, lease_used
from gpulease.server.auth import Caller
from gpulease.server.context import (
    HolderParts,
    RequestContext,
    caller_of_request,
    json_response,
    read_body,
)
from gpulease.server.messages import Request, Response
from gpulease.server.validation import (
    Defaults,
    bytes_string,
    checked_key,
    claim_of,
    environment_of,
    gpu_names,
    notified_of,
    options_of,
    refuse_oversized_exec,
    span,
    within,
)
from gpulease.service.gpu_choice import uuids_of
from gpulease.service.ports import LivingProcess, Submission
from gpulease.slurm.node.routes import command_in, invocation_of_task
from gpulease.units import format_size
from gpulease.wire.jobs import EnvironmentView, NestedView
from gpulease.wire.ranges import checked_name
from gpulease.wire.requests import (
    AdoptRequest,
    HoldRequest,
    NestedRequest,
    WorkerOptionsRequest,
    to_wire,
)
from gpulease.wire.text import clean

FindProcess = Callable[[int], LivingProcess | None]
"""Returns the process that has a pid now."""
JobsOf = Callable[[Iterable[int], Sequence[Job]], Mapping[int, JobId]]
"""Returns the job of each pid that belongs to one of some jobs."""

_DEFAULT_OPTIONS = options_of(WorkerOptionsRequest())
_MOST_DIGITS = 19
"""Of a number of bytes; int() refuses thousands of digits."""


class HoldHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext, holders: HolderParts) -> None:
        self._context = context
        self._holders = holders

    async def hold(self, request: Request) -> Response:
        """Queue a lease without a job; the answer means that it is on disk."""
        caller, context = caller_of_request(request), self._context
        body = read_body(HoldRequest, await request.body())
        order = hold_submission_of(body, caller, context.defaults, context.processes.living)
        live, jobs_of = context.scheduler.store.live(), context.processes.jobs_of
        await asyncio.to_thread(refuse_within_job, order.holder, live, jobs_of)
        context.refuse_closed_queue(caller, "hold a lease")
        job = await lease_used(order, body.claim, caller.user, context) if body.adopt else None
        if job is None:
            job = await context.scheduler.submit(order)
            self._holders.watch(job)
        return json_response(context.job_views.job(job, to_owner=True), 201)

    async def adopt(self, request: Request) -> Response:
        """Lease the memory that a process already uses."""
        caller, context = caller_of_request(request), self._context
        body = read_body(AdoptRequest, await request.body())
        order = adoption_of(body, caller, context)
        live, jobs_of = context.scheduler.store.live(), context.processes.jobs_of
        await asyncio.to_thread(refuse_within_job, order.holder, live, jobs_of)
        context.refuse_closed_queue(caller, "adopt a process")
        job = await adopt(order, body.claim, caller, context)
        return json_response(context.view_for(caller, job), 201)

    async def nested(self, request: Request) -> Response:
        """Return the job under whose lease the caller runs, and a part of that lease."""
        caller, context = caller_of_request(request), self._context
        body = read_body(NestedRequest, await request.body())
        environment = environment_of(body.environment)
        job = await job_of_caller(caller, environment, context)
        if job is None:
            return json_response(NestedView(None))
        stored = context.scheduler.store.invocation(job.id)
        if job.slurm is not None:
            bound, of = len(_visible(job, environment, False)), len(job.leases)
            stored = invocation_of_task(
                command_in(environment, job.slurm.id), environment, bound, of
            )
        invocation = invocation_of(stored, body, environment)
        part = part_of(
            job,
            body,
            environment,
            context.defaults,
            context.machine_views.allocatable(),
            context.scheduler.observer.readings(),
            by_index=invocation.options.get("visible") == "index",
        )
        memory = min(lease.memory for lease in part.leases)
        options_of(body.options, memory)
        changes = environment_view(environment, self._holders.environment(part, invocation, job))
        gpus = [str(lease.gpu) for lease in part.leases]
        argv, notice = self._holders.command(part, invocation)
        words = [to_wire(word) for word in argv]
        shown = context.view_for(caller, job)
        return json_response(NestedView(shown, gpus, memory, changes, words, notice))

    async def environment(self, job_id: int) -> Response:
        """Return what a lease changes in the environment of its holder."""
        context = self._context
        job = context.existing_job(job_id)
        if not job.holds_memory:
            why = "it waits for its GPU" if job.state is State.QUEUED else "it has ended"
            raise WrongState(
                f"cannot read the environment of {job.title}: {why}",
                f"gpulease show {job.label} shows more",
            )
        invocation = context.scheduler.store.invocation(job.id)
        changed = self._holders.environment(job, invocation, job)
        return json_response(environment_view(invocation.environment, changed))


def hold_submission_of(
    request: HoldRequest, caller: Caller, defaults: Defaults, find: FindProcess
) -> Submission:
    """Return the submission of a hold.

    Raises:
        BadValue: a field is out of range, or nothing would ever end the lease.
        TooLarge: a field exceeds its limit.
        NotAllowed: the process that is to hold it belongs to another user.
    """
    environment = environment_of(request.environment)
    refuse_oversized_exec((), environment)
    claim = claim_of(request.claim, defaults)
    options = options_of(request.options, request.claim.memory)
    process, shown = _holder(request.pid, caller, find)
    asker = find(caller.pid) if caller.pid > 0 else None
    if process is None and claim.time_limit is None:
        raise BadValue(
            "cannot hold a lease without an end: neither a process nor a time limit is given",
            "name a process, or give a time with --for 2h",
        )
    return Submission(
        owner=caller.owner,
        name="hold" if request.name is None else checked_name(request.name),
        command=shown,
        claim=claim,
        invocation=Invocation((), "/", environment, options=options),
        wait_for=span("time to wait", request.wait, at_least=0),
        holder=Holder(process, None if asker is None else asker.process),
        only_lease=request.adopt,
        key=checked_key(request.key),
        named=gpu_names(request.claim.named),
        notify=notified_of(request.notify),
    )


def _holder(pid: int | None, caller: Caller, find: FindProcess) -> tuple[Process | None, str]:
    """Return the process that is to hold the lease, and how listings name it."""
    if pid is None:
        return None, "held until its time is over"
    found = find(within("pid", pid, 1, LARGEST_PID, "hold a lease"))
    if found is None:
        raise BadValue(
            f"cannot hold a lease for process {pid}: no such process",
            "a shell names itself as $$; the process must run on this machine, not in a container",
        )
    if caller.uid not in (0, found.uid):
        raise NotAllowed(
            f"cannot hold a lease for process {pid}: it belongs to another user",
            "name one of your own processes",
        )
    return found.process, f"held by pid {pid} ({clean(found.name)})"


def refuse_within_job(holder: Holder | None, live: Sequence[Job], jobs_of: JobsOf) -> None:
    """Check that a hold is not for a process of a job, which has a lease. Reads /proc.

    Without a process, the hold is for the process that asks.

    Raises:
        AlreadyLeased: it is.
    """
    process = None if holder is None else holder.process or holder.waiting_client
    if process is None:
        return
    running = [job for job in live if job.holder is None and job.holds_memory]
    job = jobs_of([process.pid], running).get(process.pid)
    if job is not None:
        raise AlreadyLeased(
            f"cannot hold a lease for process {process.pid}: it belongs to job {job}, "
            "which has one",
            f"gpulease show {job} shows that lease; for more memory, start the job with more: "
            "gpulease run --mem SIZE",
        )


def environment_view(before: Mapping[str, str], after: Mapping[str, str]) -> EnvironmentView:
    """Return what a lease changes in an environment."""
    return EnvironmentView(
        set={
            to_wire(name): to_wire(value)
            for name, value in after.items()
            if before.get(name) != value
        },
        unset=[to_wire(name) for name in before if name not in after],
    )


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
    visible = _visible(job, environment, by_index)
    visible = _asked_for(job, claim, visible, gpus, by_index=by_index)
    if claim.gpus > len(visible):
        has = "1 GPU" if len(visible) == 1 else f"{len(visible)} GPUs"
        raise _exceeds(job, f"it has {has} here, and this asks for {claim.gpus}", f"ask for {has}")
    most = [_limited(job, lease, environment) for lease in visible[: claim.gpus]]
    if request.claim.memory is None and request.claim.share is None:
        return replace(job, leases=tuple(most))
    wanted = [claim.memory_on(allocatable.get(lease.gpu, lease.memory)) for lease in most]
    if any(size > lease.memory for size, lease in zip(wanted, most, strict=True)):
        has = format_size(min(lease.memory for lease in most))
        want = format_size(max(wanted))
        raise _exceeds(
            job, f"it has {has} here, and this asks for {want}", f"ask for at most {has}"
        )
    parts = zip(most, wanted, strict=True)
    return replace(job, leases=tuple(replace(lease, memory=size) for lease, size in parts))


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
    sets = sets_of(claim, known, lambda lease: gpus[lease.gpu]).values()
    chosen = max(sets, key=len, default=[])
    if len(chosen) < claim.gpus:
        has = f"{len(chosen) or 'none'} of the GPUs asked for"
        raise _exceeds(job, f"it has {has} here", f"gpulease show {job.label} lists its GPUs")
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


def _visible(job: Job, environment: Mapping[str, str], by_index: bool) -> Sequence[Lease]:
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
    return replace(lease, memory=max(1, min(lease.memory, int(size))))
