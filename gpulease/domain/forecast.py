"""Forward runs of the queue: when waiting jobs start if run times are as predicted.

A run repeats the daemon's own planning pass at each predicted end of a job. It is a prediction:
jobs that are submitted later, end earlier or run longer change it. So the answer is a range over
two runs: in one, jobs end after the median of their past run times, in the other after the mean.
The means are far above the medians, since a few jobs run for days. Most jobs end by the medians,
and a long backlog by the means.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice

from gpulease.domain.backfill import expected_end, grace_to_make_way
from gpulease.domain.eligibility import BlockKind, blocks
from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.job import Job, Outcome, aging, asked_to_end
from gpulease.domain.lease import State, Trigger
from gpulease.domain.limits import RecentUse
from gpulease.domain.past_jobs import RunTimes
from gpulease.domain.placement import Placement, granted
from gpulease.domain.plan import Plan, plan, started
from gpulease.domain.queue import Queue
from gpulease.domain.snapshot import Snapshot, capacity

MOST_JOBS = 200
"""So many jobs, the first in the order of the queue, get a prediction. Its cost grows with their
number squared."""
MOST_PASSES = 1000
"""A run ends after so many planning passes, which bounds its time."""


# Measured on replays (`benchmarks.forecasts`): with a half and twice, under half of the starts are
# in their ranges on some traces.
_FACTOR = 3
_HOUR = timedelta(hours=1)
_LONGEST = timedelta(days=365)
_GIVEN_BACK_AFTER = timedelta(seconds=30)
"""When a job has given back what it uses above its guarantee: the usual grace."""
FAR = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Start:
    """A predicted start."""

    at: datetime
    placement: Placement
    ends_at: datetime
    """Its predicted end."""
    after: JobId | None
    """The job whose end makes room for it, the last of them; None if it waits for no end."""
    earliest: datetime
    latest: datetime
    """From and until when it is expected to start."""

    @property
    def is_certain(self) -> bool:
        """Whether it is an instant that was given, such as a begin time, and not a prediction."""
        return self.earliest == self.latest


def forecast(decided: Plan, waiting: Sequence[Job]) -> Mapping[JobId, Start]:
    """Predict when the first of the jobs that wait after a plan start; they are in its order.

    The range of a start is from a third of the time until then in one of two runs to three times
    that in the other. An hour is the least that can be told apart: a range that begins within an
    hour begins now, and one that does not end within the hour lasts for three at least.
    """
    waiting, snapshot = waiting[:MOST_JOBS], decided.snapshot
    starts = run_ahead(decided, waiting, snapshot.history.by_medians())
    others = run_ahead(decided, waiting, snapshot.history, starts.keys()) if starts else {}
    return {
        job: start if start.after is None else _ranged(job, start, others.get(job), decided)
        for job, start in starts.items()
    }


def _ranged(job: JobId, start: Start, other: Start | None, decided: Plan) -> Start:
    """Return a start with its range; `other` is that in the other run, if it is in it."""
    now, block = decided.snapshot.at, decided.blocked.get(job)
    spans = [each.at - now for each in (start, other) if each is not None]
    first, last = min(spans) / _FACTOR, min(max(spans), _LONGEST) * _FACTOR
    last = max(last, _FACTOR * _HOUR) if last > _HOUR else _HOUR
    begin_at = now if block is None or block.begin_at is None else block.begin_at
    return replace(
        start,
        earliest=max(now if first <= _HOUR else now + first, begin_at),
        latest=max(now + last, begin_at),
    )


def run_ahead(
    decided: Plan,
    waiting: Sequence[Job],
    run_times: RunTimes,
    wanted: Collection[JobId] = (),
) -> dict[JobId, Start]:
    """Return when jobs that wait after a plan start, if jobs end as `run_times` predict.

    It ends when the starts of the `wanted` jobs are known, if some are given.
    """
    return _ForwardRun(decided, waiting, run_times).run(wanted)


def _may_start_later(decided: Plan) -> dict[JobId, Job]:
    """Return the blocked jobs that need nobody's decision, and no other job's success."""
    blocked = decided.blocked
    found = (
        job
        for job in decided.snapshot.jobs
        if job.id in blocked and blocked[job.id].kind in (BlockKind.BEGIN, BlockKind.ARRAY)
    )
    return {job.id: job for job in islice(found, MOST_JOBS)}


def _wakes(decided: Plan) -> Iterator[float]:
    """Yield the instants at which jobs may start although none has ended."""
    for block in decided.blocked.values():
        if block.begin_at is not None:
            yield block.begin_at.timestamp()
    for window in decided.snapshot.windows:
        yield window.ends_at.timestamp()
    for until in decided.limits.budgets_last_until:
        # Just after: the use until then is a sum of fractions.
        yield until.timestamp() + 1


class _ForwardRun:
    """The state of one forward run."""

    def __init__(self, decided: Plan, waiting: Sequence[Job], run_times: RunTimes) -> None:
        """`run_times` predict when jobs end."""
        self.run_times = run_times
        # The utilization of a GPU is the sum of what its jobs usually cause, from the start on.
        policy = replace(decided.snapshot.policy, settling_time=timedelta(0))
        # It looks ahead: what it adds and forgets is not what counts now.
        self.recent_use = {uid: use.copy() for uid, use in decided.after.recent_use.items()}
        self.base: Snapshot = replace(
            decided.snapshot,
            jobs=(),
            policy=policy,
            blocked={},
            recent_use=self.recent_use,
        )
        self.gpus: dict[GpuUuid, GpuMemory] = {gpu.uuid: gpu for gpu in decided.gpus}
        self.queue = Queue(capacity(decided.gpus))
        self.promised = decided.promised
        self.ends: list[tuple[float, JobId]] = []
        self.starts: dict[JobId, Start] = {}
        self.freed: dict[GpuUuid, JobId] = {}
        """The jobs that have ended since the latest pass, by GPU."""
        self.begun_at = decided.snapshot.at
        self.now_s = self.begun_at.timestamp()
        for job in decided.after.jobs:
            if job.holds_memory:
                self._hold(job)
        self._preempt(decided)
        self.gpus = {uuid: self._with_load(gpu) for uuid, gpu in self.gpus.items()}
        self.blocked = _may_start_later(decided)
        self.giving_back = self._above_guarantees()
        self.given_back_s = self.now_s + _GIVEN_BACK_AFTER.total_seconds()
        given_back = (self.given_back_s,) if self.giving_back else ()
        self.wakes = sorted((*_wakes(decided), *given_back))
        for job in waiting:
            self.queue.add(job)
        self._note_ages(decided, decided.snapshot.at)

    def _above_guarantees(self) -> frozenset[JobId]:
        """Return the jobs with ranges that use more than is guaranteed, and are stopped for it."""
        above = (entry.job for gpu in self.gpus.values() for entry in gpu.entries if entry.excess)
        # The process of a hold is asked, but never stopped.
        return frozenset(job for job in above if self.queue.holding[job].job.holder is None)

    def _give_back(self) -> None:
        for uuid, gpu in self.gpus.items():
            left = (
                replace(each, used=each.memory) if each.job in self.giving_back else each
                for each in gpu.entries
            )
            self.gpus[uuid] = replace(gpu, entries=tuple(left))
        self.giving_back = frozenset()

    def run(self, wanted: Collection[JobId]) -> dict[JobId, Start]:
        for _ in range(MOST_PASSES):
            moments = [*self.wakes[:1], *(end for end, _ in self.ends[:1])]
            if not moments or not (self.queue.jobs or self.blocked):
                break
            self.now_s = max(self.now_s, min(moments))
            if wanted and len(self.starts) >= len(wanted) and self.starts.keys() >= set(wanted):
                break
            self.freed.clear()
            while self.ends and self.ends[0][0] <= self.now_s:
                self._end(heapq.heappop(self.ends)[1])
            while self.wakes and self.wakes[0] <= self.now_s:
                del self.wakes[0]
            if self.giving_back and self.given_back_s <= self.now_s:
                self._give_back()
            self._pass()
        return self.starts

    def _unblock(self, at: datetime) -> None:
        """Queue the jobs that nothing blocks any more."""
        holding = (held.job for held in self.queue.holding.values())
        live = sorted(
            (*holding, *self.queue.jobs.values(), *self.blocked.values()), key=lambda job: job.id
        )
        found = blocks(live, at)
        for job_id in [job for job in self.blocked if job not in found]:
            self.queue.add(self.blocked.pop(job_id))

    def _pass(self) -> None:
        at = datetime.fromtimestamp(self.now_s, UTC)
        if self.blocked:
            self._unblock(at)
        gpus = tuple(self.gpus.values())
        now = replace(self.base, gpus=gpus, queue=self.queue, at=at, promised=self.promised)
        decided = plan(now)
        self.promised = decided.promised
        for job_id, placement in decided.grants:
            running = started(self.queue.jobs[job_id], placement, at)
            ends_at = datetime.fromtimestamp(self._hold(running), UTC)
            self.starts[job_id] = self._start(at, placement, ends_at)
            for uuid, memory in placement.allocations:
                ledger = granted(job_id, running.claim, memory, self.gpus[uuid])
                self.gpus[uuid] = self._with_load(ledger)
        self._preempt(decided)
        for job_id in decided.gives_up:
            self.queue.remove(job_id)
        self._note_ages(decided, at)

    def _start(self, at: datetime, placement: Placement, ends_at: datetime) -> Start:
        uuids = (*(uuid for uuid, _ in placement.allocations), *self.freed)
        after = next((self.freed[uuid] for uuid in uuids if uuid in self.freed), None)
        return Start(at, placement, ends_at, after, at, at)

    def _note_ages(self, decided: Plan, at: datetime) -> None:
        for jobs, since in ((decided.aging, at), (decided.stops_aging, None)):
            for job_id in jobs:
                if job_id in self.queue.jobs:
                    self.queue.add(aging(self.queue.jobs[job_id], since))
                elif job_id in self.blocked:
                    self.blocked[job_id] = aging(self.blocked[job_id], since)

    def _hold(self, job: Job) -> float:
        """Add a job that holds memory, and return its predicted end."""
        self.queue.add(job)
        held, base = self.queue.holding[job.id], self.base
        end = expected_end(held, self.now_s, self.run_times)
        if job.outcome is Outcome.PREEMPTED:
            end = self.now_s + grace_to_make_way(job, base.policy)
        elif job.state is State.RELEASING:
            end = self.now_s
        heapq.heappush(self.ends, (end, job.id))
        return end

    def _preempt(self, decided: Plan) -> None:
        at = datetime.fromtimestamp(self.now_s, UTC)
        for victim, _ in decided.preempts:
            job = self.queue.holding[victim].job
            stopping = asked_to_end(job, Trigger.REVOKE, Outcome.PREEMPTED, "", at)
            if stopping is not None:
                self._hold(stopping)

    def _end(self, job_id: JobId) -> None:
        if job_id not in self.queue.holding:
            return  # it has made way before
        job = self.queue.holding[job_id].job
        self.queue.remove(job_id)
        if job.owner.uid in self.base.limits:
            # What it has used counts against the weekly limit of its user.
            now = datetime.fromtimestamp(self.now_s, UTC)
            use = self.recent_use.setdefault(job.owner.uid, RecentUse())
            for lease in job.leases:
                use.add(lease.granted_at, now, lease.memory)
        for lease in job.leases:
            self.freed[lease.gpu] = job_id
            if lease.gpu in self.gpus:
                ledger = self.gpus[lease.gpu]
                left = tuple(entry for entry in ledger.entries if entry.job != job_id)
                self.gpus[lease.gpu] = self._with_load(replace(ledger, entries=left))

    def _with_load(self, ledger: GpuMemory) -> GpuMemory:
        """Return the ledger of a GPU with the utilization that its jobs usually cause."""
        if ledger.reading.utilization is None:
            return ledger
        holding, base = self.queue.holding, self.base
        held = [holding[entry.job] for entry in ledger.entries if entry.job in holding]
        load = sum(each.need.utilization(base.history) for each in held)
        busy = min(100, round(100 * load))
        return replace(ledger, reading=replace(ledger.reading, utilization=busy))
