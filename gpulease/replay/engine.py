"""Runs a trace through the daemon's `plan` on a virtual clock, with its placement policies."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from gpulease.domain.choice import PlannedGpu, Score, best_fit
from gpulease.domain.gpu import GpuMemory, GpuReading, GpuUuid, JobId, LedgerEntry
from gpulease.domain.job import Job, JobUsage, Owner, grant, worker_started
from gpulease.domain.lease import Claim
from gpulease.domain.past_jobs import HALF_LIFE, Keys, PastUse, RunTimes
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Plan, plan
from gpulease.domain.queue import Queue, gpus_leased
from gpulease.domain.queue_options import QueuePolicy
from gpulease.domain.snapshot import Snapshot
from gpulease.replay.trace import Run, Server, TraceJob


class Contention(StrEnum):
    """How much jobs that share a GPU slow each other down.

    The speed of a job depends on the busiest of its GPUs. With n jobs there, it is:
    """

    NONE = "none"
    """1."""
    PAIRS = "pairs"
    """0.929 to the power of n - 1, as measured for pairs of training jobs. Where utilizations are
    known: 0.97 over their sum, at most 1."""
    CURVE = "curve"
    """0.96 over the sum of utilizations to the power of 0.45, at most 1: a fit of the 1,388 pairs
    that Lucid (ASPLOS 2023) measured. Where utilizations are unknown, the same as `pairs`."""
    SLICES = "slices"
    """1 / n, the worst case. Where utilizations are known, 1 over their sum, at most 1."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of a replay: what was known, and what was decided."""

    at_s: float
    snapshot: Snapshot
    plan: Plan


def replay(
    trace: Sequence[TraceJob],
    servers: Sequence[Server],
    policy: QueuePolicy,
    *,
    whole_gpus: bool = False,
    contention: Contention = Contention.NONE,
    placement: Score = best_fit,
    observe: Callable[[Moment], None] | None = None,
) -> list[Run]:
    """Return when and where each job of `trace` ran, in the order of the trace.

    Args:
        trace: the jobs, in any order.
        servers: a job runs on GPUs of one of them.
        policy: the settings of the queue.
        whole_gpus: every job gets whole GPUs, whatever memory it asks for.
        contention: how much jobs on a GPU slow each other down.
        placement: the score of a GPU for a claim; the highest wins.
        observe: called after each decision.
    """
    return _Replay(trace, servers, policy, whole_gpus, contention, placement, observe).run()


