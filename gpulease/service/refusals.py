"""Refusals of claims: what this machine or the limits of a user never allow, or not now.

A submission, an edit and an adoption are checked by the same functions, inside the transaction that
adds or changes the job. What waits for a limit waits in the queue: see `domain.limits`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from gpulease.domain.choice import enough_of, sets_of, suits
from gpulease.domain.gpu import GpuMemory, GpuReading, GpuUuid
from gpulease.domain.host_memory import HostPolicy, HostReading
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim, State
from gpulease.domain.limits import (
    Beyond,
    LimitCheck,
    OverLimit,
    RecentUse,
    UserLimits,
    memory_of,
    never_within,
)
from gpulease.domain.placement import can_be_combined, can_ever_hold
from gpulease.errors import AlreadyLeased, BadValue, CannotLease, NoSuchGpu, TooMany
from gpulease.service.ports import Policy, Quotas, Submission, Transaction, UserCount
from gpulease.units import (
    MIB,
    Share,
    counted,
    format_above,
    format_size,
    format_span,
    round_down_size,
)


def with_time_limit(submission: Submission, limits: UserLimits) -> Submission:
    """Return `submission`; if it names no time limit, with the usual one of its user.

    Raises:
        BadValue: it names one that is too long.
    """
    hold = submission.holder is not None
    limit = submission.claim.time_limit
    if limit is None:
        usual = limits.usual_time(hold=hold)
        limit = None if usual is None else usual[0]
        return replace(submission, claim=replace(submission.claim, time_limit=limit))
    refuse_longer(limit, limits, "hold a lease" if hold else "submit", hold=hold)
    return submission


def refuse_longer(limit: timedelta, limits: UserLimits, verb: str, *, hold: bool) -> None:
    """Check that a time limit is within what a user may ask for.

    Raises:
        BadValue: it is longer.
    """
    longest = limits.longest(hold=hold)
    if longest is None or limit <= longest[0]:
        return
    most, setting = format_span(longest[0]), longest[1]
    raise BadValue(
        f"cannot {verb}: a time limit of {format_span(limit)} is over the {most} that the "
        f"settings allow ({setting})",
        f"ask for at most {most}; an admin can extend the time of a job further",
    )


def refuse_what_is_never_within(claim: Claim, limits: UserLimits, largest: int, user: str) -> None:
    """Check that a user could have `claim` while they hold nothing else.

    Raises:
        CannotLease: a limit is smaller.
    """
    found = never_within(limits, claim, largest, user)
    if found is not None:
        raise CannotLease(*found)


def refuses_more(limits: UserLimits) -> bool:
    """Return whether what is over a limit is refused: else it waits in the queue."""
    return limits.over_limit is not Beyond.WAIT and limits.restrict_starts


def refuse_over_limit(
    new: Sequence[Job],
    others: Iterable[Job],
    limits: UserLimits,
    used: Mapping[int, RecentUse],
    largest: int,
    at: datetime,
    verb: str = "submit",
) -> None:
    """Check that a job, or the elements of an array, are within the limits of their user.

    This is so if the limits refuse more. The user's queued jobs count as if they ran, so the user
    never has more than the limit. A job over a limit of a group waits: it may be for others' jobs.

    Raises:
        TooMany: it is not.
    """
    if not refuses_more(limits):
        return
    owner, ids = new[0].owner, {each.id for each in new}
    mine = [each for each in others if each.owner.uid == owner.uid and each.id not in ids]
    holders = (each for each in mine if each.holds_memory)
    limits = replace(limits, groups=())
    check = LimitCheck.of({owner.uid: limits}, used, holders, largest, at)
    for each in mine:
        if not each.holds_memory:
            check.start(each, memory_of(each.claim, largest))
    for fitting, each in enumerate(new):
        over = check.exceeded_by(each)
        if over is not None:
            raise _too_many(over, owner.user, fitting, len(new), verb)
        check.start(each, memory_of(each.claim, largest))


def _too_many(over: OverLimit, user: str, fitting: int, elements: int, verb: str) -> TooMany:
    what = "" if elements == 1 else f" an array of {elements} elements"
    limit = f"cannot {verb}{what}: the limit of {user} is {over.most} ({over.setting})"
    if fitting > 0:
        return TooMany(
            f"{limit}, and only {fitting} of them fit beside the jobs that run or wait",
            f"{verb} at most {fitting} elements now; gpulease list --user {user} shows the jobs",
        )
    return TooMany(
        f"{limit}, and {over.has}, with what waits",
        f"{verb} again when some jobs have ended; gpulease list --user {user} shows them",
    )


_MOST_LISTED = 16


def uuids_of(names: Iterable[str], gpus: Sequence[GpuReading]) -> tuple[GpuUuid, ...]:
    """Return the GPUs with these names, by index, each once.

    Raises:
        NoSuchGpu: a name stands for no GPU, or for several.
    """
    found = {named(name, gpus).uuid for name in names}
    return tuple(gpu.uuid for gpu in gpus if gpu.uuid in found)


def suited_sets(claim: Claim, gpus: Iterable[GpuMemory]) -> Collection[Sequence[GpuMemory]]:
    """Return the sets of GPUs that a claim could have together, whatever is free on them."""
    able = (
        gpu
        for gpu in gpus
        if not gpu.reading.mig_mode and can_be_combined(claim, gpu) and suits(claim, gpu.reading)
    )
    return sets_of(claim, able, lambda gpu: gpu.reading).values()


def refuse_choice(claim: Claim, gpus: Sequence[GpuMemory]) -> None:
    """Check that there are enough of the GPUs that a claim asks for.

    Raises:
        CannotLease: there are not.
    """
    if claim.choice is None:
        return
    found = max(map(len, suited_sets(claim, gpus)), default=0)
    if found >= claim.gpus:
        return
    readings = [gpu.reading for gpu in gpus[:_MOST_LISTED]]
    sizes = ("size unknown" if gpu.total is None else format_size(gpu.total) for gpu in readings)
    cards = (f"{gpu.label} ({gpu.name}, {size})" for gpu, size in zip(readings, sizes, strict=True))
    here = ", ".join(cards)
    count = "a GPU" if claim.gpus == 1 else f"{claim.gpus} GPUs"
    wanted = f"{count} {_wishes(claim, gpus)}"
    raise CannotLease(
        f"cannot lease {wanted}: this machine has {found or 'none'}",
        f"the GPUs here: {here}{', ...' if len(gpus) > _MOST_LISTED else ''}",
    )


def _wishes(claim: Claim, gpus: Sequence[GpuMemory]) -> str:
    """Return what a claim asks of its GPUs, as options."""
    labels = [gpu.reading.label for gpu in gpus if gpu.uuid in claim.named]
    given = (
        (bool(claim.named), f"--gpu {','.join(labels)}"),
        (claim.model is not None, f"--gpu-model {claim.model}"),
        (claim.min_vram is not None, f"--min-vram {format_size(claim.min_vram or 0)}"),
        (claim.same_model, "--same-model"),
        (claim.linked, "--linked"),
    )
    return "with " + " ".join(option for is_given, option in given if is_given)


_SHORTEST_PREFIX = 4
"""Every UUID starts with GPU- or MIG-."""


def named(text: str, gpus: Sequence[GpuReading]) -> GpuReading:
    """Return the GPU with an index, a UUID, or the only one with a prefix of its UUID.

    Raises:
        NoSuchGpu: no GPU matches, or several do.
    """
    found = [gpu for gpu in gpus if text in (gpu.label, gpu.uuid)]
    if len(found) == 1:
        return found[0]
    if len(text) >= _SHORTEST_PREFIX:
        found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(text.lower())]
    if len(found) == 1 and len(text) > _SHORTEST_PREFIX:
        return found[0]
    known = ", ".join(gpu.label for gpu in gpus[:32]) or "none"
    if not found:
        raise NoSuchGpu(
            f"no GPU named {text[:80]!r}",
            f"use its index ({known}) or its UUID; gpulease status --json shows both"
            + ("; separate several by spaces: 0 1" if "," in text else ""),
        )
    raise NoSuchGpu(
        f"several GPUs match {text[:80]!r}: {', '.join(gpu.uuid for gpu in found)}",
        "use a longer part of the UUID",
    )


def largest(gpus: Sequence[GpuMemory], count: int) -> int:
    """Return the largest lease that `count` GPUs can grant on each at once, in bytes."""
    offered = sorted((gpu.allocatable or 0 for gpu in gpus), reverse=True)
    return offered[count - 1] if count <= len(offered) else 0


def largest_for(claim: Claim, gpus: Iterable[GpuMemory]) -> int:
    """Return the largest lease on each of as many GPUs as a claim asks for, in bytes."""
    return max((largest(each, claim.gpus) for each in suited_sets(claim, gpus)), default=0)


def refuse_what_can_never_start(
    claim: Claim,
    gpus: tuple[GpuMemory, ...],
    policy: Policy,
    limits: UserLimits,
    user: str,
) -> None:
    """Check that the claim could be granted to its user if no other job ran.

    Raises:
        CannotLease: it could not.
    """
    if claim.named and claim.gpus > len(claim.named):
        raise CannotLease(
            f"cannot lease {claim.gpus} GPUs: --gpu names {len(claim.named)}",
            "name at least as many with --gpu as --gpus asks for",
        )
    refuse_what_can_never_run(claim, gpus, policy)
    refuse_what_is_never_within(claim, limits, largest(gpus, 1), user)


def refuse_beyond_host(claim: Claim, host: HostReading | None, policy: HostPolicy) -> None:
    """Check that the machine has the RAM and the cores of a claim; what is unknown is not refused.

    Raises:
        CannotLease: it has less.
    """
    most = None if host is None else policy.ram_of(host)
    if most is not None and claim.ram is not None and claim.ram > most:
        raise CannotLease(
            f"cannot lease {format_above(claim.ram, most)} of RAM: this machine has "
            f"{format_size(most)} to lease",
            f"ask for at most --ram {format_size(round_down_size(most))}",
        )
    cores = None if host is None else policy.cores_of(host)
    if cores is not None and claim.cpus is not None and claim.cpus > cores:
        raise CannotLease(
            f"cannot lease {counted(claim.cpus, 'core')}: this machine has {cores} to lease",
            f"ask for at most --cpus {cores}" if cores else "leave out --cpus",
        )


def refuse_what_can_never_run(claim: Claim, gpus: tuple[GpuMemory, ...], policy: Policy) -> None:
    """Check that the claim could be granted if no other job ran.

    Raises:
        CannotLease: it could not.
    """
    if claim.gpus > len(gpus):
        raise CannotLease(
            f"cannot lease {claim.gpus} GPUs: this machine has {len(gpus)}",
            f"ask for at most {len(gpus)}; gpulease status shows them",
        )
    if claim.exclusive and claim.memory_bound is not None:
        raise CannotLease("cannot lease a range: the job is exclusive", "use one size: --mem 10G")
    if not isinstance(claim.memory, Share) and claim.memory < policy.smallest_lease:
        smallest = format_size(policy.smallest_lease)
        raise CannotLease(
            f"cannot lease {format_size(claim.memory)}: it cannot hold a CUDA context",
            f"ask for at least {smallest}",
        )
    whole = [gpu for gpu in gpus if gpu.reading.parent is None and not gpu.reading.mig_mode]
    if claim.gpus > max(1, len(whole)):
        raise CannotLease(
            f"cannot lease {claim.gpus} GPUs: this machine has {len(whole)} without MIG, and CUDA "
            "shows a program only one MIG device",
            "ask for one GPU, which may be a MIG device"
            + (f", or for at most {len(whole)}" if whole else ""),
        )
    refuse_choice(claim, gpus)
    sets = suited_sets(claim, gpus)
    if all(sum(can_ever_hold(claim, gpu) for gpu in each) < claim.gpus for each in sets):
        raise _never(claim, sets)
    _refuse_unlinked(claim, [gpu for each in sets for gpu in each if can_ever_hold(claim, gpu)])


def _refuse_unlinked(claim: Claim, gpus: Sequence[GpuMemory]) -> None:
    """Check that enough of the GPUs that could hold a claim are linked, if it asks for that.

    The links of a GPU that cannot be read may not be known yet.

    Raises:
        CannotLease: there are not.
    """
    if not claim.linked or claim.gpus == 1 or any(gpu.reading.fault is not None for gpu in gpus):
        return
    alike = (replace(claim, gpus=count) for count in range(claim.gpus, 0, -1))
    most = next(each.gpus for each in alike if enough_of(each, gpus, lambda gpu: gpu.reading))
    if most < claim.gpus:
        here = "no two here are" if most == 1 else f"at most {most} here are"
        raise CannotLease(
            f"cannot lease {claim.gpus} linked GPUs: {here} linked with each other by NVLink",
            f"{f'ask for {most}, or ' if most > 1 else ''}leave out --linked; "
            "gpulease status --topology shows the links",
        )


def _never(claim: Claim, sets: Iterable[Sequence[GpuMemory]]) -> CannotLease:
    able = max(sets, key=lambda each: largest(each, claim.gpus))
    here = "asked for" if claim.choice is not None else "here"
    sizes = sorted((gpu.allocatable or 0 for gpu in able), reverse=True)
    wanted = str(claim.memory) if isinstance(claim.memory, Share) else format_size(claim.memory)
    if not isinstance(claim.memory, Share) and claim.memory not in sizes:
        shown = {format_size(size) for size in sizes}
        # Rounded, the claim would look like the offer that it exceeds.
        wanted = f"{-(-claim.memory // MIB)}M" if wanted in shown else wanted
    if claim.gpus > 1 and not isinstance(claim.memory, Share) and claim.memory <= sizes[0]:
        enough = sum(size >= claim.memory for size in sizes)
        return CannotLease(
            f"cannot lease {wanted} on each of {claim.gpus} GPUs: only {enough} {here} can",
            f"ask for at most {format_size(sizes[claim.gpus - 1])} on each, or for fewer GPUs",
        )
    if sizes[0] == 0:
        return CannotLease(
            f"cannot lease {wanted}: no GPU here has memory to lease",
            "gpulease status shows the state of each GPU, and gpulease doctor suggests fixes",
        )
    return CannotLease(
        f"cannot lease {wanted}: the largest GPU {here} offers {format_size(sizes[0])}",
        f"ask for at most {format_size(sizes[0])} on each GPU"
        + (", or for several GPUs with --gpus" if len(sizes) > 1 and claim.gpus == 1 else ""),
    )


def refuse_second_lease(tx: Transaction, submission: Submission, verb: str) -> None:
    """Check that the process of a hold holds no lease and waits for none.

    Raises:
        AlreadyLeased: it does.
    """
    process = None if submission.holder is None else submission.holder.process
    for job in tx.live() if process is not None else ():
        if job.holder is not None and job.holder.process == process and process is not None:
            has = "waits for a lease" if job.state is State.QUEUED else "has a lease"
            raise AlreadyLeased(
                f"cannot {verb} process {process.pid}: it {has}, job {job.label}",
                f"gpulease show {job.label} shows it; to lease again, release it first: "
                f"gpulease cancel {job.label}",
            )


def refuse_one_more(policy: Policy, submission: Submission, before: UserCount) -> None:
    """Check that the user may have one more job, before it is added.

    Runs inside the transaction that adds the job, so two submissions at once cannot both pass.

    Raises:
        TooMany: the user has as many as the quotas allow.
    """
    quotas = policy.quotas
    if submission.owner.uid in quotas.exempt:
        return
    user = submission.owner.user
    most_waiting = policy.limits(submission.owner).most_waiting
    new = 1 if submission.indices is None else len(submission.indices.indices)
    if most_waiting is not None and before.waiting + new > most_waiting:
        what = "" if submission.indices is None else f" an array of {new} elements"
        raise TooMany(
            f"cannot submit{what}: {user} has {before.waiting} queued jobs, and the limit for one "
            f"user is {most_waiting}",
            "submit again when some jobs have started, or cancel some; "
            f"gpulease list --user {user} shows them",
        )
    if submission.holder is not None and before.holds >= quotas.holds:
        raise TooMany(
            f"cannot hold another lease: {user} has {before.holds} leases without a job, and the "
            f"limit for one user is {quotas.holds}",
            f"release one with gpulease cancel JOB; gpulease list --user {user} shows them",
        )


def refuse_too_much(quotas: Quotas, submission: Submission, after: UserCount) -> None:
    """Check the size of the user's queued invocations, after the new one was added.

    Raises:
        TooMany: it is over the quota.
    """
    if submission.owner.uid in quotas.exempt or after.waiting_bytes <= quotas.waiting_bytes:
        return
    raise TooMany(
        f"cannot submit: the arguments and environments of {submission.owner.user}'s queued jobs "
        f"would take more than {format_size(quotas.waiting_bytes)}, the limit for one user",
        "unset large variables before you submit, or submit again when some jobs have started",
    )
