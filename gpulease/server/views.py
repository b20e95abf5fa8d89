"""What the API shows: jobs, GPUs and the queue as wire objects, as far as the caller may see."""

import socket
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from gpulease import __version__
from gpulease.domain.account import Use
from gpulease.domain.claim import Claim
from gpulease.domain.enforcement import Rung, ladder
from gpulease.domain.idleness import Release
from gpulease.domain.job import Job
from gpulease.domain.lease import Lease, State
from gpulease.domain.memory import Fault, GpuMemory, GpuReading, GpuUuid, JobId
from gpulease.domain.overuse import Consequence
from gpulease.domain.plan import Plan, Waiting, ledgers, waiting_in
from gpulease.domain.reach import Unheld
from gpulease.errors import RecordUnwritable
from gpulease.server.reasons import exit_status, reason
from gpulease.server.usage import pool_view
from gpulease.server.waiting import Told, claim_view, seconds
from gpulease.service.idleness import RestWatch
from gpulease.service.keeper import Keeper
from gpulease.service.look import Look, snapshot
from gpulease.service.overuse import OveruseWatch
from gpulease.service.ports import Event, ProcessFinder
from gpulease.service.usage import PoolSeen
from gpulease.wire import (
    EventView,
    GpuEventView,
    GpuState,
    GpuView,
    JobView,
    LeaseView,
    MemoryView,
    ProcessView,
    ReportView,
    RungView,
    StatusView,
    UnheldView,
    UseView,
)

_TOLD_FOR = timedelta(days=1)
_MOST_EVENTS = 200
"""Of the health of all GPUs, the newest."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change while the daemon runs."""

    driver: Callable[[], str | None]
    simulated: bool
    directory_of: Callable[[JobId], Path]
    """Where a job's record, output and socket are."""
    holds: "Rungs"
    unheld: Callable[[JobId], Sequence[Unheld]] = lambda _: ()
    pools_of: Callable[[Job], Sequence[PoolSeen]] = lambda _: ()


class Rungs(Protocol):
    """What holds leases on this machine."""

    @property
    def everywhere(self) -> tuple[str, ...]:
        """The rungs on which all leases stand that are granted now."""

    def rungs(self) -> list[RungView]:
        """Return each rung, and what there is to say of it."""


@dataclass(frozen=True, slots=True)
class Watches:
    """What is known of leases that hold too much, and of jobs that do nothing."""

    overuse: OveruseWatch
    rests: RestWatch