_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""The beginning of every trace on the virtual clock."""
_WAITS = 300
"""Recent waits that the usual wait is taken from."""


@dataclass(slots=True)
class _Active:
    """A job that runs."""

    source: TraceJob
    job: Job
    keys: Keys
    start_s: float
    gpus: tuple[GpuUuid, ...]
    left_s: float
    """Work that is left, in seconds at full speed, as of `since_s`."""
    since_s: float
    speed: float = 1.0
    version: int = 0
    """Events of former versions are void."""


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        trace: Sequence[TraceJob],
        servers: Sequence[Server],
        policy: QueuePolicy,
        whole_gpus: bool,
        contention: Contention,
        placement: Score,
        observe: Callable[[Moment], None] | None,
    ) -> None:
        self.trace = trace
        # A GPU's utilization is that of its jobs at once.
        self.policy = replace(policy, settling_time=timedelta(0))
        self.whole_gpus = whole_gpus
        self.contention = contention
        self.placement = placement
        self.observe = observe
        self.ledgers = _ledgers(servers)
        self.places = {
            uuid: (server, index)
            for server, each in enumerate(servers)
            for index, uuid in enumerate(_uuids(server, each))
        }
        self.size = max((server.memory for server in servers), default=0)
        self.queue = Queue(self.size)
        self.history = RunTimes(policy.run_time_samples)
        self.use = PastUse(HALF_LIFE.total_seconds())
        self.waits: deque[float] = deque(maxlen=_WAITS)
        self.sources = {job.id: job for job in trace}
        self.active: dict[JobId, _Active] = {}
        self.holders: dict[GpuUuid, list[_Active]] = {uuid: [] for uuid in self.ledgers}
        self.events: list[tuple[float, int, int, JobId]] = []
        """(when, kind, version, job)."""
        self.runs: dict[int, Run] = {}

    def run(self) -> list[Run]:
        for job in self.trace:
            heapq.heappush(self.events, (job.submit_s, _ARRIVAL, 0, JobId(job.id)))
        while self.events:
            now_s = self.events[0][0]
            changed = False
            while self.events and self.events[0][0] <= now_s:
                _, kind, version, job_id = heapq.heappop(self.events)
                active = self.active.get(job_id)
                if kind == _ARRIVAL:
                    self.queue.add(self._submitted(self.sources[job_id]))
                    changed = True
                elif kind == _RETHINK:
                    changed |= job_id in self.queue.jobs
                elif active is not None and active.version == version:
                    self._end(active, now_s)
                    changed = True
            if changed:
                self._decide(now_s)
        return [self.runs[job.id] for job in self.trace]

    def _submitted(self, source: TraceJob) -> Job:
        limit = source.time_limit_s
        claim = Claim(
            source.memory,
            source.gpus,
            exclusive=self.whole_gpus,
            time_limit=None if limit is None else timedelta(seconds=limit),
        )
        return Job(
            JobId(source.id),
            Owner(0, 0, source.user),
            "",
            "",
            claim,
            _at(source.submit_s),
            usage=JobUsage(source.command),
        )

    def _end(self, active: _Active, now_s: float) -> None:
        source = active.source
        del self.active[active.job.id]
        self.queue.remove(active.job.id)
        for uuid in active.gpus:
            self.holders[uuid].remove(active)
            self._fill(uuid)
        self.history.record(active.keys, now_s - active.start_s, source.utilization)
        rate = gpus_leased(active.job, self.queue.capacity)
        self.use.add(source.user, rate, _at(active.start_s).timestamp(), _at(now_s).timestamp())
        server = self.places[active.gpus[0]][0]
        indices = tuple(self.places[uuid][1] for uuid in active.gpus)
        self.runs[source.id] = Run(source, active.start_s, now_s, server, indices)
        self._pace(active.gpus, now_s)

    def _decide(self, now_s: float) -> None:
        jobs = [active.job for active in self.active.values()]
        if self.observe is not None:
            # A plan needs only the index of those that wait; what explains it needs all.
            jobs += self.queue.jobs.values()
        waits = sorted(self.waits)
        snapshot = Snapshot(
            jobs,
            (),
            _at(now_s),
            queue=self.queue,
            history=self.history,
            use=self.use,
            usual_wait_s=waits[int(0.9 * len(waits))] if waits else 0.0,
            policy=self.policy,
            gpus=tuple(self.ledgers.values()),
        )
        decided = plan(snapshot, self.placement)
        if self.observe is not None:
            self.observe(Moment(now_s, snapshot, decided))
        for job_id, placement in decided.grants:
            self._start(self.queue.jobs[job_id], placement, now_s)
        for job_id in decided.aging:
            job = self.queue.jobs[job_id]
            aged = replace(job, queue=replace(job.queue, aging_since_at=_at(now_s)))
            self.queue.add(aged)
            due = self.queue.need(aged).due_after_s(self.history, self.policy)
            for after in (due, self.policy.hard_reservation_after.total_seconds()):
                self._schedule(now_s + after, _RETHINK, 0, job_id)

    def _schedule(self, at_s: float, kind: int, version: int, job_id: JobId) -> None:
        heapq.heappush(self.events, (at_s, kind, version, job_id))

    def _start(self, job: Job, placement: Placement, now_s: float) -> None:
        source = self.sources[job.id]
        started = worker_started(grant(job, placement, _at(now_s)), None, None, _at(now_s))
        assert started is not None
        self.waits.append(now_s - source.submit_s)
        self.queue.add(started)
        gpus = tuple(uuid for uuid, _ in placement.allocations)
        keys = self.queue.need_of(job).keys
        active = _Active(source, started, keys, now_s, gpus, source.duration_s, now_s)
        self.active[job.id] = active
        for uuid in gpus:
            self.holders[uuid].append(active)
            self._fill(uuid)
        self._schedule_end(active, now_s)
        self._pace(gpus, now_s)

    def _schedule_end(self, active: _Active, now_s: float) -> None:
        active.version += 1
        end = now_s + active.left_s / active.speed
        limit = active.source.time_limit_s
        if limit is not None:
            end = min(end, max(now_s, active.start_s + limit))
        self._schedule(end, _END, active.version, active.job.id)

    def _fill(self, uuid: GpuUuid) -> None:
        """Write the ledger of one GPU."""
        entries = tuple(
            LedgerEntry(each.job.id, lease.memory, self.whole_gpus, running=True)
            for each in self.holders[uuid]
            for lease in each.job.leases
            if lease.gpu == uuid
        )
        ledger = self.ledgers[uuid]
        known = [each.source.utilization for each in self.holders[uuid]]
        busy = None if None in known else min(100, round(100 * sum(each or 0 for each in known)))
        reading = replace(ledger.reading, utilization=busy)
        self.ledgers[uuid] = replace(ledger, reading=reading, entries=entries)

    def _pace(self, gpus: Sequence[GpuUuid], now_s: float) -> None:
        """Adapt the speed of the jobs on these GPUs to each other."""
        if self.contention is Contention.NONE:
            return
        beside = {each.job.id: each for uuid in gpus for each in self.holders[uuid]}
        for active in beside.values():
            speed = min(self._speed(uuid) for uuid in active.gpus)
            if speed != active.speed:
                active.left_s -= (now_s - active.since_s) * active.speed
                active.since_s, active.speed = now_s, speed
                self._schedule_end(active, now_s)

    def _speed(self, uuid: GpuUuid) -> float:
        """Return the speed of the jobs on a GPU, 1 for that of a job alone."""
        holders = self.holders[uuid]
        if len(holders) < 2:
            return 1.0
        known = [each.source.utilization for each in holders]
        load = None if None in known else max(_LEAST_LOAD, sum(each or 0 for each in known))
        match self.contention:
            case Contention.SLICES:
                return 1.0 / len(holders) if load is None else min(1.0, 1.0 / load)
            case Contention.CURVE if load is not None:
                return min(1.0, 0.96 / math.pow(load, 0.45))
            case _ if load is not None:
                return min(1.0, 0.97 / load)
            case _:
                return 0.929 ** (len(holders) - 1)


_LEAST_LOAD = 0.01
_ARRIVAL, _END, _RETHINK = range(3)


def _at(seconds: float) -> datetime:
    return _EPOCH + timedelta(seconds=seconds)


def _uuids(number: int, server: Server) -> list[GpuUuid]:
    return [GpuUuid(f"{number}-{index}") for index in range(server.gpus)]


def _ledgers(servers: Sequence[Server]) -> dict[GpuUuid, GpuMemory]:
    """Return the empty ledgers of all GPUs."""
    return {
        uuid: GpuMemory(
            GpuReading(uuid, index, "", server.memory, 0, 0, (), server=f"{number:06}"),
            server.memory,
            0,
        )
        for number, server in enumerate(servers)
        for index, uuid in enumerate(_uuids(number, server))
    }


def spread(claim: Claim, gpu: PlannedGpu) -> float:
    """Prefer the GPU with the most headroom left."""
    return -best_fit(claim, gpu)


PLACEMENTS: Mapping[str, Score] = {"best": best_fit, "spread": spread}
