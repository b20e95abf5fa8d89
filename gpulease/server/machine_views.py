"""What is shown of the machine: its GPUs, the processes on them, and what holds jobs there."""

import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from gpulease import __version__
from gpulease.domain.gpu import ComputeMode, Fault, GpuMemory, GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.plan import ledgers
from gpulease.errors import RecordUnwritable
from gpulease.server.lease_views import Machine, instant
from gpulease.service.observation import Observation, snapshot
from gpulease.service.ports import ProcessFinder
from gpulease.service.scheduler import Scheduler
from gpulease.wire.views import GpuEventView, GpuState, GpuView, MemoryView, ProcessView, StatusView

_TOLD_FOR = timedelta(days=1)
_MOST_EVENTS = 200
"""Of the health of all GPUs, the newest."""


class MachineViews:
    """Draws the machine from the keeper's latest plan and look."""

    def __init__(self, keeper: Scheduler, processes: ProcessFinder, machine: Machine) -> None:
        self._keeper = keeper
        self._processes = processes
        self._machine = machine

    def status(self, live: Sequence[Job], now: datetime) -> StatusView:
        """Return one look at the whole machine, without the jobs."""
        seen = self._keeper.seen
        gpus = self._ledgers(live, seen, now) if seen is not None else ()
        return StatusView(
            host=socket.gethostname(),
            driver=self._machine.driver(),
            version=__version__,
            simulated=self._machine.simulated,
            at=instant(now) or "",
            gpus=self._gpus(gpus, seen, now),
            jobs=[],
            enforcement=self._machine.holds.rungs(),
        )

    def allocatable(self) -> Mapping[GpuUuid, int]:
        """Return the bytes that each GPU has to lease, as of the latest look."""
        seen = self._keeper.seen
        gpus = () if seen is None else self._ledgers((), seen, seen.at)
        return {gpu.uuid: gpu.allocatable for gpu in gpus if gpu.allocatable is not None}

    def _ledgers(
        self, live: Sequence[Job], seen: Observation, now: datetime
    ) -> tuple[GpuMemory, ...]:
        drained = self._keeper.store.drained()
        return ledgers(snapshot(live, seen, self._keeper.policy, drained, now))

    def _gpus(
        self, gpus: Sequence[GpuMemory], seen: Observation | None, now: datetime
    ) -> list[GpuView]:
        try:
            told = self._keeper.store.gpu_events(now - _TOLD_FOR, _MOST_EVENTS)
        except RecordUnwritable:
            # There is still a status to be shown.
            told = ()
        by_gpu: dict[GpuUuid, list[GpuEventView]] = {}
        for each in told:
            view = GpuEventView(instant(each.at) or "", each.kind, each.detail, each.count)
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
                headroom=_to_lease(gpu),
            ),
            utilization=reading.utilization,
            temperature=reading.temperature,
            processes=self._process_views(reading, jobs_by_pid),
            kept_for=self._keeper.plan.reserved.get(gpu.uuid) if self._keeper.plan else None,
            events=events,
            label=reading.label,
            parent=reading.parent,
            compute_mode=reading.compute_mode if reading.fault is None else None,
        )

    def _process_views(
        self, reading: GpuReading, jobs_by_pid: Mapping[int, JobId]
    ) -> list[ProcessView]:
        views, seen = [], self._keeper.seen
        for process in reading.processes or ():
            # Another machine's, or the host's: whoever has that pid here is somebody else.
            foreign = seen is not None and seen.foreign
            who = None if foreign else self._processes.identify(process.pid)
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
                )
            )
        return views


def _to_lease(gpu: GpuMemory) -> int | None:
    """Return what can be leased now: of a GPU that grants nothing, nothing."""
    return gpu.headroom if gpu.drained is None or gpu.headroom is None else 0


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
