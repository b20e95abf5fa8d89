"""Leases for processes that already use GPUs: on those GPUs, granted at once or refused.

The memory that the process holds was never free, so the lease does not wait. Only memory beyond
that may be kept for other jobs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.job import Job, grant
from gpulease.domain.lease import Claim, Trigger
from gpulease.domain.limits import LimitCheck, OverLimit
from gpulease.domain.placement import Obstacle, Placement, find_obstacle
from gpulease.domain.plan import Plan, why_waiting
from gpulease.domain.snapshot import capacity
from gpulease.errors import AlreadyLeased, BadValue, NoRoomNow, WrongState
from gpulease.service.observation import Observation
from gpulease.service.ports import Event, Policy, ProcessFinder, Submission, Transaction
from gpulease.service.refusals import (
    refuse_one_more,
    refuse_second_lease,
    uuids_of,
    with_time_limit,
)
from gpulease.units import format_size

_NOBODY = JobId(0)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a process, with all processes below it, uses of one GPU."""

    memory: int
    """Bytes."""
    pids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Adoption:
    """A lease for a process that uses GPUs."""

    submission: Submission
    uses: Mapping[GpuUuid, GpuUse]
    by: str
    """The user that asked for it, for the history."""
    names_size: bool
    """The claim says how much; otherwise it is as much as the process holds."""
    processes: ProcessFinder
    by_admin: bool = False
    """The limits of the owner do not apply."""

    @property
    def process(self) -> str:
        holder = self.submission.holder
        assert holder is not None and holder.process is not None, "a process is adopted"
        return f"process {holder.process.pid}"


def find_uses(
    submission: Submission, seen: Observation, processes: ProcessFinder
) -> Mapping[GpuUuid, GpuUse]:
    """Return what the process of a lease uses outside leases, by GPU. Reads /proc.

    Raises:
        WrongState: the driver does not report how much it uses.
    """
    # Those that will belong to the lease once it is granted.
    lease = submission.queued(_NOBODY, seen.at)
    uses = {}
    for reading in seen.readings:
        listed = {
            each.pid: each.memory
            for each in reading.processes or ()
            if not reading.mig_mode and each.pid not in seen.jobs_by_pid
        }
        mine = {pid: listed[pid] for pid in processes.jobs_of(listed, [lease])}
        if None in mine.values():
            raise WrongState(
                f"cannot lease for this process: the driver does not report how much it uses of "
                f"GPU {reading.label}",
                "to have it in a lease, start it again with gpulease run --mem SIZE",
            )
        if mine:
            uses[reading.uuid] = GpuUse(sum(map(int, filter(None, mine.values()))), frozenset(mine))
    return uses


def refuse_unlisted(seen: Observation, uses: Mapping[GpuUuid, GpuUse]) -> None:
    """Check that it is known which GPUs a process uses.

    Raises:
        WrongState: it is not. GPUs that can be read are enough if the process uses one of them.
    """
    unlisted = _unlisted(seen)
    if seen.foreign or (unlisted and not uses):
        where = "" if seen.foreign else f" of GPU {', '.join(unlisted)}"
        raise WrongState(
            f"cannot adopt a process: the processes{where} are not known",
            "gpulease doctor suggests fixes",
        )


def _unlisted(seen: Observation) -> Sequence[str]:
    return [each.label for each in seen.readings if each.processes is None]


def _left_out(wanted: Adoption, seen: Observation) -> str | None:
    """Return what the process may use that its lease does not cover. Reads /proc."""
    unlisted, others = _unlisted(seen), _uses_of_others(wanted, seen)
    parts = (
        f"GPU {', '.join(unlisted)}, which cannot be read" if unlisted else None,
        f"{format_size(others)} of other users' processes below it" if others else None,
    )
    named = ", and ".join(each for each in parts if each)
    return f"its lease does not cover {named}" if named else None


def _uses_of_others(wanted: Adoption, seen: Observation) -> int:
    """Return the bytes that processes of other users below the process use. Reads /proc."""
    lease = wanted.submission.queued(_NOBODY, seen.at)
    assert lease.holder is not None, "a process is adopted"
    tree = replace(lease, holder=replace(lease.holder, adopted=False))
    listed = [
        process
        for each in seen.readings
        if not each.mig_mode
        for process in each.processes or ()
        if process.pid not in seen.jobs_by_pid
    ]
    mine = {pid for use in wanted.uses.values() for pid in use.pids}
    others = wanted.processes.jobs_of({each.pid for each in listed} - mine, [tree])
    return sum(each.memory or 0 for each in listed if each.pid in others)


def _refuse_leased(tx: Transaction, wanted: Adoption) -> None:
    """Check that none of the processes got a lease after the observation. Reads /proc.

    Raises:
        AlreadyLeased: one did, for example by a request at the same time.
    """
    pids = {pid for use in wanted.uses.values() for pid in use.pids}
    leased = wanted.processes.jobs_of(pids, [job for job in tx.live() if job.holds_memory])
    if leased:
        pid, job = min(leased.items())
        raise AlreadyLeased(
            f"cannot adopt {wanted.process}: process {pid} has the lease of job {job}",
            f"gpulease show {job} shows that lease",
        )


