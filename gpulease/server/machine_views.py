"""The machine as the wire object that users see: GPUs, the processes on them, enforcement."""

import socket
from collections.abc import Collection, Hashable, Mapping, Sequence
from datetime import datetime, timedelta

from gpulease import __version__
from gpulease.domain.calendar import Occurrence
from gpulease.domain.gpu import (
    ComputeMode,
    Fault,
    GpuMemory,
    GpuReading,
    GpuUuid,
    JobId,
    ProcessReading,
)
from gpulease.domain.host_memory import DEFAULT_HOST_POLICY, HostMemory
from gpulease.domain.job import Job
from gpulease.domain.queue_options import QueuePause
from gpulease.domain.snapshot import ledgers
from gpulease.errors import RecordUnwritable
from gpulease.peer_credentials import user_name
from gpulease.server.reasons import label_of
from gpulease.server.view_sources import Recent, ViewSources, instant
from gpulease.service.observation import Observation, snapshot
from gpulease.service.ports import Clock, ProcessFinder, ProcessIdentity
from gpulease.service.queue_state import FindWindows
from gpulease.service.scheduler import Scheduler
from gpulease.service.slurm_gpus import gpus_of_slurm
from gpulease.wire.machine import (
    GpuEventView,
    GpuState,
    GpuTopologyView,
    GpuView,
    LinkView,
    MemoryView,
    NeighbourView,
    PauseView,
    ProcessView,
    ResourcesView,
    StatusView,
    TopologyView,
    WindowView,
)

_EVENTS_FOR = timedelta(days=1)
_MOST_EVENTS = 200
"""Newest health events, of all GPUs together."""
_IDENTITY_FOR = timedelta(seconds=10)
"""A process may change its title and its user at any time; a new program is seen at once."""


