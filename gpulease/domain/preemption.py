"""Which preemptible jobs make way for jobs that do not fit, so that the least work is lost.

Work of a higher priority class counts above all work of a lower one. What a job loses is its run
time so far, and the time that every restart takes. The memory that jobs free is promised to the
job that they make way for: each planning pass keeps the promises of the one before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpulease.domain.choice import PlannedGpu, Score, choose, fits, suffice, together
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.host_memory import HostMemory
from gpulease.domain.job import Outcome
from gpulease.domain.lease import Claim
from gpulease.domain.past_jobs import RunTimes
from gpulease.domain.queue import Holding
from gpulease.domain.queue_options import Priority, QueuePolicy

_RANKS = 2 * len(Priority)
"""Of priority classes; those of preemptible jobs are the second half."""
RESTART_S = 60.0
"""What a restart costs besides the lost work: of two ways, the one with fewer jobs is better."""
_MOST_TRIED = 20
"""Claims without a way after which a pass looks for no more."""


@dataclass(frozen=True, slots=True)
class Preemptible:
    """A running job that makes way for others."""

    job: JobId
    rank: int
    """Of its priority class; the job with the lowest rank makes way last."""
    ran_s: float
    memory: Mapping[GpuUuid, int]
    """The bytes that it leases, by GPU."""
    claim: Claim
    utilization: float = 0.0

    @property
    def loss(self) -> float:
        """The GPU-seconds that are lost when it makes way."""
        return (self.ran_s + RESTART_S) * len(self.memory)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A claim that does not fit."""

    claim: Claim
    utilization: float
    policy: QueuePolicy
    score: Score
    host: HostMemory | None = None
    """What the server has free, for a claim that leases some of it."""

    @property
    def lacks_host(self) -> bool:
        """Whether the server has too little for it."""
        return self.host is not None and not self.host.fits(self.claim)

    def after(self, gone: Iterable[Preemptible]) -> "Wanted":
        """Return it as it is on the server after these jobs have ended."""
        if self.host is None:
            return self
        left = self.host.copy()
        for each in gone:
            left.release(each.claim)
        return replace(self, host=left)

    def choose(self, gpus: Iterable[PlannedGpu]) -> list[PlannedGpu] | None:
        """Return the GPUs where the claim fits; None if it does not."""
        return choose(self.claim, self._able(gpus), self.score)

    def fits(self, gpus: Iterable[PlannedGpu]) -> bool:
        """Tell whether the claim fits, on the server too."""
        return not self.lacks_host and suffice(self.claim, self._able(gpus))

    def _able(self, gpus: Iterable[PlannedGpu]) -> list[PlannedGpu]:
        return [
            gpu
            for gpu in gpus
            if fits(self.claim, gpu) and gpu.shares(self.utilization, self.policy)
        ]


def who_makes_way(
    wanted: Wanted, gpus: Sequence[PlannedGpu], running: Iterable[Preemptible]
) -> tuple[Preemptible, ...] | None:
    """Return the jobs without which a claim fits, none of them in excess; None if that is no help.

    The best choice takes time exponential in the number of jobs. This is the best of some good
    ones: on each GPU, the cheapest jobs first, and the largest first.
    """
    running = tuple(running)
    sets = together(wanted.claim, gpus)
    parts = [[gpu] for each in sets for gpu in each] if wanted.claim.gpus == 1 else sets
    ways = []
    for part in parts:
        uuids = {gpu.uuid for gpu in part}
        on_it = [
            job
            for job in running
            if uuids & job.memory.keys() or (wanted.lacks_host and job.claim.leases_host)
        ]
        for order in (_by_loss, _by_size):
            way = _way(wanted, part, sorted(on_it, key=order))
            if way is not None:
                ways.append(way)
    return min(ways, key=_cost, default=None)


def without(gpus: Iterable[PlannedGpu], gone: Iterable[Preemptible]) -> list[PlannedGpu]:
    """Return copies of `gpus` after these jobs have ended."""
    left = {gpu.uuid: gpu.copy() for gpu in gpus}
    for each in gone:
        _release(left, each)
    return list(left.values())


def _release(gpus: Mapping[GpuUuid, PlannedGpu], gone: Preemptible) -> None:
    for uuid, memory in gone.memory.items():
        if uuid in gpus:
            gpus[uuid].release(gone.claim, memory, gone.utilization)


