"""Changes of waiting jobs: what they ask for, and their place among the jobs of their owner."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.host_memory import HostReading
from gpulease.domain.job import EarlySignal, Job, Owner
from gpulease.domain.lease import Claim, State
from gpulease.domain.limits import NO_LIMITS, Beyond, UserLimits
from gpulease.domain.queue import FIRST, RANKS
from gpulease.domain.queue_options import Priority, WantedDependency
from gpulease.errors import BadValue, NotAllowed, WrongState
from gpulease.service.dependencies import refuse_cycle, resolve
from gpulease.service.jobs import existing
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, Event, Policy, Store, Transaction
from gpulease.service.queue_state import QueueState
from gpulease.service.refusals import (
    largest,
    refuse_beyond_host,
    refuse_longer,
    refuse_over_limit,
    refuse_what_can_never_start,
    uuids_of,
)
from gpulease.service.transactions import change_jobs
from gpulease.units import format_size, format_span


@dataclass(frozen=True, slots=True)
class Edit:
    """The new values of waiting jobs. All of them were checked one by one."""

    claim: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the claim."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the options of the queue."""
    name: str | None = None
    """None: the name stays."""
    after: tuple[WantedDependency, ...] | None = None
    """None: what they wait for stays."""
    named: tuple[str, ...] | None = None
    """The GPUs that they ask for, none for any; None: they stay."""
    by_admin: bool = False
    """The limits of their users do not apply."""


@dataclass(frozen=True, slots=True)
class Edited:
    """A job after an edit."""

    job: Job
    changes: tuple[str, ...]
    """What changed, from what to what, or why not; empty if it had these values."""


def edit(
    store: Store,
    numbers: Collection[JobId],
    wanted: Edit,
    who: str,
    seen: Observation,
    policy: Policy,
    clock: Clock,
    state: QueueState | None = None,
) -> Sequence[Edited]:
    """Change waiting jobs, all of them or none. Their age stays.

    Raises:
        NoSuchJob: no job has one of the numbers.
        WrongState: a job does not wait.
        CannotLease: this machine can never grant the new claim, or never to this user.
        TooMany: the new claim exceeds a limit of the user.
        BadValue: a job would wait for itself, or the new values contradict others.
    """
    state = state or QueueState(store)
    # Before the transaction: a directory server may be asked for the user's groups.
    owners = {job.owner for number in numbers if (job := store.job(number)) is not None}
    limits = {} if wanted.by_admin else {owner: policy.limits(owner) for owner in owners}
    with change_jobs(store) as tx:
        at = clock.now()
        empty = state.empty(seen, policy, at)
        if wanted.named is not None:
            uuids = uuids_of(wanted.named, seen.readings)
            wanted = replace(wanted, claim={**wanted.claim, "named": uuids})
        checks = _Checks(tx, empty, seen.host, policy, limits, state, at)
        jobs = [existing(tx, number) for number in numbers]
        for job in jobs:
            refuse_unless_queued(job, "edit")
        options = {**wanted.options, **_new_dependencies(tx, jobs, wanted.after)}
        edited = [_edited(checks, job, replace(wanted, options=options)) for job in jobs]
        said = {each.job.id: f"{'; '.join(each.changes)}; by {who}" for each in edited}
        changed = [each.job for each in edited if each.changes]
        if changed:
            tx.save_all(changed, Event(at, "edit"), said)
        if wanted.claim:
            checks.check_totals(changed)
    return edited


@dataclass(frozen=True, slots=True)
class _Checks:
    """What a new claim is checked against, as a submission is."""

    tx: Transaction
    empty: tuple[GpuMemory, ...]
    """The ledgers of the GPUs without jobs."""
    host: HostReading | None
    policy: Policy
    limits: Mapping[Owner, UserLimits]
    """The limits of users; none for users who are not here."""
    state: QueueState
    at: datetime
    early_signals: dict[JobId, EarlySignal | None] = field(default_factory=dict)
    """Of each job or array, once it was looked up."""

    def limits_of(self, job: Job) -> UserLimits:
        return self.limits.get(job.owner, NO_LIMITS)

    def check(self, job: Job) -> None:
        limits = self.limits_of(job)
        if job.claim.time_limit is not None:
            refuse_longer(job.claim.time_limit, limits, f"edit job {job.label}", hold=False)
        refuse_what_can_never_start(job.claim, self.empty, self.policy, limits, job.owner.user)
        refuse_beyond_host(job.claim, self.host, self.policy.host)

    def check_totals(self, changed: Sequence[Job]) -> None:
        """Check what each user asks for in total; all changes are saved."""
        most, live = largest(self.empty, 1), self.tx.live()
        # The total is the same whichever of the user's jobs comes last.
        for job in {job.owner: job for job in changed}.values():
            limits = self.limits_of(job)
            if limits.over_limit is Beyond.REFUSE:
                refuse_over_limit(
                    [job], live, limits, self.state.recent_use, most, self.at, verb="edit"
                )

    def check_signal(self, job: Job) -> None:
        """Check that the signal ahead of the time limit still lies within the limit."""
        array = job.queue.array
        key = job.id if array is None else array.job
        if key not in self.early_signals:
            self.early_signals[key] = self.tx.invocation(job.id).early_signal
        early, limit = self.early_signals[key], job.claim.time_limit
        if early is not None and (limit is None or early.before >= limit):
            raise BadValue(
                f"cannot edit job {job.label}: it gets a signal {format_span(early.before)} "
                "before its time limit",
                f"use a time limit over {format_span(early.before)}",
            )


