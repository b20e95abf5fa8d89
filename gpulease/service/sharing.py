"""Leases of personal daemons of several users on the same GPUs, without a common queue.

Each daemon announces what it leases. Before it grants, it announces the new leases too, then reads
what the others announce, and takes the grants back if that has grown since its plan was made.
Of two daemons that want the same memory at once, at least one sees the other.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpulease.domain.gpu import GpuReading, GpuUuid, JobId, NeighbourLease, ProcessReading
from gpulease.domain.job import Job
from gpulease.domain.placement import Placement
from gpulease.service.ports import Neighbours, Store


class Sharing:
    """Announces this daemon's leases, and grants only what others have not announced before.

    Its methods may be called by the threads of the readings and of the writer at the same time.
    """

    def __init__(self, neighbours: Neighbours, store: Store, uid: int) -> None:
        self._neighbours = neighbours
        self._store = store
        self._uid = uid
        self._lock = threading.Lock()
        self._wanted: Mapping[GpuUuid, int] = {}
        self._pids: Mapping[GpuUuid, frozenset[int]] = {}
        self._sizes: Mapping[GpuUuid, int] = {}

    def joined(
        self,
        readings: Sequence[GpuReading],
        processes: Mapping[tuple[JobId, GpuUuid], Sequence[ProcessReading]],
    ) -> tuple[GpuReading, ...]:
        """Announce what is leased, and return the readings with the leases of others in them.

        `processes` are those of each job on each GPU.
        """
        pids: dict[GpuUuid, frozenset[int]] = {}
        for (_, gpu), found in processes.items():
            pids[gpu] = pids.get(gpu, frozenset()).union(each.pid for each in found)
        with self._lock:
            self._pids = pids
            self._sizes = {each.uuid: each.total or 0 for each in readings}
            self._announce()
        others = self._others()
        return tuple(replace(each, neighbours=others.get(each.uuid, ())) for each in readings)

    def admits(
        self,
        grants: Iterable[tuple[Job, Placement]],
        planned: Mapping[GpuUuid, GpuReading],
    ) -> bool:
        """Announce leases that are about to be granted, and say whether they still fit.

        `planned` are the readings that the plan was made with. `settle` has to follow.
        """
        wanted: dict[GpuUuid, int] = {}
        for job, placement in grants:
            for gpu, memory in placement.allocations:
                wanted[gpu] = wanted.get(gpu, 0) + self._shown(job, gpu, memory)
        with self._lock:
            self._wanted = wanted
            self._announce()
        others = self._others()
        return all(
            replace(planned[gpu], neighbours=others.get(gpu, ())).leased_elsewhere
            <= planned[gpu].leased_elsewhere
            for gpu in wanted
        )

    def settle(self) -> None:
        """Announce what is leased now: the grants were committed, or taken back."""
        with self._lock:
            self._wanted = {}
            self._announce()

    def _announce(self) -> None:
        leased = dict(self._wanted)
        for job in self._store.holding():
            for lease in job.leases:
                memory = self._shown(job, lease.gpu, lease.memory)
                leased[lease.gpu] = leased.get(lease.gpu, 0) + memory
        self._neighbours.announce(
            tuple(
                NeighbourLease(self._uid, gpu, memory, self._pids.get(gpu, frozenset()))
                for gpu, memory in sorted(leased.items())
            )
        )

    def _shown(self, job: Job, gpu: GpuUuid, memory: int) -> int:
        """Return the bytes that others have to leave free for a lease: all, if it is exclusive."""
        return max(memory, self._sizes.get(gpu, 0)) if job.claim.exclusive else memory

    def _others(self) -> Mapping[GpuUuid, tuple[NeighbourLease, ...]]:
        found: dict[GpuUuid, tuple[NeighbourLease, ...]] = {}
        for each in self._neighbours.leases():
            found[each.gpu] = (*found.get(each.gpu, ()), each)
        return found
