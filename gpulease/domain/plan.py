"""One scheduling decision: which waiting jobs start where, and what is reserved.

`plan` is a pure function of a snapshot. `queue` has the waiting jobs in groups, `past_jobs` what
decides their order, `backfill` the reservation, `choice` the choice of GPUs.
"""

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property

from gpulease.domain.backfill import Reservation
from gpulease.domain.calendar import Calendar
from gpulease.domain.choice import PlannedGpu, Score, best_fit, fits
from gpulease.domain.eligibility import Block, next_begin
from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
from gpulease.domain.host_memory import HostMemory
from gpulease.domain.job import Job, grant, worker_started
from gpulease.domain.lease import Claim
from gpulease.domain.limits import LimitCheck, OverLimit
from gpulease.domain.past_jobs import RunTimes, command_keys
from gpulease.domain.placement import (
    Obstacle,
    ObstacleKind,
    Placement,
    Refusal,
    Shortage,
    asked_back,
    find_obstacle,
    granted,
    obstacle_kind,
    reserved_for,
    shared_by_too_many,
    with_missing_links,
)
from gpulease.domain.planning_pass import PlanningPass
from gpulease.domain.queue import Need, Queue
from gpulease.domain.snapshot import Snapshot, capacity, ledgers


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why a job waits, as of one plan."""

    refusal: Refusal
    reserved: frozenset[GpuUuid] = frozenset()
    """The GPUs with memory reserved for the job."""
    over_limit: OverLimit | None = None
    """The limit of its user that it waits for, if it does."""
    asks_back: tuple[Obstacle, ...] = ()
    """What jobs with ranges use above their guarantees, and are asked to give back for it."""


@dataclass(frozen=True)
class Plan:
    """What to do about the queue."""

    snapshot: Snapshot
    grants: tuple[tuple[JobId, Placement], ...]
    gives_up: tuple[JobId, ...]
    aging: tuple[JobId, ...]
    """The jobs that are among the first of their user from now on, so that their age counts."""
    reservations: tuple[Reservation, ...]
    """For the job that has waited longest, and for others that wait for other GPUs."""
    limits: LimitCheck
    """What the limits of users leave after the grants."""
    planned_gpus: Mapping[GpuUuid, PlannedGpu]
    """What the GPUs have free after the grants."""
    stops_aging: tuple[JobId, ...] = ()
    """The jobs that may not start now or are behind the first of their user: they lose their age,
    and begin to age again when that has changed."""
    closed: JobId | None = None
    """The job that all others wait for, under strict order."""
    preempts: tuple[tuple[JobId, JobId], ...] = ()
    """The jobs that have to make way, each with the job that it makes way for."""
    promised: Mapping[JobId, frozenset[GpuUuid]] = field(default_factory=dict)
    """The jobs that others make way for, and the GPUs whose memory is kept for them."""
    blocked: Mapping[JobId, Block] = field(default_factory=dict)
    """The waiting jobs that may not start now, whatever memory is free."""
    calendar: Calendar = field(default_factory=Calendar)
    waiting: tuple[Job, ...] = ()
    """Of the jobs that wait after the grants and may start, one of each claim and user, and those
    that memory is kept for."""
    next_give_up: datetime | None = None
    """When the next job will have waited for as long as it may."""

    @property
    def wakes_at(self) -> datetime | None:
        """When the queue has to be planned again: a job may begin, or gives up."""
        instants = next_begin(self.blocked), self.next_give_up
        return min((at for at in instants if at is not None), default=None)

    @cached_property
    def gpus(self) -> tuple[GpuMemory, ...]:
        """The ledgers after the grants."""
        jobs = {job.id: job for job in self.snapshot.jobs} if self.grants else {}
        found = {gpu.uuid: gpu for gpu in ledgers(self.snapshot)}
        for job, placement in self.grants:
            for uuid, memory in placement.allocations:
                found[uuid] = granted(job, jobs[job].claim, memory, found[uuid])
        labels = {job: jobs[job].label for job, _ in self.grants if jobs[job].queue.array}
        if labels:
            return tuple(replace(gpu, labels={**gpu.labels, **labels}) for gpu in found.values())
        return tuple(found.values())

    @cached_property
    def busy(self) -> Mapping[GpuUuid, tuple[JobId, ...]]:
        """The GPUs whose jobs probably slow each other down, and these jobs."""
        if self.snapshot.policy.shares_by_memory_alone:
            return {}
        return {
            gpu.uuid: gpu.holders
            for gpu in self.gpus
            if len(gpu.entries) > 1 and not self.planned_gpus[gpu.uuid].is_calm_with(0.0)
        }

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
    def committed_jobs(self) -> tuple[Job, ...]:
        """The jobs that hold memory after the grants, and those that memory is kept for."""
        return tuple(job for job in self.after.jobs if job.holds_memory or job.id in self._first)

    @cached_property
    def host(self) -> HostMemory:
        """What the server has free after the grants, and beside the promises."""
        left = HostMemory.of(self.snapshot.host, self.snapshot.host_policy, self._holding)
        for job in self.snapshot.jobs if self.promised else ():
            if job.id in self.promised:
                left.take(job.claim)
        return left

    @cached_property
    def _holding(self) -> tuple[Job, ...]:
        return tuple(job for job in self.after.jobs if job.holds_memory)

    @cached_property
    def reserved(self) -> Mapping[GpuUuid, JobId]:
        """The GPUs with reserved memory, and the job that it is reserved for."""
        if self.closed is not None:
            return {gpu.uuid: self.closed for gpu in self.gpus}
        kept = {gpu: job for job, gpus in self.promised.items() for gpu in gpus}
        reserved = {gpu: each.job for each in self.reservations for gpu in each.memory}
        return reserved | kept

    def reserved_for(self, job: JobId, gpu: GpuMemory) -> Obstacle:
        """Return the obstacle on a GPU that is reserved for `job`."""
        return reserved_for(job, self._labels.get(job, str(job)), gpu)

    def kept_of_host(self, job: JobId) -> Shortage:
        """Return that RAM or cores are reserved for `job`."""
        label = self._labels.get(job, str(job))
        why = f"RAM or cores are reserved for job {label}, which is earlier in the queue"
        return Shortage(why, (job,), {job: label}, ObstacleKind.RESERVED)

    @cached_property
    def _labels(self) -> Mapping[JobId, str]:
        """The ids as people see them of the jobs that memory is kept for."""
        first = {*self._first, self.closed}
        return {job.id: job.label for job in self.snapshot.jobs if job.id in first}

    @property
    def is_closed(self) -> bool:
        """Whether every job submitted now has to wait."""
        return self.closed is not None or not any(gpu.headroom for gpu in self.gpus)

    def reason(self, job: Job) -> WaitReason:
        """Return why a job was not granted, or would not be if the plan does not know it.

        Jobs that differ in nothing share one object, which is computed when it is first asked for.
        """
        is_first = job.id in self._first
        kind = kind_of(job, self.snapshot.history)
        key = (kind, job.id if is_first else None, self.limits.exceeded_by(job))
        found = self._reasons.get(key)
        if found is None:
            found = self._reasons[key] = why_waiting(self, job)
        return found

    def wanted(self, why: Container[ObstacleKind]) -> frozenset[GpuUuid]:
        """Return the GPUs that waiting jobs want and do not get for one of these reasons.

        Jobs with one claim meet the same obstacles, but for what is kept for others: whether a
        job has to leave that free depends on its run time.
        """
        found, left = set[GpuUuid](), set[GpuUuid]()
        depends: dict[tuple[int, Claim], set[GpuUuid]] = {}
        for job in self._within_limits():
            kinds = {
                gpu.uuid: obstacle_kind(job.claim, gpu)
                for gpu in self.gpus
                if gpu.uuid not in found
            }
            if not kinds:
                break  # as in most long queues, after a few jobs
            open_to = depends[job.owner.uid, job.claim] = {
                uuid
                for uuid, kind in kinds.items()
                if kind is ObstacleKind.EXCESS or (kind is None and uuid in self.reserved)
            }
            found |= {uuid for uuid in kinds.keys() - open_to if kinds[uuid] in why}
            left |= open_to
        if left := left - found:
            able = {each for each, open_to in depends.items() if open_to & left}
            for reason in self.reasons(able):
                found.update(each.gpu for each in reason.refusal.obstacles if each.kind in why)
                if left <= found:
                    break
        return frozenset(found)

    def asked_back(self) -> frozenset[tuple[JobId, GpuUuid]]:
        """Return the leases of which waiting jobs need what is used above the guarantee."""
        found = set[tuple[JobId, GpuUuid]]()
        gpus = [gpu for gpu in self.gpus if any(entry.excess for entry in gpu.entries)]
        able = {
            (job.owner.uid, job.claim)
            for job in (self._within_limits() if gpus else ())
            if any(obstacle_kind(job.claim, gpu) is ObstacleKind.EXCESS for gpu in gpus)
        }
        most = sum(bool(entry.excess) for gpu in gpus for entry in gpu.entries)
        for reason in self.reasons(able) if able else ():
            found.update((job, each.gpu) for each in reason.asks_back for job in each.waits_for)
            # In a long queue, the first jobs need all of it.
            if len(found) == most:
                break
        return frozenset(found)

    def reasons(self, able: Container[tuple[int, Claim]] | None = None) -> Iterator[WaitReason]:
        """Yield the reasons of all waiting jobs that nothing blocks, each once.

        `able` are the only users, by uid, and claims to go through; None: all.
        """
        granted_now = {job for job, _ in self.grants}
        seen = set()
        for job in self.snapshot.jobs:
            if job.holds_memory or job.id in granted_now or job.id in self.blocked:
                continue
            if able is not None and (job.owner.uid, job.claim) not in able:
                continue
            if id(reason := self.reason(job)) not in seen:
                seen.add(id(reason))
                yield reason

    def _within_limits(self) -> Iterator[Job]:
        """Yield the jobs of `waiting` that wait for no limit of their user."""
        return (job for job in self.waiting if self.limits.exceeded_by(job) is None)

    @cached_property
    def _first(self) -> frozenset[JobId]:
        """The jobs that memory is kept for."""
        return frozenset((*self.promised, *(each.job for each in self.reservations)))

    @cached_property
    def _reasons(self) -> dict[Hashable, WaitReason]:
        return {}


def plan(snapshot: Snapshot, score: Score = best_fit) -> Plan:
    """Decide which jobs start where, within the free memory and the order of the queue."""
    planning = PlanningPass(snapshot, score)
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
        tuple(planning.reservations),
        planning.limits,
        {gpu.uuid: gpu for gpu in planning.planned_gpus},
        planning.stops_aging(),
        planning.closed,
        tuple(planning.making_way.preempts.items()),
        planning.making_way.promised,
        planning.blocked,
        planning.calendar,
        planning.one_of_each(),
        planning.next_give_up(),
    )


def order_after(decided: Plan, index: Queue | None = None) -> Sequence[Job]:
    """Return the jobs that wait after a plan, in the order in which the next pass tries them.

    `index` has those that may start; None: it is made.
    """
    return order_of(replace(decided.after, queue=index), decided.reservations)


def order_of(snapshot: Snapshot, reservations: Sequence[Reservation]) -> Sequence[Job]:
    """Return the waiting jobs that may start, in the order in which a pass tries them."""
    return PlanningPass(snapshot).in_order(reservations)


def started(job: Job, placement: Placement, at: datetime) -> Job:
    """Return a queued job as it is after its start."""
    running = worker_started(grant(job, placement, at), None, None, at)
    assert running is not None
    return running


def kind_of(job: Job, history: RunTimes) -> Hashable:
    """Return what decides why a job waits: waiting jobs with the same kind wait for the same.

    Of its command only the predictions count: the commands of a sweep have none that differ.
    """
    keys = command_keys(job.owner.user, job.usage.fingerprint)
    predicted = history.seconds(keys), history.utilization(keys)
    return job.claim, job.owner.user, predicted, job.queue.preemptible


def why_waiting(plan_: Plan, job: Job) -> WaitReason:
    """Return why `job` waits, as of a plan that may not know it."""
    over = plan_.limits.exceeded_by(job)
    if over is not None:
        return WaitReason(Refusal(()), over_limit=over)
    obstacles = []
    fitting = []
    need = Queue(capacity(plan_.gpus)).need_of(job)
    for gpu in plan_.gpus:
        obstacle = find_obstacle(job.claim, gpu)
        if obstacle is None or obstacle.kind is ObstacleKind.EXCESS:
            # Nothing is asked back for a job that could not start all the same.
            obstacle = (
                _window_ahead(plan_, job, need, gpu)
                or _why_kept(plan_, need, job.id, gpu)
                or obstacle
            )
        if obstacle is None:
            fitting.append(gpu.uuid)
        else:
            obstacles.append(obstacle)
    obstacles.sort(key=lambda each: each.sort_key)
    host = _why_no_host(plan_, need, job.id) if job.claim.leases_host else None
    refusal = Refusal(tuple(obstacles), tuple(fitting), host)
    reserved = frozenset(
        gpu for each in plan_.reservations if each.job == job.id for gpu in each.memory
    )
    # A preemptible job uses idle memory only; another may have had memory freed for it already.
    asks = not need.preemptible and job.id not in plan_.promised and host is None
    back = asked_back(job.claim, refusal, plan_.gpus) if asks else ()
    if not back:
        refusal = with_missing_links(job.claim, refusal, plan_.gpus)
    return WaitReason(refusal, reserved, asks_back=back)


def _why_kept(plan_: Plan, need: Need, job: JobId, gpu: GpuMemory) -> Obstacle | None:
    """Return why a GPU with enough free memory is kept from a job."""
    snapshot = plan_.snapshot
    history, policy = snapshot.history, snapshot.policy
    utilization = need.utilization(history)
    if not plan_.planned_gpus[gpu.uuid].shares(utilization, policy):
        return shared_by_too_many(gpu)
    if plan_.closed not in (None, job):
        return plan_.reserved_for(plan_.closed, gpu)
    kept_for = plan_.reserved.get(gpu.uuid, job)
    if kept_for != job and not fits(need.claim, plan_.planned_gpus[gpu.uuid]):
        return plan_.reserved_for(kept_for, gpu)
    for kept in _ahead_of(plan_, need, job):
        if not kept.leaves(gpu.uuid, need.claim, utilization, policy):
            return plan_.reserved_for(kept.job, gpu)
    return None


def _why_no_host(plan_: Plan, need: Need, job: JobId) -> Shortage | None:
    """Return why the server has too little for a job, or keeps it for another one."""
    found = plan_.host.shortage(need.claim, plan_._holding)
    if found is not None:
        return found
    for kept in _ahead_of(plan_, need, job):
        if not kept.leaves_host(need.claim):
            return plan_.kept_of_host(kept.job)
    return None


def _ahead_of(plan_: Plan, need: Need, job: JobId) -> Iterator[Reservation]:
    """Yield the reservations of other jobs that one which starts now may run into."""
    snapshot = plan_.snapshot
    at_s, history, policy = snapshot.at.timestamp(), snapshot.history, snapshot.policy
    for kept in plan_.reservations:
        is_other = kept.job != job and not need.preemptible
        if is_other and kept.is_outlasted_by(need, at_s, history, policy):
            yield kept


def _window_ahead(plan_: Plan, job: Job, need: Need, gpu: GpuMemory) -> Obstacle | None:
    snapshot = plan_.snapshot
    if plan_.calendar.first_against(job.owner.user, gpu.uuid) is None:
        return None
    longest = timedelta(seconds=need.longest_s(snapshot.history, snapshot.policy))
    certain = need.limit_s is not None
    return plan_.calendar.obstacle(
        job.owner.user, gpu, snapshot.at, longest, certain=certain, alone=job.claim.gpus == 1
    )
