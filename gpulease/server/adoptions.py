"""Leases for processes that already use GPUs: permissions, and what the processes use."""

import asyncio
import pwd
from dataclasses import replace

from gpulease.domain.job import Holder, Invocation, Job
from gpulease.errors import BadValue, NotAllowed
from gpulease.server.auth import Caller
from gpulease.server.context import RequestContext
from gpulease.server.validation import checked_key, claim_of, within
from gpulease.service.adoption import Adoption, find_uses, refuse_unlisted
from gpulease.service.ports import LivingProcess, Submission
from gpulease.wire.ranges import checked_name
from gpulease.wire.requests import AdoptRequest, ClaimRequest
from gpulease.wire.text import clean

LARGEST_PID = 1 << 22


def adoption_of(request: AdoptRequest, caller: Caller, context: RequestContext) -> Submission:
    """Return the submission of a lease for what a process uses; its job belongs to the user of it.

    Raises:
        BadValue: a field is out of range, or there is no such process.
        NotAllowed: the process belongs to another user, and the caller is no admin.
    """
    pid, rights = request.pid, context.rights
    found = context.processes.living(within("pid", pid, 1, LARGEST_PID, "adopt a process"))
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
