"""Acts on jobs that exceed their leases or do not use them, and on leases that are short of memory.

Runs after each observation of the sampling timer. The owner gets a notice at first. After the grace
the job is stopped, as by `cancel`. The notices are in this module, one line each.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta

from gpulease.domain.gpu import GpuUuid
from gpulease.domain.idle import IdleAction, Release
from gpulease.domain.job import Outcome
from gpulease.domain.memory_estimate import advised_size
from gpulease.domain.notifications import NotifyEvent
from gpulease.domain.overuse import Consequence, OveruseAction
from gpulease.domain.plan import Plan
from gpulease.domain.snapshot import ledgers
from gpulease.errors import RecordUnwritable, with_hint
from gpulease.service.idleness import IdleFinding, IdleWatch
from gpulease.service.observation import Observation, snapshot
from gpulease.service.overuse import (
    HELD_BY_OTHERS,
    IN_USE,
    Finding,
    Key,
    OveruseWatch,
    Shortfall,
    ShortfallWatch,
    asked_back,
    overdrawn,
    record,
    wanted_gpus,
)
from gpulease.service.ports import Clock, InThread
from gpulease.service.scheduler import Scheduler
from gpulease.service.submission import most_of
from gpulease.units import format_above, format_size, format_span, round_up_size

_NO_MORE = "no GPU here offers more"
_USE_OWN = "use the GPUs in the CUDA_VISIBLE_DEVICES that gpulease sets, or"
_A_SECOND = timedelta(seconds=1)


def size_to_ask_for(found: Finding, peak: int, most: int, shard: int) -> str | None:
    """Return the size to ask for next time, as it is written; None: no GPU here has more.

    `most` is the largest lease that a GPU here can grant, in bytes; 0: unknown. `shard` is the
    unit of Slurm: --mem of its commands is memory of the machine.
    """
    # The next pool of the user is smaller by what was learnt, and grows with the lease.
    excused = found.state.is_excused
    size = round_up_size(found.limit + found.overhead) if excused else advised_size(peak)
    size = min(size, most) if most else size
    shown = format_size(size)
    if size <= found.limit or shown == format_size(found.limit):
        return None
    if found.job.slurm is not None:
        shards = f", or --gres=shard:{-(-size // shard)}" if shard else ""
        return f"gpulease run --mem {shown}{shards}"
    if found.lease.memory_bound is not None and not found.wanted:
        shown = f"{format_size(found.lease.memory)}..{shown}"
    return shown if found.job.holder is not None else f"--mem {shown}"


def overuse_warning(found: Finding, ask: str | None) -> str:
    """Return the notice that a job exceeds its lease or guarantee, with the consequence."""
    if not found.is_leased:
        return _without_lease(found)
    if found.is_asked_back:
        return f"{_holds(found)}, and other jobs need the rest; {_give_back(found)}"
    if found.state.is_excused:
        return f"{_holds(found)}; {_not_stopped(found)}; {_next_time(ask)}"
    why = ", and other jobs wait for that memory" if found.policy.elastic and found.wanted else ""
    return f"{_holds(found)}{why}; {_consequence(found, ask)}"


def _not_stopped(found: Finding) -> str:
    return (
        f"its framework needs {format_size(found.overhead)} more beside its memory pool than was "
        "reserved, which does not stop the job"
    )


def _next_time(ask: str | None) -> str:
    return f"next time {f'use {ask}' if ask else f'reduce its use: {_NO_MORE}'}"


def _without_lease(found: Finding) -> str:
    what = f"{format_size(found.used)} of GPU {found.label}" if found.used else f"GPU {found.label}"
    said = f"{found.job.title} uses {what}, which it did not lease"
    left = found.state.left(found.policy)
    if left is None:
        return f"{said}; {_use_own(found)}"
    why = ", and other jobs wait for that memory" if found.policy.elastic else ""
    return f"{said}{why}; {_deadline(left, 'leaves that GPU')}; {_use_own(found)}"


def _use_own(found: Finding) -> str:
    if found.job.slurm is None:
        return f"{_USE_OWN} lease more with --gpus"
    return f"{_USE_OWN} ask Slurm for more with --gres=gpu:N"


def _deadline(left: timedelta, unless: str) -> str:
    if left < _A_SECOND:
        return "it is stopped now"
    return f"it is stopped in {format_span(left)} unless it {unless}"


def _consequence(found: Finding, ask: str | None) -> str:
    if found.job.holder is not None:
        return f"{f'hold {ask} instead, or ' if ask else ''}use less"
    if found.policy.consequence is Consequence.WARN:
        return _next_time(ask)
    left = found.state.left(found.policy) or timedelta(0)
    return f"{_deadline(left, 'frees the rest')}; {_next_time(ask)}"


def _give_back(found: Finding) -> str:
    rest, left = format_size(found.used - found.lease.memory), found.state.left(found.policy)
    return f"give back {rest}" if left is None else _deadline(left, f"gives back {rest}")


def overuse_clear(found: Finding) -> str:
    """Return the notice that a job is not stopped after an earlier notice."""
    job, gpu = found.job.title, f"GPU {found.label}"
    within = found.used <= found.limit + found.policy.tolerance
    if within and not found.is_leased:
        return f"{job} holds only a CUDA context on {gpu} now, and is not stopped"
    if within:
        return f"{job} is within its lease of {gpu} again, and is not stopped"
    if found.state.is_excused:
        return f"{_holds(found)}; {_not_stopped(found)}"
    where = f"its lease of {gpu}" if found.is_leased else f"a CUDA context on {gpu}"
    if found.policy.consequence is Consequence.WARN:
        return f"{job} holds more than {where}, but is no longer stopped for it"
    if not found.is_leased:
        return f"{job} is not stopped: no job waits for the memory it holds there without a lease"
    return f"{job} is not stopped: no job waits for the memory beyond its lease of {gpu}"


def overuse_stop(found: Finding, peak: int, ask: str | None) -> tuple[str, str]:
    """Return why a job is stopped, for the record with a hint, and for its output."""
    after = format_span(found.policy.grace)
    used = _used(found)
    at_most = f" ({format_size(peak)} at most)" if format_size(peak) != used else ""
    held = f"it held {used} of GPU {found.label}{at_most}"
    if found.is_asked_back:
        guaranteed = format_size(found.lease.memory)
        why = f"{held}, of which {guaranteed} are guaranteed, and gave back too little in {after}"
        hint = f"use {ask} to keep as much" if ask else "give memory back at the notice"
    elif found.is_leased:
        why = f"{held} under a lease of {found.lease.size} for longer than {after}"
        hint = f"use {ask}" if ask else f"{_NO_MORE}: reduce its use, or use more GPUs"
    else:
        why, hint = f"{held}, which it did not lease, for longer than {after}", _use_own(found)
    return with_hint(why, hint), f"{found.job.title} is stopped: {why}; {hint}"


def shortfall_warning(found: Shortfall) -> str:
    """Return the notice that a job may not get all of its lease, with what its owner can do."""
    lease, unmanaged, promised = map(
        format_size, (found.lease.memory, found.unmanaged, found.promised)
    )
    return (
        f"{found.job.title} may run out of memory within its lease of {lease} on GPU "
        f"{found.label}: {unmanaged} is in use there without a lease, and leases need {promised} "
        "of it; save the job's work, and ask the owners of the unmanaged processes in gpulease "
        "status to end them, or run the job again"
    )


def idle_warning(found: IdleFinding) -> str:
    """Return the notice that a lease is not used, with the consequence."""
    job, slurm = found.job.label, found.job.slurm
    said = (
        f"{found.job.title} has been idle on its {_gpus(found)} for {format_span(found.idle_for)}, "
        "and other jobs wait for the memory"
    )
    if found.policy.release is Release.WARN:
        cancel = f"gpulease cancel {job}" if slurm is None else f"scancel {slurm.id}"
        return f"{said}; {cancel} releases it"
    what = "the job is stopped" if found.job.holder is None else "the lease is revoked"
    return (
        f"{said}; after another {format_span(found.policy.grace)} without use, {what}; "
        f"gpulease keep {job} prevents this"
    )


def idle_release(found: IdleFinding) -> tuple[str, str]:
    """Return why a lease is revoked, for the record with a hint, and for the job's output."""
    span = format_span(found.idle_for)
    why = f"it was idle on its {_gpus(found)} for {span} while other jobs waited"
    hint = "if a job is idle on purpose, use gpulease keep in time"
    return with_hint(why, hint), f"{found.job.title} is stopped: {why}"


