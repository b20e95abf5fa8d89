"""One scheduling decision: which waiting jobs start where, and what is reserved.

`plan` is a pure function of a snapshot. `queue` has the waiting jobs in groups, `run_time` and
`fair_share` what decides their order, `backfill` the reservation, `rooms` the choice of GPUs.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property, partial
from itertools import islice

from gpulease.domain.backfill import End, Reservation, expected_end, latest_end, reserve
from gpulease.domain.calendar import Calendar, Occurrence, Stay
from gpulease.domain.candidates import Candidates
from gpulease.domain.eligibility import Block, blocks, next_begin
from gpulease.domain.fair_share import PastUse
from gpulease.domain.gpu import GpuMemory, GpuReading, GpuUuid, JobId, LedgerEntry, build_ledger
from gpulease.domain.job import Job, grant, wait_has_expired, worker_started
from gpulease.domain.lease import Claim
from gpulease.domain.limits import LimitCheck, OverLimit, RecentUse, UserLimits
from gpulease.domain.placement import (
    Obstacle,
    Placement,
    Refusal,
    find_obstacle,
    granted,
    reserved_for,
    shared_by_too_many,
)
from gpulease.domain.preemption import MakingWay, Wanted
from gpulease.domain.queue import PREEMPTIBLE_RANKS, Group, Holding, Need, Order, Queue
from gpulease.domain.queue_policy import PolicyName, QueuePolicy
from gpulease.domain.rooms import Room, Score, best_fit, choose, fits
from gpulease.domain.run_time import RunTimes

NOTHING_KNOWN = RunTimes()
UNUSED = PastUse(1.0)
DEFAULT_POLICY = QueuePolicy()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a decision depends on."""

    jobs: Sequence[Job]
    """Every job that waits or holds memory."""
    readings: Sequence[GpuReading]
    at: datetime
    jobs_by_pid: Mapping[int, JobId] = field(default_factory=dict)
    """The job of each process on a GPU."""
    margin: int = 0
    """Bytes of each GPU that are never leased."""
    drained: Mapping[GpuUuid, str] = field(default_factory=dict)
    mps_servers: frozenset[int] = frozenset()
    """The pids of MPS servers; the driver may count memory of jobs as theirs."""
    queue: Queue | None = None
    """The index of the jobs that hold memory or may start; None: all of `jobs`."""
    history: RunTimes = NOTHING_KNOWN
    use: PastUse = UNUSED
    """The use of jobs that have ended."""
    usual_wait_s: float = 0.0
    """The 90th percentile of recent waits, in seconds."""
    policy: QueuePolicy = DEFAULT_POLICY
    gpus: Sequence[GpuMemory] | None = None
    """The ledgers, if they are known already."""
    promised: Mapping[JobId, frozenset[GpuUuid]] = field(default_factory=dict)
    """The jobs that others make way for and their GPUs, as of the plan before."""
    blocked: Mapping[JobId, Block] | None = None
    """The waiting jobs that are not in `queue`, if it is given: they may not start now."""
    limits: Mapping[int, UserLimits] = field(default_factory=dict)
    """By uid; users who are not here have no limits."""
    recent_use: Mapping[int, RecentUse] = field(default_factory=dict)
    """By uid: the use of leases that have ended."""
    windows: Sequence[Occurrence] = ()
    """The current or next time of each window."""


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a job waits, as of one plan."""

    refusal: Refusal
    reserved: frozenset[GpuUuid] = frozenset()
    """The GPUs with memory reserved for the job."""
    over_limit: OverLimit | None = None
    """The limit of its user that it waits for, if it does."""


def ledgers(snapshot: Snapshot) -> tuple[GpuMemory, ...]:
    """Return the ledger of every GPU."""
    if snapshot.gpus is not None:
        return tuple(snapshot.gpus)
    entries: dict[GpuUuid, list[LedgerEntry]] = {}
    for job in snapshot.jobs:
        if job.holds_memory:
            for lease in job.leases:
                entries.setdefault(lease.gpu, []).append(job.ledger_entry(lease))
    return tuple(
        build_ledger(
            reading,
            entries.get(reading.uuid, ()),
            snapshot.jobs_by_pid,
            snapshot.margin,
            _drained(reading, snapshot.drained),
            snapshot.mps_servers,
        )
        for reading in snapshot.readings
    )


def _drained(reading: GpuReading, drained: Mapping[GpuUuid, str]) -> str | None:
    """Return why a GPU, or the GPU of a MIG device, takes no new leases; None if it does."""
    own = drained.get(reading.uuid)
    return own if own is not None or reading.parent is None else drained.get(reading.parent)


def capacity(gpus: Sequence[GpuMemory]) -> int:
    """Return the allocatable bytes of the largest GPU."""
    return max((gpu.allocatable or 0 for gpu in gpus), default=0)


@dataclass(frozen=True)
class Plan:
    """What to do about the queue."""

    snapshot: Snapshot
    grants: tuple[tuple[JobId, Placement], ...]
    gives_up: tuple[JobId, ...]
    aging: tuple[JobId, ...]
    """The jobs that are among the first of their user from now on, so that their age counts."""
    reservation: Reservation | None
    """For the job that has waited longest."""
    limits: LimitCheck
    """What the limits of users leave after the grants."""
    rooms: Mapping[GpuUuid, Room]
    """What the GPUs have free after the grants."""
    stops_aging: tuple[JobId, ...] = ()
    """The jobs that may not start now: they begin to age again when they may."""
    closed: JobId | None = None
    """The job that all others wait for, under strict order."""
    preempts: tuple[tuple[JobId, JobId], ...] = ()
    """The jobs that have to make way, each with the job that it makes way for."""
    promised: Mapping[JobId, frozenset[GpuUuid]] = field(default_factory=dict)
    """The jobs that others make way for, and the GPUs whose memory is kept for them."""
    blocked: Mapping[JobId, Block] = field(default_factory=dict)
    """The waiting jobs that may not start now, whatever memory is free."""
    calendar: Calendar = field(default_factory=Calendar)

    @property
    def wakes_at(self) -> datetime | None:
        """The next begin time of a job, at which the queue has to be planned again."""
        return next_begin(self.blocked)

    @cached_property
    def holders(self) -> tuple[JobId, ...]:
        """The jobs that hold memory after the grants."""
        holding = (job.id for job in self.snapshot.jobs if job.holds_memory)
        return (*holding, *(job for job, _ in self.grants))

    @cached_property
    def gpus(self) -> tuple[GpuMemory, ...]:
        """The ledgers after the grants."""
        jobs = {job.id: job for job in self.snapshot.jobs} if self.grants else {}
        found = {gpu.uuid: gpu for gpu in ledgers(self.snapshot)}
        for job, placement in self.grants:
            for uuid, memory in placement.allocations:
                found[uuid] = granted(job, jobs[job].claim, memory, found[uuid])
        return tuple(found.values())

    @cached_property
    def after(self) -> Snapshot:
        """The snapshot after the grants. It shares nothing that later passes change."""
        placements, at = dict(self.grants), self.snapshot.at
        jobs = [
            started(job, placements[job.id], at) if job.id in placements else job
            for job in self.snapshot.jobs
        ]
        return replace(
            self.snapshot,
            jobs=jobs,
            queue=None,
            blocked=self.blocked,
            gpus=self.gpus,
            promised=self.promised,
            recent_use={uid: use.copy() for uid, use in dict(self.snapshot.recent_use).items()},
        )

    @cached_property
    def reserved(self) -> Mapping[GpuUuid, JobId]:
        """The GPUs with reserved memory, and the job that it is reserved for."""
        if self.closed is not None:
            return {gpu.uuid: self.closed for gpu in self.gpus}
        kept = {gpu: job for job, gpus in self.promised.items() for gpu in gpus}
        if self.reservation is None:
            return kept
        return dict.fromkeys(self.reservation.memory, self.reservation.job) | kept

    @property
    def is_closed(self) -> bool:
        """Whether every job submitted now has to wait."""
        return self.closed is not None or not any(gpu.headroom for gpu in self.gpus)

    @cached_property
    def waiting(self) -> Mapping[JobId, WaitReason]:
        """Why each waiting job was not granted. Jobs that differ in nothing share one object."""
        granted_now = {job for job, _ in self.grants}
        shared: dict[Hashable, WaitReason] = {}
        reasons = {}
        for job in self.snapshot.jobs:
            if job.holds_memory or job.id in self.blocked:
                continue
            if job.id not in granted_now:
                first = self.reservation is not None and self.reservation.job == job.id
                key = (kind_of(job), first, self.limits.exceeded_by(job), self.promised.get(job.id))
                if key not in shared:
                    shared[key] = why_waiting(self, job)
                reasons[job.id] = shared[key]
        return reasons


def plan(snapshot: Snapshot, score: Score = best_fit) -> Plan:
    """Decide which jobs start where, within the free memory and the order of the queue."""
    planning = _PlanningPass(snapshot, score)
    planning.keep_promises(snapshot.promised)
    planning.start_by_class()
    if planning.closed is None:
        planning.make_way()
    planning.start_preemptible_jobs()
    grants = planning.grants
    return Plan(
        snapshot,
        tuple(grants.items()),
        planning.gives_up(),
        planning.newly_aging(),
        planning.reservation,
        planning.limits,
        {room.uuid: room for room in planning.rooms},
        planning.stops_aging(),
        planning.closed,
        tuple(planning.making_way.preempts.items()),
        planning.making_way.promised,
        planning.blocked,
        planning.calendar,
    )


def order_after(decided: Plan) -> Sequence[Job]:
    """Return the jobs that wait after a plan, in the order in which the next pass tries them."""
    return _PlanningPass(decided.after).in_order(decided.reservation)


def started(job: Job, placement: Placement, at: datetime) -> Job:
    """Return a queued job as it is after its start."""
    running = worker_started(grant(job, placement, at), None, None, at)
    assert running is not None
    return running


def _eligible(snapshot: Snapshot, largest: int) -> tuple[Mapping[JobId, Block], Queue]:
    """Return the jobs that may not start now, and the index of the others."""
    blocked = snapshot.blocked
    if blocked is None:
        blocked = blocks(snapshot.jobs, snapshot.at)
    if snapshot.queue is not None:
        return blocked, snapshot.queue
    return blocked, Queue.of((job for job in snapshot.jobs if job.id not in blocked), largest)


class _PlanningPass:
    """The working state of one planning pass."""

    def __init__(self, snapshot: Snapshot, score: Score = best_fit) -> None:
        gpus = ledgers(snapshot)
        self.blocked, self.queue = _eligible(snapshot, capacity(gpus))
        self.jobs = snapshot.jobs
        self.policy = snapshot.policy
        self.history = snapshot.history
        self.at = snapshot.at
        self.now_s = snapshot.at.timestamp()
        self.score = score
        ranked = sorted(gpus, key=lambda gpu: (gpu.reading.server, gpu.sort_key))
        self.rooms = [Room(gpu, rank) for rank, gpu in enumerate(ranked)]
        self._count_settling_jobs()
        # A plan of the future, for expected starts, knows windows that have ended by then.
        ahead = [each for each in snapshot.windows if each.ends_at > snapshot.at]
        self.calendar = Calendar(ahead, gpus, self._stays())
        self.grants: dict[JobId, Placement] = {}
        self.reservation: Reservation | None = None
        self.closed: JobId | None = None
        self.limits = LimitCheck.of(
            snapshot.limits,
            snapshot.recent_use,
            (held.job for held in self.queue.holding.values()),
            capacity(gpus),
            snapshot.at,
        )
        self.usual_wait_s = snapshot.usual_wait_s
        self.making_way = MakingWay(
            self.queue.holding.values(), self.history, self.policy, self.now_s
        )
        self.order = Order(
            self.queue, self.now_s, self.policy, self.history, snapshot.use.at(self.now_s)
        )

    def _count_settling_jobs(self) -> None:
        rooms = {room.uuid: room for room in self.rooms}
        settled = self.now_s - self.policy.settling_time.total_seconds()
        for held in self.queue.holding.values():
            if held.start_s > settled:
                load = held.need.utilization(self.history, self.policy)
                for lease in held.job.leases:
                    if lease.gpu in rooms:
                        rooms[lease.gpu].add_load(load)

    # Windows.

    def _stays(self) -> Iterator[Stay]:
        """Yield the jobs on GPUs with their ends: by time limit, or else as predicted."""
        for held in self.queue.holding.values():
            if held.need.limit_s is not None:
                end = latest_end(held, self.now_s, self.policy)
            else:
                end = expected_end(held, self.now_s, self.history, self.policy)
            ends_at = self.at + timedelta(seconds=end - self.now_s)
            for lease in held.job.leases:
                yield Stay(lease.gpu, held.need.user, ends_at)

    def _latest_starts(self, need: Need) -> Mapping[GpuUuid, float]:
        """Return until when a job may start on the GPUs with windows of others, in seconds."""
        begins = self.calendar.begins_against(need.user)
        longest = need.longest_s(self.history, self.policy) if begins else 0.0
        return {gpu: begin - longest for gpu, begin in begins.items()}

    def _open_to(self, need: Need, rooms: Sequence[Room]) -> Sequence[Room]:
        """Return the GPUs on which a job may start now as far as windows are concerned."""
        latest = self._latest_starts(need)
        if not latest:
            return rooms
        return [room for room in rooms if self.now_s <= latest.get(room.uuid, math.inf)]

    # The oldest jobs.

    def start_by_class(self) -> None:
        """Start the jobs of each priority class, the highest first.

        A job of a lower class never delays one of a higher class, whatever its age.
        """
        every = (group for groups in self.queue.groups.values() for group in groups.values())
        for rank in sorted({group.need.rank for group in every if not group.need.preemptible}):
            if self.reservation is None:
                self._start_the_oldest(rank)
            if self.closed is not None:
                return
            self._start_what_fits((rank,))

    def _start_the_oldest(self, rank: int) -> None:
        """Start the oldest jobs of a class, and reserve GPUs for the first that does not fit.

        A job that the end of no job helps gets no reservation: it waits for something else. A hard
        reservation is for memory alone: how busy a GPU will be at that time cannot be promised.
        """
        tried: set[Claim] = set()
        for job in self._oldest(rank):
            need = self.queue.need(job)
            passed = job.id in self.making_way.promised or job.claim in tried
            if passed or self.limits.exceeded_by(job) or self._start(job, need):
                continue
            if self._is_hard(job) and self._start(job, need, on_busy=True):
                continue
            tried.add(job.claim)
            if wait_has_expired(job, self.at) or self._make_way_for(job, need):
                continue
            self.reservation = self._reserve(job, need)
            if self.reservation is not None:
                if self.policy.name is PolicyName.FIFO:
                    self.closed = job.id
                return

    def _oldest(self, rank: int) -> Iterator[Job]:
        """Return the jobs of a class that may have a reservation, the first in line first."""
        if self.policy.name is not PolicyName.FAIR:
            jobs = self.order.in_order()
            return (job for job in jobs if self.queue.need(job).rank == rank)
        oldest = []
        enough = self.policy.soft_reservation_after.total_seconds()
        for turns in self.queue.turns.values():
            for turn in turns[: self.policy.aging_jobs]:
                job = self.queue.jobs[JobId(turn[2])]
                age = self.order.age_s(job)
                if age >= enough and self.queue.need(job).rank == rank:
                    oldest.append((-age, job.id, job))
        return (job for *_, job in sorted(oldest))

    def _reserve(self, job: Job, need: Need) -> Reservation | None:
        hard = self._is_hard(job)
        ends = [
            self._end(held, [(lease.gpu, lease.memory) for lease in held.job.leases], hard=hard)
            for held in self.queue.holding.values()
        ]
        for started, placement in self.grants.items():
            begun = self.queue.jobs[started]
            held = Holding(begun, self.queue.need(begun), self.now_s)
            ends.append(self._end(held, placement.allocations, hard=hard))
        return reserve(
            job.id,
            job.claim,
            need.utilization(self.history, self.policy),
            self.rooms,
            ends,
            self.policy,
            self.score,
            hard=hard,
            latest_starts=self._latest_starts(need),
        )

    def _end(self, held: Holding, memory: Sequence[tuple[GpuUuid, int]], *, hard: bool) -> End:
        """Return when the memory of a job is expected to be free; at once if it makes way."""
        latest = self.now_s if held.need.preemptible else latest_end(held, self.now_s, self.policy)
        expected = min(latest, expected_end(held, self.now_s, self.history, self.policy))
        return End(
            latest if hard else expected,
            latest,
            memory,
            held.job.claim.exclusive,
            held.need.utilization(self.history, self.policy),
        )

    def _is_hard(self, job: Job) -> bool:
        if self.policy.name is not PolicyName.FAIR:
            return True
        after = self.policy.hard_reservation_after.total_seconds()
        waits = self.policy.hard_reservation_waits * self.usual_wait_s
        return self.order.age_s(job) >= max(after, waits)

    # The others.

    def _start_what_fits(self, ranks: Collection[int]) -> None:
        """Start every job of these ranks that fits and delays no reservation, by score."""
        candidates = self._candidates(self._groups_that_fit(ranks))
        for each in candidates:
            if self.limits.exceeded_by(each.job) is not None:
                candidates.refused(each, partial(_has_user, each.need.user))
            elif self._start(each.job, each.need):
                candidates.started(each)
            else:
                candidates.refused(each, self._is_worse_than(each.need))

    def start_preemptible_jobs(self) -> None:
        """Start the preemptible jobs that fit; they delay no reservation in any case."""
        self._start_what_fits(PREEMPTIBLE_RANKS)

    def _candidates(self, groups: Iterable[Iterable[Group]]) -> Candidates:
        promised = self.making_way.promised
        placed = {*self.grants, *promised} if promised else self.grants
        return Candidates(groups, self.queue.jobs, self.order, placed)

    def in_order(self, reservation: Reservation | None) -> list[Job]:
        """Return the waiting jobs in the order in which they are tried; start none."""
        first = None if reservation is None else self.queue.jobs[reservation.job]
        found = [] if first is None else [first]
        candidates = self._candidates(groups.values() for groups in self.queue.groups.values())
        for each in candidates:
            if each.job is not first:
                found.append(each.job)
            candidates.started(each)
        return found

    def _groups_that_fit(self, ranks: Collection[int]) -> Iterator[Iterable[Group]]:
        """Return the groups of each claim that fits now, reserved memory included."""
        most = max((room.free for room in self.rooms), default=0)
        for claim, groups in self.queue.groups.items():
            if isinstance(claim.memory, int) and claim.memory > most:
                continue
            if self._has_room(claim):
                yield [group for group in groups.values() if group.need.rank in ranks]

    def _has_room(self, claim: Claim) -> bool:
        """Tell whether the memory of a claim is free."""
        able = [room for room in self.rooms if fits(claim, room)]
        return choose(claim, able, best_fit) is not None

    def _is_worse_than(self, refused: Need) -> Callable[[Need], bool]:
        """Return a test for needs with the same claim that have to be refused as well.

        They are for at least as long and for at least as much of the time of a GPU. A window may
        stand against one user and not against another.
        """
        if not self._has_room(refused.claim):
            return lambda _: True
        run_time = refused.run_time(self.history, self.policy)
        utilization = refused.utilization(self.history, self.policy)
        user = refused.user if self._latest_starts(refused) else None
        return lambda need: (
            (user is None or need.user == user)
            and need.run_time(self.history, self.policy) >= run_time
            and need.utilization(self.history, self.policy) >= utilization
        )

    def _start(self, job: Job, need: Need, *, on_busy: bool = False) -> bool:
        """Grant `job` its claim if it fits and delays nobody; `on_busy`: on busy GPUs, too."""
        utilization = need.utilization(self.history, self.policy)
        able = [
            room
            for room in self._open_to(need, self.rooms)
            if fits(job.claim, room) and (on_busy or room.shares(utilization, self.policy))
        ]
        held_back = self._is_held_back(need)
        if held_back:
            able = self._beside(job.claim, utilization, able)
        chosen = choose(job.claim, able, self.score)
        if chosen is None:
            return False
        self._grant(job, need, chosen, utilization, held_back=held_back)
        return True

    def _is_held_back(self, need: Need) -> bool:
        """Tell whether a job that starts now may take what is reserved for another one."""
        kept = self.reservation
        if kept is None or need.preemptible:
            return False
        return kept.is_outlasted_by(need, self.now_s, self.history, self.policy)

    def _beside(self, claim: Claim, utilization: float, rooms: Iterable[Room]) -> list[Room]:
        """Return the GPUs where a claim fits beside the reserved job."""
        kept = self.reservation
        return [
            room
            for room in rooms
            if kept is None or kept.leaves(room.uuid, claim, utilization, self.policy)
        ]

    def _grant(
        self,
        job: Job,
        need: Need,
        rooms: Sequence[Room],
        utilization: float,
        *,
        held_back: bool,
    ) -> None:
        allocations = []
        for room in rooms:
            memory = job.claim.memory_on(room.allocatable)
            allocations.append((room.uuid, memory))
            room.take(memory, job.claim.exclusive, utilization)
            later = self.reservation.rooms.get(room.uuid) if self.reservation else None
            if held_back and later is not None:
                later.take(memory, job.claim.exclusive, utilization)
        self.grants[job.id] = Placement(tuple(allocations))
        self.limits.start(job, sum(memory for _, memory in allocations))
        self.order.started(need)

    # Preemption.

    def keep_promises(self, promised: Mapping[JobId, frozenset[GpuUuid]]) -> None:
        """Start the jobs that others made way for, or keep for them what is being freed."""
        every = self.rooms
        for job_id, gpus in promised.items():
            job = self.queue.jobs.get(job_id)
            if job is None:
                continue
            # Elsewhere it would take what others have been promised.
            self.rooms = [room for room in every if room.uuid in gpus]
            if self.limits.exceeded_by(job) or self._start(job, need := self.queue.need(job)):
                continue
            able = self._open_to(need, self.rooms)
            if self.making_way.keep_for(job_id, self._wanted(need), self.rooms, able):
                self._count(job, need)
        self.rooms = every

    def make_way(self) -> None:
        """Have preemptible jobs make way for those that do not fit, by descending score."""
        if self.making_way.is_possible:
            candidates = self._candidates(
                [group for group in groups.values() if not group.need.preemptible]
                for groups in self.queue.groups.values()
            )
            for each in candidates:
                if not self.making_way.is_possible:
                    return
                if self._make_way_for(each.job, each.need):
                    candidates.started(each)

    def _make_way_for(self, job: Job, need: Need) -> bool:
        """Have the jobs make way without which a job fits; return whether it has room then."""
        if not self.making_way.is_possible or wait_has_expired(job, self.at):
            return False
        if self.limits.exceeded_by(job) is not None:
            return False
        wanted, able = self._wanted(need), self._open_to(need, self.rooms)
        if self._is_held_back(need):
            able = self._beside(job.claim, wanted.utilization, able)
        if not self.making_way.make_room(job.id, wanted, self.rooms, able):
            return False
        self._count(job, need)
        return True

    def _count(self, job: Job, need: Need) -> None:
        """Count a job for which others make way as if it had started."""
        kept = self.making_way.promised[job.id]
        sizes = (room.allocatable for room in self.rooms if room.uuid in kept)
        self.limits.start(job, sum(job.claim.memory_on(size) for size in sizes))
        self.order.started(need)

    def _wanted(self, need: Need) -> Wanted:
        utilization = need.utilization(self.history, self.policy)
        return Wanted(need.claim, utilization, self.policy, self.score)

    # What else the plan says.

    def gives_up(self) -> tuple[JobId, ...]:
        """Return the jobs that have waited for as long as they may."""
        over = [job for job, at in self.queue.impatient.items() if at <= self.at]
        if self.blocked:
            over += (
                job.id
                for job in self.jobs
                if job.id in self.blocked and wait_has_expired(job, self.at)
            )
        return tuple(sorted(job for job in over if job not in self.grants))

    def newly_aging(self) -> tuple[JobId, ...]:
        """Return the jobs that are among the first of their user since the grants."""
        new = (job for job in self._first() if job.queue.aging_since_at is None)
        return tuple(job.id for job in new if self.limits.exceeded_by(job) is None)

    def stops_aging(self) -> tuple[JobId, ...]:
        """Return the jobs that gained age, and are blocked or over a limit now."""
        aging = [job for job in self._first() if job.queue.aging_since_at is not None]
        over = [job.id for job in aging if self.limits.exceeded_by(job) is not None]
        if self.blocked:
            over += (
                job.id
                for job in self.jobs
                if job.queue.aging_since_at is not None and job.id in self.blocked
            )
        return tuple(over)

    def _first(self) -> list[Job]:
        """Return the first jobs of each user that still wait."""
        jobs, grants, most = self.queue.jobs, self.grants, self.policy.aging_jobs
        first = []
        for turns in self.queue.turns.values():
            left = turns if not grants else (turn for turn in turns if turn[2] not in grants)
            first += [jobs[JobId(turn[2])] for turn in islice(left, most)]
        return first


def _has_user(user: str, need: Need) -> bool:
    return need.user == user


def kind_of(job: Job) -> Hashable:
    """Return what decides why a job waits: waiting jobs with the same kind wait for the same."""
    return job.claim, job.owner.user, job.usage.fingerprint


def why_waiting(plan_: Plan, job: Job) -> WaitReason:
    """Return why `job` waits, as of a plan that may not know it."""
    over = plan_.limits.exceeded_by(job)
    if over is not None:
        return WaitReason(Refusal(()), over_limit=over)
    obstacles = []
    fitting = []
    need = Queue(capacity(plan_.gpus)).need_of(job)
    for gpu in plan_.gpus:
        obstacle = (
            find_obstacle(job.claim, gpu)
            or _window_ahead(plan_, job, need, gpu)
            or _why_kept(plan_, need, job.id, gpu)
        )
        if obstacle is None:
            fitting.append(gpu.uuid)
        else:
            obstacles.append(obstacle)
    refusal = Refusal(tuple(sorted(obstacles, key=lambda each: each.sort_key)), tuple(fitting))
    mine = plan_.reservation is not None and plan_.reservation.job == job.id
    reserved = frozenset(plan_.reserved) if mine else frozenset()
    return WaitReason(refusal, reserved=reserved)


def _why_kept(plan_: Plan, need: Need, job: JobId, gpu: GpuMemory) -> Obstacle | None:
    """Return why a GPU with enough free memory is kept from a job."""
    snapshot, reservation = plan_.snapshot, plan_.reservation
    history, policy = snapshot.history, snapshot.policy
    utilization = need.utilization(history, policy)
    if not plan_.rooms[gpu.uuid].shares(utilization, policy):
        return shared_by_too_many(gpu)
    if plan_.closed not in (None, job):
        return reserved_for(plan_.closed, gpu)
    if not fits(need.claim, plan_.rooms[gpu.uuid]) and gpu.uuid in plan_.reserved:
        return reserved_for(plan_.reserved[gpu.uuid], gpu)
    if reservation is None or reservation.job == job or need.preemptible:
        return None
    at_s = snapshot.at.timestamp()
    if reservation.leaves(gpu.uuid, need.claim, utilization, policy) or not (
        reservation.is_outlasted_by(need, at_s, history, policy)
    ):
        return None
    return reserved_for(reservation.job, gpu)


def _window_ahead(plan_: Plan, job: Job, need: Need, gpu: GpuMemory) -> Obstacle | None:
    snapshot = plan_.snapshot
    if plan_.calendar.first_against(job.owner.user, gpu.uuid) is None:
        return None
    longest = timedelta(seconds=need.longest_s(snapshot.history, snapshot.policy))
    certain = need.limit_s is not None
    return plan_.calendar.obstacle(
        job.owner.user, gpu, snapshot.at, longest, certain=certain, alone=job.claim.gpus == 1
    )
