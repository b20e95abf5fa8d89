"""The routes about leases without a job of the queue: holds, adopted processes, nested runs."""

import asyncio
import pwd
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpulease.domain.job import Holder, Invocation, Job, Process
from gpulease.domain.lease import State
from gpulease.errors import AlreadyLeased, BadValue, NotAllowed, WrongState
from gpulease.server.auth import Caller
from gpulease.server.context import HolderParts, Request, RequestContext
from gpulease.server.messages import Response, json_response
from gpulease.server.nested import invocation_of, job_of_caller, part_of, visible_leases
from gpulease.server.validation import (
    Defaults,
    checked_key,
    claim_of,
    environment_of,
    gpu_names,
    notified_of,
    options_of,
    refuse_oversized_exec,
    size_of,
    span,
    within,
)
from gpulease.service.adoption import Adoption, find_uses, refuse_unlisted
from gpulease.service.ports import LivingProcess, Submission
from gpulease.slurm.node.routes import command_in, invocation_of_task
from gpulease.wire.jobs import EnvironmentView, NestedView
from gpulease.wire.ranges import checked_name
from gpulease.wire.requests import (
    AdoptRequest,
    ClaimRequest,
    HoldRequest,
    NestedRequest,
    to_wire,
)
from gpulease.wire.text import clean

LARGEST_PID = 1 << 22
FindProcess = Callable[[int], LivingProcess | None]
"""Returns the process that has a pid now."""


class HoldHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext, holders: HolderParts) -> None:
        self._context = context
        self._holders = holders

    async def hold(self, request: Request) -> Response:
        """Queue a lease without a job; the answer means that it is on disk."""
        caller, context = request.caller, self._context
        body = request.read(HoldRequest)
        order = hold_submission_of(body, caller, context.defaults, context.processes.living)
        await asyncio.to_thread(refuse_within_job, order.holder, context)
        context.refuse_closed_queue(caller, "hold a lease")
        job = await lease_used(order, body.claim, caller.user, context) if body.adopt else None
        if job is None:
            job = await context.scheduler.submit(order)
            self._holders.watch(job)
        return json_response(context.job_views.job(job, to_owner=True), 201)

    async def adopt(self, request: Request) -> Response:
        """Lease the memory that a process already uses."""
        caller, context = request.caller, self._context
        body = request.read(AdoptRequest)
        order = adoption_of(body, caller, context)
        await asyncio.to_thread(refuse_within_job, order.holder, context)
        context.refuse_closed_queue(caller, "adopt a process")
        job = await adopt(order, body.claim, caller, context)
        return json_response(context.view_for(caller, job), 201)

    async def nested(self, request: Request) -> Response:
        """Return the job under whose lease the caller runs, and a part of that lease."""
        caller, context = request.caller, self._context
        body = request.read(NestedRequest)
        environment = environment_of(body.environment)
        job = await job_of_caller(caller, environment, context)
        if job is None:
            return json_response(NestedView(None))
        stored = context.scheduler.store.invocation(job.id)
        if job.slurm is not None:
            bound, of = len(visible_leases(job, environment, by_index=False)), len(job.leases)
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
        memory = min(lease.most for lease in part.leases)
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
    options = options_of(request.options, size_of(request.claim))
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
        wait_for=span("wait", request.wait),
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
    found = find(within("pid", pid, 1, LARGEST_PID))
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


def refuse_within_job(holder: Holder | None, context: RequestContext) -> None:
    """Check that a hold is not for a process of a job, which has a lease. Reads /proc.

    Without a process, the hold is for the process that asks.

    Raises:
        AlreadyLeased: it is.
    """
    process = None if holder is None else holder.process or holder.waiting_client
    if process is None:
        return
    holding = context.scheduler.store.holding()
    running = [job for job in holding if job.holder is None]
    job = context.processes.jobs_of([process.pid], running).get(process.pid)
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


def adoption_of(request: AdoptRequest, caller: Caller, context: RequestContext) -> Submission:
    """Return the submission of a lease for what a process uses; its job belongs to the user of it.

    Raises:
        BadValue: a field is out of range, or there is no such process.
        NotAllowed: the process belongs to another user, and the caller is no admin.
    """
    pid, rights = request.pid, context.rights
    found = context.processes.living(within("pid", pid, 1, LARGEST_PID))
    if found is None:
        raise BadValue(
            f"cannot adopt process {pid}: no such process is running",
            "a process that has ended (defunct in ps) holds no memory to lease; a process in a "
            "container has another pid here",
        )
    if pid == 1 or context.processes.is_above_daemon(pid):
        raise NotAllowed(
            f"cannot adopt process {pid}: the daemon of gpulease runs below it",
            "name a process further down: gpulease status lists those without a lease",
        )
    is_own = found.uid == caller.uid
    if not is_own and not (rights.is_admin(caller) and rights.daemon_uid == 0):
        raise NotAllowed(
            f"cannot adopt process {pid}: it belongs to another user",
            "only admins, on the daemon of the machine, adopt processes of others",
        )
    return Submission(
        owner=caller.owner if is_own else _user_of(found).owner,
        name=clean(found.name) if request.name is None else checked_name(request.name),
        command=f"held by pid {pid} ({clean(found.name)})",
        claim=claim_of(request.claim, context.defaults),
        invocation=Invocation((), "/", {}),
        holder=Holder(found.process, None, adopted=True),
        key=checked_key(request.key),
    )


def _user_of(found: LivingProcess) -> Caller:
    """Return the user of a process, as if it had asked itself."""
    try:
        gid = pwd.getpwuid(found.uid).pw_gid
    except KeyError:
        gid = found.uid
    return Caller(found.process.pid, found.uid, gid)


async def adopt(
    order: Submission, asked: ClaimRequest, caller: Caller, context: RequestContext
) -> Job:
    """Lease what a process uses. Raises what `refuse_unlisted` and `Scheduler.adopt` raise."""
    seen = await context.scheduler.observer.observe()
    uses = await asyncio.to_thread(find_uses, order, seen, context.processes)
    refuse_unlisted(seen, uses)
    by_admin = context.rights.is_admin(caller)
    processes = context.processes
    wanted = Adoption(order, uses, caller.user, _names_size(asked), processes, by_admin)
    return await context.scheduler.adopt(wanted, seen)


async def lease_used(
    order: Submission, asked: ClaimRequest, by: str, context: RequestContext
) -> Job | None:
    """Lease what the process of a hold uses; return None if it uses no GPU, as far as known."""
    if order.holder is None or order.holder.process is None:
        return None
    seen = await context.scheduler.observer.observe()
    if seen.foreign:
        return None
    order = replace(order, holder=Holder(order.holder.process, None, adopted=True))
    uses = await asyncio.to_thread(find_uses, order, seen, context.processes)
    wanted = Adoption(order, uses, by, _names_size(asked), context.processes)
    return await context.scheduler.adopt(wanted, seen) if uses else None


def _names_size(asked: ClaimRequest) -> bool:
    return asked.memory is not None or asked.share is not None