def _new_dependencies(
    tx: Transaction, jobs: Sequence[Job], wanted: Iterable[WantedDependency] | None
) -> Mapping[str, Any]:
    if wanted is None or not jobs:
        return {}
    after, never = resolve(tx, wanted)
    if never is not None:
        raise BadValue(
            f"cannot edit job {jobs[0].label}: {never}",
            "leave out this dependency, or cancel the job",
        )
    refuse_cycle(tx, jobs, after)
    return {"after": after}


def _edited(checks: _Checks, before: Job, wanted: Edit) -> Edited:
    after = _changed(before, wanted)
    if wanted.claim:
        usual = checks.limits_of(after).usual_time(hold=False)
        if after.claim.time_limit is None and usual is not None:
            after = replace(after, claim=replace(after.claim, time_limit=usual[0]))
        checks.check(after)
        if "time_limit" in wanted.claim:
            checks.check_signal(after)
    labels = {gpu.uuid: gpu.reading.label for gpu in checks.empty}
    changes = tuple(_differences(before, after, labels))
    return Edited(after, (*changes, *_limits_instead(wanted, after, checks.limits_of(after))))


def _limits_instead(wanted: Edit, job: Job, limits: UserLimits) -> Iterator[str]:
    """Yield why a job has a time limit although the edit removes it."""
    usual = limits.usual_time(hold=False)
    if usual is not None and wanted.claim.get("time_limit", usual) is None:
        yield f"jobs of {job.owner.user} without --time get {format_span(usual[0])} ({usual[1]})"


def _changed(job: Job, wanted: Edit) -> Job:
    usage = job.usage
    if "memory" in wanted.claim:
        # The size is the user's now.
        usage = replace(usage, size_reason=None)
    return replace(
        job,
        name=job.name if wanted.name is None else wanted.name,
        claim=replace(job.claim, **wanted.claim),
        queue=replace(job.queue, **wanted.options),
        usage=usage,
    )


def refuse_unless_queued(job: Job, verb: str) -> None:
    """Check that a job waits, so that it can be edited or moved.

    Raises:
        WrongState: it does not, it is a hold, or Slurm runs it.
    """
    if job.holder is not None:
        raise WrongState(
            f"cannot {verb} job {job.label}: it is a hold",
            f"gpulease cancel {job.label} releases it; then hold another one",
        )
    if job.slurm is not None:
        raise WrongState(
            f"cannot {verb} job {job.label}: Slurm runs it",
            f"scontrol update jobid={job.slurm.id} changes what Slurm can change",
        )
    if job.state is State.QUEUED:
        return
    if job.state is State.ENDED:
        hint = f"gpulease show {job.label} shows how"
        raise WrongState(f"cannot {verb} job {job.label}: it has ended", hint)
    raise WrongState(
        f"cannot {verb} job {job.label}: it does not wait any more",
        f"gpulease extend {job.label} +2h changes its time limit; gpulease requeue {job.label} "
        "stops it and puts it back into the queue",
    )


def _differences(before: Job, after: Job, labels: Mapping[GpuUuid, str]) -> Iterator[str]:
    old, new = dict(_described(before, labels)), dict(_described(after, labels))
    for what, value in new.items():
        if value != old[what]:
            yield f"{f'{what} ' if what else ''}{old[what]} to {value}"


def _described(job: Job, labels: Mapping[GpuUuid, str]) -> Iterator[tuple[str, str]]:
    claim, options = job.claim, job.queue
    yield "name", job.name
    yield "memory", claim.size
    yield "GPUs", str(claim.gpus)
    yield "", _named(claim, labels)
    yield "model", claim.model or "any"
    yield "least GPU size", "any" if claim.min_vram is None else format_size(claim.min_vram)
    yield "same model", "yes" if claim.same_model else "no"
    yield "RAM", "none" if claim.ram is None else format_size(claim.ram)
    yield "cores", "none" if claim.cpus is None else str(claim.cpus)
    yield "linked", "yes" if claim.linked else "no"
    yield "time limit", "none" if claim.time_limit is None else format_span(claim.time_limit)
    yield "priority", options.priority
    yield "nice", str(options.nice)
    yield "held", "yes" if options.held else "no"
    begin = options.begin_at
    yield "begin", "none" if begin is None else begin.isoformat(timespec="seconds")
    yield "after", ", ".join(map(str, options.after)) or "none"
    yield "retries", str(options.retries)