class MachineViews:
    """Draws the machine from the latest plan and observation of the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        processes: ProcessFinder,
        sources: ViewSources,
        windows: FindWindows,
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._windows = windows
        self._identities: Recent[tuple[int, Hashable], ProcessIdentity | None] = Recent(
            lambda process: processes.identify(process[0]), clock, _IDENTITY_FOR
        )
        self._sources = sources

    def live(self) -> Sequence[Job]:
        """Return the jobs that wait or hold memory."""
        return self._scheduler.store.live()

    def holding(self) -> Sequence[Job]:
        """Return the jobs that hold memory."""
        return self._scheduler.store.holding()

    def status(self, holding: Sequence[Job], now: datetime) -> StatusView:
        """Return the status of the machine, without the jobs; `holding` are those with leases."""
        self._identities.begin()
        seen = self._scheduler.seen
        gpus = self._ledgers(holding, seen, now) if seen is not None else ()
        return StatusView(
            host=socket.gethostname(),
            driver=self._sources.driver(),
            version=__version__,
            simulated=self._sources.simulated,
            at=instant(now) or "",
            gpus=self._gpus(gpus, seen, now),
            jobs=[],
            enforcement=self._sources.enforcement.views(),
            paused=pause_view(self._scheduler.store.pause()),
            closed=self._scheduler.closed or self._scheduler.store.trouble(),
            windows=self.windows(now),
            resources=None if seen is None else self._resources(holding, seen),
        )

    def _resources(self, holding: Sequence[Job], seen: Observation) -> ResourcesView | None:
        policy = self._scheduler.policy.host
        leasing = [job for job in holding if job.claim.leases_host]
        if seen.host is None or not (leasing or policy != DEFAULT_HOST_POLICY):
            return None
        left = HostMemory.of(seen.host, policy, leasing)
        return ResourcesView(
            ram=policy.ram_of(seen.host),
            ram_leased=sum(job.claim.ram or 0 for job in leasing),
            ram_used_by_others=seen.host.used_by_others,
            ram_free=None if left.ram is None else max(0, left.ram),
            cores=policy.cores_of(seen.host),
            cores_leased=sum(job.claim.cpus or 0 for job in leasing),
            cores_free=max(0, left.cores),
        )

    def topology(self) -> TopologyView:
        """Return the GPUs and the links between them; MIG devices have none."""
        seen = self._scheduler.seen
        return TopologyView(
            [
                GpuTopologyView(
                    uuid=gpu.uuid,
                    label=gpu.label,
                    name=gpu.name,
                    numa_node=gpu.numa_node,
                    cpus=gpu.cpus,
                    links=[LinkView(each.gpu, each.nvlinks, each.path) for each in gpu.links],
                )
                for gpu in (() if seen is None else seen.readings)
                if gpu.parent is None
            ]
        )

    def windows(self, now: datetime) -> list[WindowView]:
        """Return the windows; without them if the database cannot be read."""
        try:
            if not self._scheduler.store.windows():
                return []
            # By uid: an owner is compared by several fields, and a queue is long.
            owners = {job.owner.uid: job.owner for job in self.live()}
            found = self._windows(now, owners.values())
        except RecordUnwritable:
            return []
        plan = self._scheduler.plan
        gpus = {} if plan is None else plan.calendar.gpus
        in_order = sorted(found, key=lambda each: (each.begins_at, each.window.id))
        return [self.window(each, now, gpus.get(each.window.id, ())) for each in in_order]

    def window(
        self, occurrence: Occurrence, now: datetime, chosen: Sequence[GpuUuid] = ()
    ) -> WindowView:
        """Return a window; `chosen` are its GPUs if it names none."""
        window, is_on = occurrence.window, occurrence.is_on(now)
        on = window.uuids or chosen
        readings = () if self._scheduler.seen is None else self._scheduler.seen.readings
        labels = {reading.uuid: reading.label for reading in readings}
        return WindowView(
            id=window.id,
            name=window.name,
            users=list(window.users),
            groups=list(window.groups),
            gpus=window.gpus,
            on=list(on),
            labels=[labels.get(uuid, uuid) for uuid in on],
            named=bool(window.uuids),
            is_on=is_on,
            begins_at=instant(occurrence.begins_at) or "",
            ends_at=instant(occurrence.ends_at) or "",
            lasts_for=window.lasts_for.total_seconds(),
            cron=window.cron,
            created_by=window.created_by,
            created_at=instant(window.created_at) or "",
            lifts_limits=window.lifts_limits,
            other_jobs=_other_jobs(occurrence, on, self.holding()) if is_on else [],
        )

    def allocatable(self) -> Mapping[GpuUuid, int]:
        """Return the bytes that can be leased on each GPU, as of the latest observation."""
        seen = self._scheduler.seen
        gpus = () if seen is None else self._ledgers((), seen, seen.at)
        return {gpu.uuid: gpu.allocatable for gpu in gpus if gpu.allocatable is not None}

    def _ledgers(
        self, live: Sequence[Job], seen: Observation, now: datetime
    ) -> tuple[GpuMemory, ...]:
        drained = self._scheduler.store.drained()
        return ledgers(snapshot(live, seen, self._scheduler.policy, drained, now))

    def _gpus(
        self, gpus: Sequence[GpuMemory], seen: Observation | None, now: datetime
    ) -> list[GpuView]:
        try:
            events = self._scheduler.store.gpu_events(now - _EVENTS_FOR, _MOST_EVENTS)
        except RecordUnwritable:
            events = ()  # a status without them is better than none
        by_gpu: dict[GpuUuid, list[GpuEventView]] = {}
        for each in events:
            view = GpuEventView(instant(each.at) or "", each.kind, each.detail, each.count)
            by_gpu.setdefault(each.gpu, []).append(view)
        jobs_by_pid = seen.jobs_by_pid if seen is not None else {}
        slurm = self._scheduler.policy.slurm
        assigned = () if slurm is None else gpus_of_slurm([gpu.reading for gpu in gpus], slurm)
        of_slurm = {reading.uuid for reading in assigned}
        return [self._gpu(gpu, jobs_by_pid, by_gpu.get(gpu.uuid, []), of_slurm) for gpu in gpus]

    def _gpu(
        self,
        gpu: GpuMemory,
        jobs_by_pid: Mapping[int, JobId],
        events: list[GpuEventView],
        of_slurm: Collection[GpuUuid],
    ) -> GpuView:
        reading = gpu.reading
        plan = self._scheduler.plan
        kept_for = None if plan is None else plan.reserved.get(gpu.uuid)
        return GpuView(
            index=gpu.index,
            uuid=gpu.uuid,
            name=reading.name,
            state=_state(gpu),
            detail="; ".join(filter(None, (reading.detail, gpu.mode_restriction, gpu.drained)))
            or None,
            memory=MemoryView(
                total=reading.total,
                used=reading.used,
                reserved=reading.reserved,
                allocatable=gpu.allocatable,
                leased=gpu.leased,
                committed=gpu.committed,
                unmanaged=gpu.unmanaged,
                # On a drained GPU nothing can be leased now.
                headroom=0 if gpu.drained is not None and gpu.headroom else gpu.headroom,
            ),
            utilization=reading.utilization,
            temperature=reading.temperature,
            processes=self._process_views(reading, jobs_by_pid),
            kept_for=kept_for,
            kept_for_label=None if kept_for is None else label_of(self._scheduler.store, kept_for),
            events=events,
            label=reading.label,
            parent=reading.parent,
            compute_mode=reading.compute_mode if reading.fault is None else None,
            slurm=gpu.uuid in of_slurm,
            power=reading.power,
            power_limit=reading.power_limit,
            neighbours=[
                NeighbourView(user_name(each.uid), each.memory, each.unused(reading.processes))
                for each in reading.neighbours
            ],
        )

    def _process_views(
        self, reading: GpuReading, jobs_by_pid: Mapping[int, JobId]
    ) -> list[ProcessView]:
        views, seen = [], self._scheduler.seen
        for process in reading.processes or ():
            # With foreign pids, as of another pid namespace, this pid is another process here.
            foreign = seen is not None and seen.foreign
            program = None if seen is None else seen.programs.get(process.pid)
            who = None if foreign else self._identities.of((process.pid, program))
            views.append(
                ProcessView(
                    pid=process.pid,
                    user=who.user if who else None,
                    name=who.name if who else None,
                    command=who.command if who else None,
                    memory=process.memory,
                    job=jobs_by_pid.get(process.pid),
                    serves=seen is not None and process.pid in seen.servers,
                    started_at=instant(who.started_at) if who else None,
                    container=who.container if who else None,
                    utilization=_utilization_of(process, reading),
                )
            )
        return views


def pause_view(pause: QueuePause | None) -> PauseView | None:
    """Return a pause of the queue as a wire object."""
    return None if pause is None else PauseView(pause.by, pause.why, instant(pause.at) or "")


def _utilization_of(process: ProcessReading, reading: GpuReading) -> int | None:
    """Return the part of a GPU's utilization that a process causes, if it is known."""
    # For a process alone on its GPU, or on an idle one, the driver is not asked.
    is_known = not reading.utilization or len(reading.processes or ()) == 1
    return reading.utilization if is_known else process.utilization


def _state(gpu: GpuMemory) -> GpuState:
    if gpu.reading.fault is Fault.LOST:
        return "lost"
    if gpu.reading.mig_mode:
        return "divided"
    if gpu.reading.fault is not None or gpu.headroom is None:
        return "unreadable"
    if gpu.reading.compute_mode is ComputeMode.PROHIBITED:
        return "prohibited"
    return "drained" if gpu.drained is not None else "available"


def _other_jobs(occurrence: Occurrence, on: Sequence[GpuUuid], jobs: Sequence[Job]) -> list[int]:
    return [
        job.id
        for job in jobs
        if job.owner.user not in occurrence.admits and any(lease.gpu in on for lease in job.leases)
    ]