def _gpus(found: IdleFinding) -> str:
    return "GPU" if len(found.job.leases) == 1 else "GPUs"


def _holds(found: Finding) -> str:
    held = f"{found.job.title} holds {_used(found)} of GPU {found.label}"
    if found.is_asked_back:
        return f"{held}, of which {format_size(found.lease.memory)} are guaranteed"
    return f"{held}, and its lease is {found.lease.size}"


def _used(found: Finding) -> str:
    return format_above(found.used, found.limit)


_log = logging.getLogger(__name__)


class EnforcementLoop:
    """Notifies owners and stops jobs, as the watches find."""

    def __init__(
        self,
        scheduler: Scheduler,
        overuse: OveruseWatch,
        idle: IdleWatch,
        clock: Clock,
        in_writer: InThread,
    ) -> None:
        self._shortfalls = ShortfallWatch()
        self._scheduler = scheduler
        self._overuse = overuse
        self._idle = idle
        self._clock = clock
        self._in_writer = in_writer
        self._wanted: tuple[Plan | None, _Wanted] = (None, _Wanted())

    async def check_idleness(self, seen: Observation) -> None:
        """Check one observation.

        Raises:
            RecordUnwritable: an action failed; the next observation finds its reason again.
        """
        scheduler, wanted = self._scheduler, self._wanted_now().leased
        watch, failures = self._idle, _Failures()
        for found in watch.findings(scheduler.store.holding(), seen, wanted, self._clock.steady()):
            with failures:
                await self._act_on_idle(found)
                watch.settled(found)
        failures.raise_first()

    async def check_overuse(self, seen: Observation) -> None:
        """Check one observation.

        Raises:
            RecordUnwritable: an action failed; the next observation finds its reason again.
        """
        scheduler, watch = self._scheduler, self._overuse
        wanted, now, holding = self._wanted_now(), self._clock.steady(), scheduler.store.holding()
        needed, failures = wanted.asked_back, _Failures()
        if any(lease.memory_bound is not None for job in holding for lease in job.leases):
            needed |= overdrawn(ledgers(snapshot(holding, seen, scheduler.policy, {}, seen.at)))
        for found in watch.findings(holding, seen, wanted.leased, now, wanted.in_use, needed):
            with failures:
                await self._act(found)
                watch.settled(found)
        failures.raise_first()
        behind = watch.unrecorded(scheduler.store.holding())
        if behind:
            await self._in_writer(lambda: record(scheduler.store, behind))

    async def check_shortfalls(self, seen: Observation) -> None:
        """Check one observation.

        Raises:
            RecordUnwritable: a notice failed; the next observation repeats it.
        """
        scheduler, failures = self._scheduler, _Failures()
        holding = scheduler.store.holding()
        gpus = ledgers(snapshot(holding, seen, scheduler.policy, {}, seen.at))
        for found in self._shortfalls.findings(holding, gpus, self._clock.steady()):
            with failures:
                await scheduler.notify_owner(found.job.id, shortfall_warning(found))
                self._shortfalls.settled(found)
        failures.raise_first()

    def _wanted_now(self) -> "_Wanted":
        """Return the GPUs that queued jobs wait for, computed once for each plan."""
        plan = self._scheduler.plan
        if self._wanted[0] is not plan:
            self._wanted = (
                plan,
                _Wanted(
                    wanted_gpus(plan, HELD_BY_OTHERS), wanted_gpus(plan, IN_USE), asked_back(plan)
                ),
            )
        return self._wanted[1]

    async def _act(self, found: Finding) -> None:
        job = found.job
        peak = self._scheduler.peaks.by_lease.get((job.id, found.lease.gpu), found.used)
        peak = max(peak, found.used)
        scheduler = self._scheduler
        slurm = scheduler.policy.slurm
        most = most_of(scheduler.seen, scheduler.policy, job.claim, self._clock.now())
        ask = size_to_ask_for(found, peak, most, 0 if slurm is None else slurm.shard)
        if found.action is OveruseAction.WARN:
            warning = overuse_warning(found, ask)
            await scheduler.notify_owner(job.id, warning, NotifyEvent.OVER_LEASE)
            return
        if found.action is OveruseAction.CLEAR:
            await scheduler.notify_owner(job.id, overuse_clear(found))
            return
        detail, notice = overuse_stop(found, peak, ask)
        await self._scheduler.revoke(job.id, Outcome.OVER_LEASE, detail, notice)
        _log.info("%s (of %s)", notice, job.owner.user)

    async def _act_on_idle(self, found: IdleFinding) -> None:
        if found.action is IdleAction.WARN:
            await self._scheduler.notify_owner(found.job.id, idle_warning(found), NotifyEvent.IDLE)
            return
        detail, notice = idle_release(found)
        await self._scheduler.revoke(found.job.id, Outcome.IDLE, detail, notice)
        _log.info("%s (of %s)", notice, found.job.owner.user)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The GPUs that queued jobs wait for: because of leases, or of any use."""

    leased: frozenset[GpuUuid] = frozenset()
    in_use: frozenset[GpuUuid] = frozenset()
    asked_back: frozenset[Key] = frozenset()
    """The leases of which they need what is used above the guarantee."""


class _Failures:
    """Keeps a failure about one job from affecting others, and raises the first at the end."""

    def __init__(self) -> None:
        self._first: RecordUnwritable | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, RecordUnwritable):
            return False
        self._first = self._first or error
        return True

    def raise_first(self) -> None:
        if self._first is not None:
            raise self._first