def _named(claim: Claim, labels: Mapping[GpuUuid, str]) -> str:
    if not claim.named:
        return "any GPU"
    return f"GPU {', '.join(labels.get(uuid, uuid) for uuid in claim.named)}"


@dataclass(frozen=True, slots=True)
class Move:
    """A new place for waiting jobs."""

    before: JobId | None
    """The job that they go before; None: before all others."""
    uid: int
    who: str
    """The caller, for the history."""
    is_admin: bool


def move(store: Store, numbers: Collection[JobId], wanted: Move, clock: Clock) -> Sequence[Job]:
    """Move waiting jobs before another one, all of them or none; they keep their order.

    Within the jobs of the caller, the others sink, so that no job of another user starts later.
    An admin who moves jobs of others raises them instead.

    Raises:
        NoSuchJob: there is no such job.
        WrongState: one of the jobs does not wait.
        NotAllowed: the other job belongs to another user.
        BadValue: a job cannot go before the other one.
    """
    with change_jobs(store) as tx:
        target = None if wanted.before is None else existing(tx, wanted.before)
        moved = [existing(tx, number) for number in numbers]
        for job in moved:
            refuse_unless_queued(job, "move")
            _refuse_place(job, target, wanted)
        at = clock.now()
        queued = {job.id: job for job in tx.live() if job.state is State.QUEUED}
        undone = [_with_place(job, None) for job in _contrary(moved, target, wanted, queued)]
        if undone:
            tx.save_all(undone, Event(at, "move", "undone by a later move"))
        placed = [_placed(job, target, wanted) for job in moved]
        place = "first" if target is None else f"before job {target.label}"
        tx.save_all(placed, Event(at, "move", f"{place}; by {wanted.who}"))
    return placed


def _refuse_place(job: Job, target: Job | None, wanted: Move) -> None:
    if target is None:
        return
    cannot = f"cannot move job {job.label} before job {target.label}"
    if job.id == target.id:
        raise BadValue(f"{cannot}: that is the same job", "gpulease move 17 --before 12")
    if target.owner.uid != job.owner.uid and not wanted.is_admin:
        raise NotAllowed(
            f"{cannot}: job {target.label} belongs to {target.owner.user}",
            "use one of your own jobs, or --first; only admins move jobs before those of others",
        )
    if target.state is not State.QUEUED:
        raise WrongState(
            f"{cannot}: job {target.label} does not wait any more",
            "gpulease status shows the queue",
        )
    if RANKS[job.queue.priority] > RANKS[target.queue.priority]:
        raise BadValue(
            f"{cannot}: its priority is {job.queue.priority}, and that of job {target.label} is "
            f"{target.queue.priority}",
            _hint_of_classes(job, target, wanted),
        )


def _hint_of_classes(job: Job, target: Job, wanted: Move) -> str:
    higher = target.queue.priority
    if higher is Priority.HIGH and not wanted.is_admin:
        return (
            f"gpulease edit {target.label} --priority {job.queue.priority} lowers job "
            f"{target.label}; only admins may raise job {job.label}"
        )
    return f"gpulease edit {job.label} --priority {higher} raises job {job.label}"


def _placed(job: Job, target: Job | None, wanted: Move) -> Job:
    owners = {job.owner.uid} | ({target.owner.uid} if target is not None else set())
    return _with_place(
        job,
        FIRST if target is None else target.id,
        by_admin=wanted.is_admin and owners != {wanted.uid},
    )


def _with_place(job: Job, before: JobId | None, *, by_admin: bool = False) -> Job:
    options = replace(job.queue, moved_before=before, moved_by_admin=by_admin)
    return replace(job, queue=options)


def _contrary(
    moved: Sequence[Job], target: Job | None, wanted: Move, queued: Mapping[JobId, Job]
) -> Sequence[Job]:
    """Return the jobs with earlier moves that this one contradicts: they would form a circle."""
    numbers = {job.id for job in moved}
    if target is None:
        uids = {job.owner.uid for job in moved}
        contrary = numbers | {FIRST}
        return [
            job
            for job in queued.values()
            if job.queue.moved_before in contrary
            and job.id not in numbers
            and (job.owner.uid in uids or (wanted.is_admin and job.queue.moved_by_admin))
        ]
    seen, after = set[JobId](), target
    while (before := after.queue.moved_before) is not None and after.id not in seen:
        if before in numbers or before == FIRST:
            return [after]
        if before not in queued:
            return []
        seen.add(after.id)
        after = queued[before]
    return []