def adopt(
    tx: Transaction,
    wanted: Adoption,
    decided: Plan,
    seen: Observation,
    policy: Policy,
    at: datetime,
) -> Job:
    """Grant a lease on the GPUs that a process uses, and return its job.

    Args:
        tx: the transaction, which changes nothing if this raises.
        wanted: the process, and what is asked for.
        decided: a plan for the same moment, without the new job.
        seen: the observation behind the plan, which begun after the request.
        policy: the admin's settings.
        at: the time.

    Raises:
        AlreadyLeased: the process has a lease.
        WrongState: the process uses no GPU outside leases.
        AlreadyLeased: one of its processes got a lease after the observation.
        NoRoomNow: it does not fit, and why on which GPU.
        BadValue: it asks for more GPUs than the process uses.
        TooMany: the owner has too many leases.
    """
    submission, uses = wanted.submission, wanted.uses
    refuse_second_lease(tx, submission, "adopt")
    if not uses:
        raise WrongState(
            f"cannot adopt {wanted.process}: it uses no GPU outside leases",
            "gpulease status lists the processes without a lease; to lease memory for one that "
            "has not used a GPU yet: gpulease hold --pid",
        )
    _refuse_leased(tx, wanted)
    if not wanted.by_admin:
        refuse_one_more(policy, submission, tx.user_count(submission.owner.uid))
        submission = with_time_limit(submission, policy.limits(submission.owner))
    gpus = [gpu for gpu in decided.gpus if gpu.uuid in uses]
    if submission.claim.gpus > len(gpus):
        raise BadValue(
            f"cannot lease {submission.claim.gpus} GPUs for {wanted.process}: it uses {len(gpus)}",
            "leave out --gpus: its lease is on the GPUs that it uses",
        )
    names = uuids_of(submission.named, seen.readings)
    each = replace(submission.claim, gpus=1, named=names)
    parts = {gpu.uuid: replace(each, memory=_size(wanted, gpu)) for gpu in gpus}
    sizes = {uuid: part.memory_on(0) for uuid, part in parts.items()}
    whole = replace(each, memory=max(sizes.values()), gpus=len(gpus), named=tuple(sizes))
    job = tx.add(replace(submission, claim=whole), at)
    if (why := _why_beyond(wanted, decided, job, policy)) is not None:
        raise _refused(wanted, why)
    for gpu in gpus:
        obstacle = _obstacle(parts[gpu.uuid], gpu, uses[gpu.uuid], decided, job)
        if obstacle is not None:
            size = format_size(sizes[gpu.uuid])
            raise _refused(wanted, f"{size} of GPU {obstacle.label}: {obstacle.why}")
    tx.add_gpus(seen.readings, at)
    granted = grant(job, Placement(tuple(sizes.items())), at)
    tx.save(granted, Event(at, Trigger.GRANT, f"{', '.join(sizes)}; adopted by {wanted.by}"))
    if (left_out := _left_out(wanted, seen)) is not None:
        tx.note(granted.id, Event(at, "notice", left_out))
    return granted


def _why_beyond(wanted: Adoption, decided: Plan, job: Job, policy: Policy) -> str | None:
    """Return the limit of its user, or of the machine, that a job exceeds."""
    if not wanted.by_admin and (over := _over_limit(decided, job, policy)) is not None:
        return str(over)
    short = decided.host.shortage(job.claim)
    return None if short is None else short.why


def _over_limit(decided: Plan, job: Job, policy: Policy) -> OverLimit | None:
    """Return the limit of its user that a job exceeds that the plan does not know."""
    before = decided.snapshot
    holders = (each for each in before.jobs if each.holds_memory)
    limits = {**before.limits, job.owner.uid: policy.limits(job.owner)}
    largest = capacity(decided.gpus)
    return LimitCheck.of(limits, before.recent_use, holders, largest, before.at).exceeded_by(job)


def _size(wanted: Adoption, gpu: GpuMemory) -> int:
    """Return the bytes to lease: what the process holds, or more if that is asked for."""
    held = wanted.uses[gpu.uuid].memory
    if not wanted.names_size:
        return held
    return max(held, wanted.submission.claim.memory_on(gpu.allocatable or 0))


def _obstacle(part: Claim, gpu: GpuMemory, use: GpuUse, decided: Plan, job: Job) -> Obstacle | None:
    """Return why a process cannot have a lease on a GPU that it uses; None if it can."""
    own = without(gpu, use)
    found = find_obstacle(part, own)
    more = part.memory_on(0) - use.memory
    if found is not None or more <= 0 or own.one_process or part.exclusive:
        return found
    # What it does not hold yet may be kept for others.
    waits = why_waiting(decided, replace(job, claim=replace(part, memory=more)))
    return next((each for each in waits.refusal.obstacles if each.gpu == gpu.uuid), None)


def without(gpu: GpuMemory, use: GpuUse) -> GpuMemory:
    """Return the ledger of a GPU as if a process had a lease for what it uses there."""
    others = tuple(each for each in gpu.unmanaged_processes if each.pid not in use.pids)
    unmanaged = None if gpu.unmanaged is None else max(0, gpu.unmanaged - use.memory)
    return replace(gpu, unmanaged=unmanaged, unmanaged_processes=others)


def _refused(wanted: Adoption, why: str) -> NoRoomNow:
    return NoRoomNow(
        f"cannot lease what {wanted.process} uses: {why}",
        "the process continues, and its memory stays outside any lease",
    )