class Views:
    """Draws wire objects from the keeper's latest plan and look."""

    def __init__(
        self, keeper: Keeper, processes: ProcessFinder, machine: Machine, watches: Watches
    ) -> None:
        self._keeper = keeper
        self._overuse = watches.overuse
        self._rests = watches.rests
        self._processes = processes
        self._machine = machine
        self._line: tuple[Plan | None, list[JobId]] = (None, [])
        self._behind: tuple[Plan | None, dict[Claim, Waiting]] = (None, {})
        self._told = Told(None)
        self._used: tuple[Look | None, dict[tuple[JobId, GpuUuid], int]] = (None, {})

    def live(self) -> Sequence[Job]:
        """Return the jobs that wait or hold memory."""
        return self._keeper.store.live()

    def machine(self, live: Sequence[Job], now: datetime) -> StatusView:
        """Return one look at the whole machine, without the jobs."""
        seen = self._keeper.seen
        gpus = self._ledgers(live, seen, now) if seen is not None else ()
        return StatusView(
            host=socket.gethostname(),
            driver=self._machine.driver(),
            version=__version__,
            simulated=self._machine.simulated,
            at=_instant(now) or "",
            gpus=self._gpus(gpus, seen, now),
            jobs=[],
            enforcement=self._machine.holds.rungs(),
        )

    def _ledgers(self, live: Sequence[Job], seen: Look, now: datetime) -> tuple[GpuMemory, ...]:
        drained = self._keeper.store.drained()
        return ledgers(snapshot(live, seen, self._keeper.policy, drained, now))

    def job(
        self,
        job: Job,
        *,
        to_owner: bool = False,
        events: Sequence[Event] = (),
        pools: Sequence[PoolSeen] | None = None,
    ) -> JobView:
        """Return a job as anyone may see it, or with what only its owner may.

        `pools` are those of its frameworks, None: what is known of a running one.
        """
        waiting = self.waiting(job)
        told = self._told.of(job.claim, waiting) if waiting else None
        why = (told and told.why) or reason(job, waiting) or ""
        why, _, hint = why.partition("\n\nhint: ")
        idle_since_at, idle_ends_at = self._idle(job)
        has_directory = to_owner and job.granted_at is not None and job.holder is None
        return JobView(
            id=job.id,
            name=job.name,
            user=job.owner.user,
            state=job.state.value,
            reason=why or None,
            hint=hint or None,
            outcome=job.outcome.value if job.outcome else None,
            position=self.position(job),
            expected_start_at=_instant(waiting.expected_start_at) if waiting else None,
            command=job.command,
            claim=told.claim if told else claim_view(job.claim),
            leases=self._leases(job, self._machine.pools_of(job) if pools is None else pools),
            submitted_at=_instant(job.submitted_at) or "",
            granted_at=_instant(job.granted_at),
            started_at=_instant(job.started_at),
            ended_at=_instant(job.ended_at),
            expires_at=_instant(job.expires_at) if job.holds_memory else None,
            exit_status=exit_status(job),
            pid=job.pid,
            directory=str(self._machine.directory_of(job.id)) if has_directory else None,
            kind="run" if job.holder is None else "hold",
            terminal=job.terminal,
            main_exited_at=_instant(job.main_exited_at),
            grace=seconds(self._keeper.grace(job)),
            gives_up_at=_instant(job.gives_up_at) if job.state is State.QUEUED else None,
            kept_until_at=_instant(job.kept_until_at) if job.holds_memory else None,
            idle_since_at=idle_since_at,
            idle_ends_at=idle_ends_at,
            refusals=told.refusals if told else [],
            waits_for=told.waits_for if told else [],
            unheld=[
                UnheldView(each.pid, each.command, each.why)
                for each in self._machine.unheld(job.id)
            ],
            sized=job.account.sized,
            out_of_memory=job.account.out_of_memory,
            retry_of=job.account.retry_of,
            retried_as=job.account.retried_as,
            events=[EventView(_instant(each.at) or "", each.kind, each.detail) for each in events],
        )

    def waiting(self, job: Job) -> Waiting | None:
        """Return why a job waits; the same object as long as nothing of it has changed."""
        plan = self._keeper.plan
        if job.state is not State.QUEUED or plan is None:
            return None
        if self._told.plan is not plan:
            self._told = Told(plan, self._told)
        found = plan.waiting.get(job.id)
        return self._told.settled(job.claim, found or self._waiting_behind(plan, job))

    def _waiting_behind(self, plan: Plan, job: Job) -> Waiting:
        if self._behind[0] is not plan:
            self._behind = plan, {}
        behind = self._behind[1]
        if job.claim not in behind:
            behind[job.claim] = waiting_in(plan, job)
        return behind[job.claim]

    def position(self, job: Job) -> int | None:
        """Return the place of a waiting job in the line, as of the latest plan."""
        if job.state is not State.QUEUED:
            return None
        if self._line[0] is not self._keeper.plan:
            self._line = self._keeper.plan, []
        line = self._line[1]
        if not line or job.id > line[-1]:
            line.extend(self._who_came_after(line[-1] if line else JobId(0)))
        place = bisect_left(line, job.id)
        return place + 1 if place < len(line) and line[place] == job.id else None

    def _who_came_after(self, last: JobId) -> list[JobId]:
        newer = takewhile(lambda each: each.id > last, reversed(self._keeper.store.live()))
        return [each.id for each in newer if each.state is State.QUEUED][::-1]

    def _leases(self, job: Job, pools: Sequence[PoolSeen]) -> list[LeaseView]:
        seen = self._keeper.seen
        used = self._used_by_job()
        peaks = self._keeper.peaks.by_lease
        return [
            LeaseView(
                gpu=lease.gpu,
                memory=lease.memory,
                used=seen.used(job.id, lease.gpu, used) if seen and job.holds_memory else None,
                peak=peaks.get((job.id, lease.gpu), lease.peak),
                enforced_by=self._rungs(job, lease),
                driver_limit=lease.driver_limit,
                needed=lease.used,
                pools=[pool_view(each, lease) for each in pools if each.gpu == lease.gpu],
                **self._over(job, lease.gpu, seen),
            )
            for lease in job.leases
        ]

    def _over(self, job: Job, gpu: GpuUuid, seen: Look | None) -> dict[str, str | None]:
        """Return since when a lease is over, and when that ends its job."""
        standing = self._overuse.standing(job.id, gpu)
        if standing.over_for is None or seen is None or job.state is not State.ACTIVE:
            return {}
        left = standing.left(self._overuse.policy(job))
        return {
            "over_since_at": _instant(seen.at - standing.over_for),
            "stops_at": None if left is None else _instant(seen.at + left),
        }

    def _idle(self, job: Job) -> tuple[str | None, str | None]:
        """Return since when a job does nothing, and when that ends it, where that matters."""
        seen, rest = self._keeper.seen, self._rests.rest(job.id)
        policy = self._rests.policy(job)
        if seen is None or rest.idle_for is None or policy.release is Release.OFF:
            return None, None
        left = rest.left(policy)
        ends_at = None if left is None else seen.at + left
        return _instant(seen.at - rest.idle_for), _instant(ends_at)

    def _rungs(self, job: Job, lease: Lease) -> list[str]:
        """Return what holds the lease, or held it; watching may begin and end meanwhile."""
        holds = self._machine.holds
        rungs = set(holds.everywhere if lease.enforced_by is None else lease.enforced_by)
        if job.holds_memory:
            rungs -= {Rung.WATCH}
            stops = self._overuse.policy(job).consequence is Consequence.STOP
            rungs |= {Rung.WATCH.value} if stops else set()
        return list(ladder(rungs))

    def _used_by_job(self) -> Mapping[tuple[JobId, GpuUuid], int]:
        """Return what each job uses on each GPU, summed once for each look."""
        seen = self._keeper.seen
        if seen is not None and self._used[0] is not seen:
            self._used = seen, seen.used_by_job()
        return self._used[1]

    def _gpus(self, gpus: Sequence[GpuMemory], seen: Look | None, now: datetime) -> list[GpuView]:
        try:
            told = self._keeper.store.gpu_events(now - _TOLD_FOR, _MOST_EVENTS)
        except RecordUnwritable:
            # There is still a status to be shown.
            told = ()
        by_gpu: dict[GpuUuid, list[GpuEventView]] = {}
        for each in told:
            view = GpuEventView(_instant(each.at) or "", each.kind, each.detail, each.count)
            by_gpu.setdefault(each.gpu, []).append(view)
        jobs_by_pid = seen.jobs_by_pid if seen is not None else {}
        return [self._gpu(gpu, jobs_by_pid, by_gpu.get(gpu.uuid, [])) for gpu in gpus]

    def _gpu(
        self, gpu: GpuMemory, jobs_by_pid: Mapping[int, JobId], events: list[GpuEventView]
    ) -> GpuView:
        reading = gpu.reading
        return GpuView(
            index=gpu.index,
            uuid=gpu.uuid,
            name=reading.name,
            state=_state(gpu),
            detail="; ".join(each for each in (reading.detail, gpu.drained) if each) or None,
            memory=MemoryView(
                total=reading.total,
                used=reading.used,
                reserved=reading.reserved,
                allocatable=gpu.allocatable,
                leased=gpu.leased,
                committed=gpu.committed,
                unmanaged=gpu.unmanaged,
                headroom=gpu.headroom,
            ),
            utilization=reading.utilization,
            temperature=reading.temperature,
            processes=self._process_views(reading, jobs_by_pid),
            kept_for=self._keeper.plan.reserved.get(gpu.uuid) if self._keeper.plan else None,
            events=events,
            label=reading.label,
            parent=reading.parent,
        )

    def _process_views(
        self, reading: GpuReading, jobs_by_pid: Mapping[int, JobId]
    ) -> list[ProcessView]:
        views, seen = [], self._keeper.seen
        for process in reading.processes or ():
            who = self._processes.identify(process.pid)
            views.append(
                ProcessView(
                    pid=process.pid,
                    user=who.user if who else None,
                    name=who.name if who else None,
                    command=who.command if who else None,
                    memory=process.memory,
                    job=jobs_by_pid.get(process.pid),
                    serves=seen is not None and process.pid in seen.servers,
                    started_at=_instant(who.started_at) if who else None,
                    container=who.container if who else None,
                )
            )
        return views


def _state(gpu: GpuMemory) -> GpuState:
    if gpu.reading.fault is Fault.LOST:
        return "lost"
    if gpu.reading.divided:
        return "divided"
    if gpu.reading.fault is not None or gpu.headroom is None:
        return "unreadable"
    return "drained" if gpu.drained is not None else "available"


def report_view(uses: Sequence[Use], since: datetime | None) -> ReportView:
    """Return what users asked for and used as a wire object."""
    return ReportView(_instant(since), [UseView(*astuple(use)) for use in uses])


def _instant(at: datetime | None) -> str | None:
    if at is None:
        return None
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