def _way(
    wanted: Wanted, gpus: Sequence[PlannedGpu], in_order: Sequence[Preemptible]
) -> tuple[Preemptible, ...] | None:
    """Return the first of the jobs that are enough, without those that are not needed."""
    if not wanted.after(in_order).fits(without(gpus, in_order)):
        return None
    left = {gpu.uuid: gpu.copy() for gpu in gpus}
    going: list[Preemptible] = []
    for each in in_order:
        if wanted.after(going).fits(left.values()):
            break
        _release(left, each)
        going.append(each)
    for each in sorted(going, key=_by_loss, reverse=True):
        others = [other for other in going if other is not each]
        if wanted.after(others).fits(without(gpus, others)):
            going = others
    return tuple(going)


def _by_loss(job: Preemptible) -> tuple[int, float, JobId]:
    return -job.rank, job.loss, job.job


def _by_size(job: Preemptible) -> tuple[int, float, JobId]:
    return -job.rank, -sum(job.memory.values()), job.job


def _cost(way: Sequence[Preemptible]) -> tuple[float, ...]:
    """Return the loss in each priority class, the highest class first."""
    return tuple(sum(each.loss for each in way if each.rank == rank) for rank in range(_RANKS))


class MakingWay:
    """The jobs that make way in one planning pass, and what is kept for others meanwhile."""

    def __init__(
        self, holding: Iterable[Holding], history: RunTimes, policy: QueuePolicy, now_s: float
    ) -> None:
        self.promised: dict[JobId, frozenset[GpuUuid]] = {}
        """The jobs that others make way for, and the GPUs whose memory is kept for them."""
        self.preempts: dict[JobId, JobId] = {}
        """The jobs that have to make way, and for which job each one does."""
        spare = [held for held in holding if held.need.preemptible]

        def those_with(outcome: Outcome | None) -> dict[JobId, Preemptible]:
            return {
                held.job.id: _preemptible(held, history, policy, now_s)
                for held in spare
                if held.job.outcome is outcome
            }

        self._going = those_with(Outcome.PREEMPTED)
        self._running = those_with(None)
        self._no_way: set[tuple[Claim, frozenset[GpuUuid]]] = set()

    @property
    def is_possible(self) -> bool:
        """Whether a job can make way, or does, and it is worth looking for a way."""
        return bool(self._running or self._going) and len(self._no_way) < _MOST_TRIED

    def find_way(
        self, job: JobId, wanted: Wanted, gpus: Sequence[PlannedGpu], able: Sequence[PlannedGpu]
    ) -> bool:
        """Have jobs make way for a job that does not fit; return whether it fits then.

        Args:
            job: the job.
            wanted: what it needs.
            gpus: all GPUs, as they are while no job has gone.
            able: those that the job may use.
        """
        tried = wanted.claim, frozenset(gpu.uuid for gpu in able)
        if tried in self._no_way:
            return False
        going = self._going.values()
        later = without(able, going)
        way = who_makes_way(wanted.after(going), later, self._running.values())
        if way is None:
            self._no_way.add(tried)
            return False
        for each in way:
            self._going[each.job] = self._running.pop(each.job)
            self.preempts[each.job] = job
        return self.keep_for(job, wanted, gpus, able)

    def keep_for(
        self, job: JobId, wanted: Wanted, gpus: Iterable[PlannedGpu], able: Iterable[PlannedGpu]
    ) -> bool:
        """Take from `gpus` what a job needs of `able` when the others have gone, if it fits then.

        The arguments are those of `find_way`.
        """
        chosen = wanted.choose(without(able, self._going.values()))
        if chosen is None:
            return False
        kept = self.promised[job] = frozenset(gpu.uuid for gpu in chosen)
        for gpu in gpus:
            if gpu.uuid in kept:
                gpu.take(wanted.claim, wanted.utilization)
        return True


def _preemptible(
    held: Holding, history: RunTimes, policy: QueuePolicy, now_s: float
) -> Preemptible:
    return Preemptible(
        held.job.id,
        held.need.rank,
        max(0.0, now_s - held.start_s),
        {lease.gpu: lease.memory for lease in held.job.leases},
        held.job.claim,
        held.need.utilization(history),
    )
