"""A lease without a job as it was asked for over the wire, checked, as an order."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpulease.domain.hold import Holder, Process
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import State
from gpulease.domain.memory import JobId
from gpulease.errors import AlreadyLeased, BadValue, NotAllowed, WrongState
from gpulease.server.fields import (
    Defaults,
    checked_key,
    checked_name,
    claim_of,
    environment_of,
    options_of,
    owner_of,
    printable,
    refuse_more_than_exec_takes,
    span,
    within,
)
from gpulease.server.peer import Caller
from gpulease.service.ports import LivingProcess, Order
from gpulease.wire import EnvironmentView, HoldRequest, to_wire

Living = Callable[[int], LivingProcess | None]
"""Finds the process that has a pid now."""
JobsOf = Callable[[Iterable[int], Sequence[Job]], Mapping[int, JobId]]
"""Finds the job of each pid that belongs to one of some jobs."""

_LARGEST_PID = 1 << 22


def hold_order_of(
    request: HoldRequest, caller: Caller, defaults: Defaults, living: Living
) -> Order:
    """Return what `caller` asks for.

    Raises:
        BadValue: a field cannot be what it is, or nothing would ever end the lease.
        TooLarge: a field is past its bound.
        NotAllowed: the process that is to hold it is somebody else's.
    """
    environment = environment_of(request.environment)
    refuse_more_than_exec_takes((), environment)
    claim = claim_of(request.claim, defaults)
    process, shown = _holder(request.pid, caller, living)
    if process is None and claim.time_limit is None:
        raise BadValue(
            "cannot hold a lease for ever: no process is named whose end would release it, "
            "and there is no time limit",
            "name a process, or give a time with --for 2h",
        )
    return Order(
        owner=owner_of(caller),
        name="hold" if request.name is None else checked_name(request.name),
        command=shown,
        claim=claim,
        invocation=Invocation((), "/", environment, options=options_of(request.options)),
        wait_for=span("time to wait", request.wait, at_least=0),
        holder=Holder(process, _asker(caller, living)),
        key=checked_key(request.key),
    )


def refuse_within_a_job(holder: Holder | None, live: Sequence[Job], jobs_of: JobsOf) -> None:
    """Check that a lease is not for a process of a job, whosever: that one has a lease.

    Where no process is named, the lease is for whoever asks. Reads /proc.

    Raises:
        AlreadyLeased: it is.
    """
    for_whom = None if holder is None else holder.process or holder.asker
    if for_whom is None:
        return
    running = [job for job in live if job.holder is None and job.holds_memory]
    job = jobs_of([for_whom.pid], running).get(for_whom.pid)
    if job is not None:
        raise AlreadyLeased(
            f"cannot hold a lease for process {for_whom.pid}: it belongs to job {job}, "
            "which has one",
            f"its own lease is in force there, gpulease show {job} tells it; for more memory, "
            "start the job with more: gpulease run --mem",
        )


def _holder(pid: int | None, caller: Caller, living: Living) -> tuple[Process | None, str]:
    """Return the process that is to hold the lease, and how to say so."""
    if pid is None:
        return None, "held until its time is over"
    found = living(within("pid", pid, 1, _LARGEST_PID))
    if found is None:
        raise BadValue(
            f"cannot hold a lease for process {pid}: there is no such process",
            "a shell names itself as $$; it must run on this machine, outside any container",
        )
    if caller.uid not in (0, found.uid):
        raise NotAllowed(
            f"cannot hold a lease for process {pid}: it belongs to another user",
            "name a process of your own",
        )
    return found.process, f"held by pid {pid} ({printable(found.name)})"


def _asker(caller: Caller, living: Living) -> Process | None:
    # The kernel says 0 for a caller whom the daemon cannot see, as from another container.
    found = living(caller.pid) if caller.pid > 0 else None
    return None if found is None else found.process


def environment_view(
    before: Mapping[str, str], under_the_lease: Mapping[str, str]
) -> EnvironmentView:
    """Return what a lease changes in the environment of its holder."""
    changed = {name: it for name, it in under_the_lease.items() if before.get(name) != it}
    return EnvironmentView(
        set={to_wire(name): to_wire(value) for name, value in changed.items()},
        unset=[to_wire(name) for name in before if name not in under_the_lease],
    )


def refuse_to_tell(job: Job) -> None:
    """Check that `job` has an environment to tell: that of a lease which it holds.

    Raises:
        WrongState: it waits for its lease, or has given it back.
    """
    if not job.holds_memory:
        why = "it waits for its GPU" if job.state is State.QUEUED else "it has ended"
        raise WrongState(
            f"cannot tell the environment of job {job.id}: {why}",
            f"gpulease show {job.id} tells more",
        )
