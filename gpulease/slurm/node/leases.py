"""Leases for jobs of Slurm: on the GPUs that Slurm chose, granted at once or refused.

Slurm has its own queue, accounts and limits, so those of the daemon do not apply. The lease begins
with the prolog of the job and ends after its epilog.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fractions import Fraction
from functools import partial
from typing import Final

from gpulease.domain.gpu import GpuMemory, GpuReading, GpuUuid
from gpulease.domain.job import CommandFingerprint, Exit, Invocation, Job, Owner, SlurmJob, grant
from gpulease.domain.lease import Claim, Trigger
from gpulease.domain.placement import Obstacle, ObstacleKind, Placement, find_obstacle
from gpulease.domain.snapshot import ledgers
from gpulease.errors import WrongState
from gpulease.service.adoption import GpuUse, find_uses, without
from gpulease.service.jobs import existing
from gpulease.service.observation import Observation, snapshot
from gpulease.service.ports import (
    Clock,
    Event,
    InThread,
    Policy,
    ProcessFinder,
    SlurmPolicy,
    Submission,
    Transaction,
)
from gpulease.service.scheduler import Scheduler
from gpulease.service.slurm_gpus import device_number, gpus_of_slurm
from gpulease.service.transactions import change_jobs
from gpulease.slurm.allocations import NodeAllocation, SlurmRefusal
from gpulease.slurm.node.controller import SlurmController
from gpulease.units import Share, format_size

_log = logging.getLogger(__name__)

_ALL: Final = Share(Fraction(100))
_LOOK_AGAIN_S = 0.3
_MOST_REFUSED = 1000
"""Refusals that are kept for task prologs."""


@dataclass(frozen=True, slots=True)
class SlurmRequest:
    """A job of Slurm that asks for a lease."""

    job: SlurmJob
    owner: Owner
    is_running: bool = False
    """It runs already, and may use memory: nobody granted a lease when it began."""


class SlurmLeases:
    """Grants and ends the leases of jobs of Slurm."""

    def __init__(
        self,
        scheduler: Scheduler,
        processes: ProcessFinder,
        clock: Clock,
        in_writer: InThread,
        slurm: SlurmController,
        ended: Callable[[Job, Exit | None], Awaitable[None]],
        limit: Callable[[Job], Awaitable[None]],
        running: Callable[[int, int], Awaitable[SlurmRequest | None]],
    ) -> None:
        """`ended` tells the launcher that Slurm has ended a job, which may have processes left.

        `limit` has the driver limit a job before its first task, where it can. `running` returns a
        running job by its number, as Slurm describes it; None if the pid is not of the job.
        """
        self._running = running
        self._granting = asyncio.Lock()
        self.settles_within = timedelta(seconds=3)
        """The driver may report the memory of a job as used for so long after its end."""
        self.ends_within_s = 5.0
        self._scheduler = scheduler
        self._processes = processes
        self._clock = clock
        self._in_writer = in_writer
        self._slurm = slurm
        self._ended = ended
        self._limit = limit
        self._refused: dict[int, str] = {}
        """Why jobs were refused, by their ids in Slurm; the latest last."""

    def of(self, number: int) -> Job | None:
        """Return the lease of the job with a number in Slurm; None if it holds none."""
        return latest(self._scheduler.store.holding(), number)

    def why_refused(self, number: int) -> str | None:
        """Return why a job of Slurm got no lease; None if it was not refused, or long ago."""
        return self._refused.get(number)

    async def of_task(self, number: int, pid: int) -> Job | None:
        """Return the lease of a job as one of its tasks asks; grant it if there is none yet.

        slurmd 22.05 starts a job that was queued again without its prolog if it looked through its
        credentials less than 2 s before, for another job.

        Args:
            number: the job's in Slurm.
            pid: the process that asks; nothing that it says about itself is trusted.

        Returns:
            None if the job was refused, or if Slurm runs no such job with that process.

        Raises:
            SlurmFailed: Slurm does not answer.
            RecordUnwritable: it cannot be stored now.
        """
        # All tasks of a step ask at once.
        async with self._granting:
            if (job := self.of(number)) is not None or number in self._refused:
                return job
            if (request := await self._running(number, pid)) is None:
                return None
            try:
                return await self.grant(request)
            except SlurmRefusal as refusal:
                await self.refuse(request, refusal)
                return None

    async def grant(self, request: SlurmRequest) -> Job:
        """Grant a lease and return its job when it is on disk; for a known job, return that one.

        Raises:
            SlurmRefusal: the memory is not there, or the GPU is out of service.
            SlurmFailed: Slurm does not say what the job has here.
            RecordUnwritable: it cannot be stored now.
        """
        number = request.job.id
        known = self._scheduler.store.holding()
        if (before := _this(known, request.job, request.owner)) is not None:
            return before
        await self._end_all(each for each in known if each.slurm and each.slurm.id == number)
        job = await self._grant(request)
        self._refused.pop(number, None)
        self._scheduler.follow(job)
        return job

    async def _grant(self, request: SlurmRequest) -> Job:
        # At once: the job waits for both.
        allocation, seen = await asyncio.gather(
            self._slurm.allocation(request.job), self._scheduler.observer.observe()
        )
        while True:
            try:
                order = _submission(request, allocation, seen, self._policy())
                uses = await self._uses(order, seen) if request.is_running else {}
                return await self._in_writer(partial(self._store, order, seen, uses))
            except SlurmRefusal as refusal:
                freed_at = self._scheduler.supervisor.freed_at
                # Memory was freed a moment ago: a reading may still show it.
                is_settling = (
                    freed_at is not None and self._clock.now() - freed_at < self.settles_within
                )
                if not (refusal.may_pass and is_settling):
                    raise
            await asyncio.sleep(_LOOK_AGAIN_S)
            seen = await self._scheduler.observer.observe()

    async def _uses(self, order: Submission, seen: Observation) -> Mapping[GpuUuid, GpuUse]:
        try:
            return await asyncio.to_thread(find_uses, order, seen, self._processes)
        except WrongState as error:
            raise SlurmRefusal(error.message) from error

    def _store(self, order: Submission, seen: Observation, uses: Mapping[GpuUuid, GpuUse]) -> Job:
        policy, at = self._scheduler.policy, self._clock.now()
        with change_jobs(self._scheduler.store) as tx:
            return grant_at_once(tx, order, seen, uses, policy, at)

    def _policy(self) -> SlurmPolicy:
        slurm = self._scheduler.policy.slurm
        assert slurm is not None, "the caller has checked that Slurm assigns the GPUs"
        return slurm

    async def refuse(self, request: SlurmRequest, refusal: SlurmRefusal) -> None:
        """Have Slurm queue a refused job again, and keep the reason for its task prolog.

        Raises:
            SlurmFailed: Slurm does not answer; the job is to be refused again.
        """
        number, why = request.job.id, str(refusal)
        self._refused.pop(number, None)
        self._refused[number] = why
        while len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        _log.info("job %d of Slurm gets no lease: %s", number, why)
        if not refusal.is_over:
            await self._slurm.refuse(request.job, why, counts=not refusal.by_leases)

    async def end(self, number: int, exit_: Exit | None = None) -> None:
        """End the leases of a job of Slurm; return when its memory is free, or after a while.

        While processes of it are left, its memory counts, and Slurm need not wait for that.
        `exit_` is what the epilog has of it: 0 also for a job that Slurm has cancelled or queued
        again, or whose time was up.
        """
        self._refused.pop(number, None)
        jobs = self._scheduler.store.holding()
        mine = [each for each in jobs if each.slurm and each.slurm.id == number]
        if exit_ == Exit(0) and mine and mine[-1].slurm is not None:
            exit_ = await self._slurm.exit_of(mine[-1].slurm) or exit_
        await self._end_all(mine, exit_)

    async def _end_all(self, jobs: Iterable[Job], exit_: Exit | None = None) -> None:
        for job in jobs:
            await self._ended(job, exit_)
            try:
                async with asyncio.timeout(self.ends_within_s):
                    change = self._scheduler.next_change
                    while self._scheduler.store.live_job(job.id) is not None:
                        await change.wait()
                        change = self._scheduler.next_change
            except TimeoutError:
                _log.warning("job %s of Slurm has ended, and has processes left", job.slurm)

    async def limited(self, job: Job) -> Job:
        """Return a job as the driver limits it from now on, if it can.

        Raises:
            RecordUnwritable: a limit cannot be stored now.
        """
        await self._limit(job)
        return self._scheduler.store.live_job(job.id) or job

    def part_of_task(self, job: Job, numbers: Collection[int], devices: Collection[int]) -> Job:
        """Return a job with the leases of the GPUs to which Slurm binds one of its tasks.

        Args:
            job: the job.
            numbers: the task's GPUs as Slurm numbers them, on the node or, under device rules, in
                the task.
            devices: the numbers of the device files that it can open; none: unknown.
        """
        known = gpus_of_slurm(tuple(self._scheduler.observer.readings().values()), self._policy())
        can_open = {gpu.uuid for gpu in known if device_number(gpu) in devices}
        if not can_open:
            return job
        if len(can_open) == len(known):  # there are no device rules, or they deny nothing
            can_open = {gpu.uuid for at, gpu in enumerate(known) if at in numbers}
        bound = tuple(lease for lease in job.leases if lease.gpu in can_open)
        return replace(job, leases=bound) if bound else job

    async def describe(
        self, known: Job, command: str, fingerprint: CommandFingerprint | None
    ) -> Job:
        """Store what a job runs, as its first task says."""

        def store() -> Job:
            with change_jobs(self._scheduler.store) as tx:
                job = existing(tx, known.id)
                if job.holds_memory:
                    usage = replace(job.usage, fingerprint=fingerprint)
                    job = replace(job, command=command, usage=usage)
                    tx.save(job, None)
            return job

        if (known.command, known.usage.fingerprint) == (command, fingerprint):
            return known
        return await self._in_writer(store)


def latest(jobs: Sequence[Job], number: int) -> Job | None:
    """Return the latest of `jobs` for the job with a number in Slurm; None if there is none."""
    found = [job for job in jobs if job.slurm is not None and job.slurm.id == number]
    return max(found, key=lambda job: job.id, default=None)


def _this(jobs: Sequence[Job], wanted: SlurmJob, owner: Owner) -> Job | None:
    """Return the lease of this very run of a job of Slurm; None if it holds none.

    A Slurm that has lost its state gives ids again.
    """
    found = latest([job for job in jobs if job.holds_memory], wanted.id)
    run = None if found is None or found.owner.uid != owner.uid else found.slurm
    return found if run is not None and run.restarts == wanted.restarts else None


def grant_at_once(
    tx: Transaction,
    order: Submission,
    seen: Observation,
    uses: Mapping[GpuUuid, GpuUse],
    policy: Policy,
    at: datetime,
) -> Job:
    """Grant the lease of a job of Slurm; for a job that has it, return that one.

    Args:
        tx: the transaction, which changes nothing if this raises.
        order: the lease, whose claim names its GPUs.
        seen: the GPUs.
        uses: what the job uses of them already: its lease may come late.
        policy: the admin's settings.
        at: the time.

    Raises:
        SlurmRefusal: it does not fit.
    """
    live = tx.live()
    assert order.slurm is not None, "it is for a job of Slurm"
    if (before := _this(live, order.slurm, order.owner)) is not None:
        return before
    # Not those of the plan: the queue has other GPUs.
    gpus = {gpu.uuid: gpu for gpu in ledgers(snapshot(live, seen, policy, tx.drained(), at))}
    claim = replace(order.claim, gpus=1)
    sizes = {
        uuid: _size(claim, without(gpus[uuid], uses[uuid]) if uuid in uses else gpus[uuid], policy)
        for uuid in order.claim.named
    }
    tx.add_gpus(seen.readings, at)
    job = grant(tx.add(order, at), Placement(tuple(sizes.items())), at)
    tx.save(job, Event(at, Trigger.GRANT, f"{', '.join(sizes)}; chosen by Slurm"))
    return job


def _size(claim: Claim, gpu: GpuMemory, policy: Policy) -> int:
    """Return the bytes to lease on a GPU. Raises: SlurmRefusal."""
    if (obstacle := find_obstacle(claim, gpu)) is not None:
        size = "" if claim.exclusive else f"{format_size(claim.memory_on(0))} does not fit on "
        raise SlurmRefusal(
            f"{size}GPU {obstacle.label}: {obstacle.why}{_instead(claim, gpu, obstacle, policy)}",
            may_pass=obstacle.kind is ObstacleKind.UNMANAGED,
            by_leases=obstacle.kind is ObstacleKind.LEASED,
        )
    return claim.memory_on(gpu.allocatable or 0)


def _instead(claim: Claim, gpu: GpuMemory, obstacle: Obstacle, policy: Policy) -> str:
    """Return what to ask Slurm for: 22.05 assigns GPUs whole while their shards are in use."""
    one_whole = claim.exclusive and len(claim.named) == 1
    if policy.slurm is None or not (one_whole and obstacle.kind is ObstacleKind.LEASED):
        return ""
    count = (gpu.allocatable or 0) // policy.slurm.shard
    return (
        "; Slurm may assign a whole GPU while its shards are in use, so ask for all shards of one "
        f"instead: --gres=shard:{count}"
    )


def _submission(
    request: SlurmRequest, allocation: NodeAllocation, seen: Observation, slurm: SlurmPolicy
) -> Submission:
    """Return what a job of Slurm gets: shards of one GPU, or whole GPUs. Raises: SlurmRefusal."""
    gpus = _chosen(allocation.gpus, seen.readings, slurm)
    named = tuple(gpu.uuid for gpu in gpus)
    if allocation.shards:
        claim = Claim(allocation.shards * slurm.shard, named=named)
    else:
        claim = Claim(_ALL, len(named), exclusive=True, named=named)
    if not gpus:
        raise SlurmRefusal("Slurm names no GPU of this node for it")
    if allocation.shards and len(gpus) != 1:
        raise SlurmRefusal(f"Slurm names {len(gpus)} GPUs for {allocation.shards} shards")
    return Submission(
        owner=request.owner,
        name=allocation.name,
        command=f"job {request.job.id} of Slurm ({allocation.name})",
        claim=claim,
        invocation=Invocation((), "/", {}),
        slurm=request.job,
    )


def _chosen(
    numbers: Sequence[int], readings: Sequence[GpuReading], slurm: SlurmPolicy
) -> Sequence[GpuReading]:
    known = gpus_of_slurm(readings, slurm)
    if missing := [number for number in numbers if number >= len(known)]:
        raise SlurmRefusal(
            f"Slurm chose GPU {missing[0]} of {len(known)}, counted from 0: a GPU is missing, or "
            "gres.conf lists others"
        )
    return [known[number] for number in numbers]
