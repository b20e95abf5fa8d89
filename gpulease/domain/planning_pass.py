"""One pass over the queue: the working state of a decision, and the rules in their order.

Jobs that others made way for start first. Then each priority class has its turn: its oldest jobs,
of which the first that does not fit gets a reservation, and others one on GPUs that do not suit the
first; then whatever fits, by score. Preemptible jobs come last. `plan` reads the result.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property, partial
from itertools import islice
from operator import ge

from gpulease.domain.backfill import (
    End,
    Reservation,
    expected_end,
    grace_to_make_way,
    latest_end,
    reserve,
)
from gpulease.domain.calendar import Calendar, Stay
from gpulease.domain.candidates import Candidates
from gpulease.domain.choice import (
    PlannedGpu,
    Score,
    best_fit,
    choose,
    fits,
    most_free,
    suffice,
    suits,
)
from gpulease.domain.eligibility import blocks
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.host_memory import HostMemory
from gpulease.domain.job import Job, wait_has_expired
from gpulease.domain.lease import Claim
from gpulease.domain.limits import LimitCheck
from gpulease.domain.placement import Placement, bounds_on
from gpulease.domain.preemption import MakingWay, Wanted
from gpulease.domain.queue import PREEMPTIBLE_RANKS, Group, Holding, Need, Order, Queue
from gpulease.domain.queue_options import PolicyName
from gpulease.domain.snapshot import Snapshot, capacity, ledgers

_MOST_REFUSED = 8
"""So many refused jobs of each kind are compared with those after them: the least come early."""


class PlanningPass:
    """The working state of one planning pass."""

    def __init__(self, snapshot: Snapshot, score: Score = best_fit) -> None:
        gpus = ledgers(snapshot)
        blocked, queue = snapshot.blocked, snapshot.queue
        if blocked is None:
            blocked = blocks(snapshot.jobs, snapshot.at)
        if queue is None:
            able = (job for job in snapshot.jobs if job.id not in blocked)
            queue = Queue.of(able, capacity(gpus))
        self.blocked = blocked
        """The jobs that may not start now."""
        self.queue = queue
        """The index of the others."""
        self.gpus = gpus
        self.jobs = snapshot.jobs
        self.policy = snapshot.policy
        self.history = snapshot.history
        self.at = snapshot.at
        self.now_s = snapshot.at.timestamp()
        self.score = score
        ranked = sorted(gpus, key=lambda gpu: (gpu.reading.server, gpu.sort_key))
        self.planned_gpus = [PlannedGpu(gpu, rank) for rank, gpu in enumerate(ranked)]
        self._count_usual_load()
        # A plan of the future, for expected starts, knows windows that have ended by then.
        ahead = [each for each in snapshot.windows if each.ends_at > snapshot.at]
        self.calendar = Calendar(ahead, gpus, self._stays())
        self.grants: dict[JobId, Placement] = {}
        self.reservations: list[Reservation] = []
        self._spoken_for: set[GpuUuid] = set()
        """The GPUs that suit the jobs with a reservation; only others are reserved after them. All
        GPUs suit a claim without a choice: nothing is left then."""
        self._known_ends: tuple[tuple[bool, int] | None, Sequence[End]] = (None, ())
        self.closed: JobId | None = None
        self.limits = LimitCheck.of(
            snapshot.limits,
            snapshot.recent_use,
            (held.job for held in self.queue.holding.values()),
            capacity(gpus),
            snapshot.at,
        )
        self._snapshot = snapshot
        self.usual_wait_s = snapshot.usual_wait_s
        self.making_way = MakingWay(
            self.queue.holding.values(), self.history, self.policy, self.now_s
        )
        self.order = Order(
            self.queue, self.now_s, self.policy, self.history, snapshot.use.at(self.now_s)
        )

    @cached_property
    def host(self) -> HostMemory:
        """What the server has free; few passes meet a claim that leases some of it."""
        holding = (held.job for held in self.queue.holding.values())
        return HostMemory.of(self._snapshot.host, self._snapshot.host_policy, holding)

    def _host_has(self, claim: Claim, ahead: Sequence[Reservation] = ()) -> bool:
        """Tell whether the server has what a claim leases of it, beside these reservations."""
        if not claim.leases_host:
            return True
        return self.host.fits(claim) and all(kept.leaves_host(claim) for kept in ahead)

    def _count_usual_load(self) -> None:
        """Count what is not measured yet, and what a reading cannot show."""
        gpus = {gpu.uuid: gpu for gpu in self.planned_gpus}
        usual = dict.fromkeys(gpus, 0.0)
        settled = self.now_s - self.policy.settling_time.total_seconds()
        for held in self.queue.holding.values():
            load = held.need.utilization(self.history)
            for lease in held.job.leases:
                if lease.gpu in gpus:
                    usual[lease.gpu] += load
                    if held.start_s > settled:
                        gpus[lease.gpu].add_load(load)
        for uuid, load in usual.items():
            gpus[uuid].count_at_least(load)

    # Windows.

    def _stays(self) -> Iterator[Stay]:
        """Yield the jobs on GPUs with their ends: by time limit, or else as predicted."""
        for held in self.queue.holding.values():
            if held.need.limit_s is not None:
                end = latest_end(held, self.now_s, self.policy)
            else:
                end = expected_end(held, self.now_s, self.history)
            ends_at = self.at + timedelta(seconds=end - self.now_s)
            for lease in held.job.leases:
                yield Stay(lease.gpu, held.need.user, ends_at)

    def _latest_starts(self, need: Need) -> Mapping[GpuUuid, float]:
        """Return until when a job may start on the GPUs with windows of others, in seconds."""
        begins = self.calendar.begins_against(need.user)
        longest = need.longest_s(self.history, self.policy) if begins else 0.0
        return {gpu: begin - longest for gpu, begin in begins.items()}

    def _open_to(self, need: Need, gpus: Sequence[PlannedGpu]) -> Sequence[PlannedGpu]:
        """Return the GPUs on which a job may start now as far as windows are concerned."""
        latest = self._latest_starts(need)
        if not latest:
            return gpus
        return [gpu for gpu in gpus if self.now_s <= latest.get(gpu.uuid, math.inf)]

    # The oldest jobs.

    def start_by_class(self) -> None:
        """Start the jobs of each priority class, the highest first.

        A job of a lower class never delays one of a higher class, whatever its age.
        """
        every = (group for groups in self.queue.groups.values() for group in groups.values())
        for rank in sorted({group.need.rank for group in every if not group.need.preemptible}):
            if len(self._spoken_for) < len(self.planned_gpus):
                self._start_the_oldest(rank)
            if self.closed is not None:
                return
            self._start_what_fits((rank,))

    def _start_the_oldest(self, rank: int) -> None:
        """Start the oldest jobs of a class, and reserve GPUs for the first that does not fit.

        If that job asks for particular GPUs, the next one gets a reservation on the others. A job
        that the end of no job helps gets none: it waits for something else.
        """
        tried: set[Claim] = set()
        for job in self._oldest(rank):
            need = self.queue.need(job)
            is_placed = job.id in self.grants or job.id in self.making_way.promised
            passed = is_placed or job.claim in tried
            left = () if passed else self._left_for(job.claim)
            if not left or self.limits.exceeded_by(job) or self._start(job, need):
                continue
            tried.add(job.claim)
            if wait_has_expired(job, self.at) or self._make_way_for(job, need):
                continue
            reservation = self._reserve(job, need, left)
            if reservation is not None:
                self.reservations.append(reservation)
                self._spoken_for.update(gpu.uuid for gpu in left)
                self.limits.keep_for(job)
                if self.policy.name is PolicyName.FIFO:
                    self.closed = job.id
                if self.closed is not None or len(self._spoken_for) == len(self.planned_gpus):
                    return

    def _left_for(self, claim: Claim) -> list[PlannedGpu]:
        """Return the GPUs that suit a claim and none of the jobs with a reservation."""
        return [
            gpu
            for gpu in self.planned_gpus
            if gpu.uuid not in self._spoken_for
            and (not claim.is_choosy or suits(claim, gpu.reading))
        ]

    def _oldest(self, rank: int) -> Iterator[Job]:
        """Return the jobs of a class that may have a reservation, the first in line first."""
        if self.policy.name is not PolicyName.FAIR:
            jobs = self.order.in_order()
            return (job for job in jobs if self.queue.need(job).rank == rank)
        oldest = []
        for turns in self.queue.turns.values():
            for turn in turns[: self.policy.aging_jobs]:
                job = self.queue.jobs[JobId(turn[2])]
                need, age = self.queue.need(job), self.order.age_s(job)
                if need.rank == rank and age >= need.due_after_s(self.history, self.policy):
                    oldest.append((-age, job.id, job))
        return (job for *_, job in sorted(oldest))

    def _reserve(self, job: Job, need: Need, gpus: Sequence[PlannedGpu]) -> Reservation | None:
        hard = self._is_hard(job)
        ends = self._ends(hard=hard)
        if not ends:
            return None
        return reserve(
            job.id,
            self._wanted(need),
            gpus,
            ends,
            hard=hard,
            latest_starts=self._latest_starts(need),
            host=self.host.copy() if job.claim.leases_host else None,
        )

    def _ends(self, *, hard: bool) -> Sequence[End]:
        """Return the ends of the jobs that hold memory, in time; those of the latest call again."""
        known = hard, len(self.grants)
        if self._known_ends[0] == known:
            return self._known_ends[1]
        # A job that uses more than its lease frees that much.
        held_on: dict[JobId, list[tuple[GpuUuid, int]]] = {}
        for gpu in self.gpus:
            for entry in gpu.entries:
                held_on.setdefault(entry.job, []).append((gpu.uuid, entry.committed))
        ends = [
            self._end(held, held_on.get(held.job.id, ()), hard=hard)
            for held in self.queue.holding.values()
        ]
        for started, placement in self.grants.items():
            begun = self.queue.jobs[started]
            held = Holding(begun, self.queue.need(begun), self.now_s)
            ends.append(self._end(held, placement.allocations, hard=hard))
        self._known_ends = known, sorted(ends, key=lambda end: end.latest_s)
        return self._known_ends[1]

    def _end(self, held: Holding, memory: Sequence[tuple[GpuUuid, int]], *, hard: bool) -> End:
        """Return when the memory of a job is expected to be free; soon if it makes way."""
        latest = latest_end(held, self.now_s, self.policy)
        if held.need.preemptible:
            latest = min(latest, self.now_s + grace_to_make_way(held.job, self.policy))
        expected = min(latest, expected_end(held, self.now_s, self.history))
        return End(
            latest if hard else expected,
            latest,
            memory,
            held.job.claim,
            held.need.utilization(self.history),
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
        refused: dict[Hashable, list[Sequence[float]]] = {}
        for each in candidates:
            if self.limits.exceeded_by(each.job) is not None:
                candidates.refused(each, partial(_has_user, each.need.user))
                continue
            # Within a pass, free memory only shrinks: no job that asks for as much fits any more.
            kind, asked = self._asked(each.need) if refused else (None, ())
            if any(all(map(ge, asked, less)) for less in refused.get(kind, ())):
                continue
            if self._start(each.job, each.need):
                candidates.started(each)
                continue
            kind, asked = self._asked(each.need)
            known = refused.setdefault(kind, [])
            if len(known) < _MOST_REFUSED:
                known.append(asked)
            if not candidates.is_last(each):
                candidates.refused(each, self._is_worse_than(each.need))

    def _asked(self, need: Need) -> tuple[Hashable, Sequence[float]]:
        """Return how much a job asks for, of each that matters, and what makes it comparable."""
        claim, limit_s, history = need.claim, need.limit_s, self.history
        user = need.user if self.calendar.begins_against(need.user) else None
        size = claim.memory if isinstance(claim.memory, int) else 0
        part = None if isinstance(claim.memory, int) else claim.memory
        unlimited = self.policy.unlimited_run_time.total_seconds()
        kind = claim.gpus, claim.choice, claim.exclusive, part, user
        asked = (
            size,
            need.run_time(history),
            need.utilization(history),
            math.inf if limit_s is None else limit_s,
            unlimited if limit_s is None else limit_s,
        )
        if claim.leases_host:
            return (*kind, True), (*asked, claim.ram or 0, claim.cpus or 0)
        return kind, asked

    def start_preemptible_jobs(self) -> None:
        """Start the preemptible jobs that fit; they delay no reservation in any case."""
        self._start_what_fits(PREEMPTIBLE_RANKS)

    def _candidates(self, groups: Iterable[Iterable[Group]]) -> Candidates:
        promised = self.making_way.promised
        placed = {*self.grants, *promised} if promised else self.grants
        return Candidates(groups, self.queue.jobs, self.order, placed)

    def in_order(self, reservations: Sequence[Reservation]) -> list[Job]:
        """Return the waiting jobs in the order in which they are tried; start none."""
        first = {kept.job for kept in reservations}
        found = [self.queue.jobs[kept.job] for kept in reservations]
        candidates = self._candidates(groups.values() for groups in self.queue.groups.values())
        for each in candidates:
            if each.job.id not in first:
                found.append(each.job)
            candidates.started(each)
        return found

    def _groups_that_fit(self, ranks: Collection[int]) -> Iterator[Iterable[Group]]:
        """Return the groups of each claim that fits now, reserved memory included."""
        able = [gpu for gpu in self.planned_gpus if gpu.shares(0.0, self.policy)]
        most: dict[Hashable, int] = {}
        for claim, groups in self.queue.groups.items():
            found = [group for group in groups.values() if group.need.rank in ranks]
            if not found:
                continue
            key = claim.gpus, claim.choice
            if key not in most:
                most[key] = most_free(claim, able)
            is_enough = not isinstance(claim.memory, int) or claim.memory <= most[key]
            if is_enough and self._host_has(claim):
                yield found

    def _is_worse_than(self, refused: Need) -> Callable[[Need], bool]:
        """Return a test for needs with the same claim that have to be refused as well.

        They are for at least as long and for at least as much of the time of a GPU. A window may
        stand against one user and not against another.
        """
        if not self._host_has(refused.claim):
            return lambda _: True
        able = (gpu for gpu in self.planned_gpus if gpu.shares(0.0, self.policy))
        fitting = [gpu for gpu in able if fits(refused.claim, gpu)]
        if not suffice(refused.claim, fitting):
            return lambda _: True
        run_time = refused.run_time(self.history)
        utilization = refused.utilization(self.history)
        user = refused.user if self._latest_starts(refused) else None
        return lambda need: (
            (user is None or need.user == user)
            and need.run_time(self.history) >= run_time
            and need.utilization(self.history) >= utilization
        )

    def _start(self, job: Job, need: Need) -> bool:
        """Grant `job` its claim if it fits and delays nobody."""
        ahead = self._ahead_of(need)
        if not self._host_has(job.claim, ahead):
            return False
        utilization = need.utilization(self.history)
        least = job.claim.memory if isinstance(job.claim.memory, int) else 1
        able = [
            gpu
            for gpu in self._open_to(need, self.planned_gpus)
            if gpu.free >= least and fits(job.claim, gpu) and gpu.shares(utilization, self.policy)
        ]
        if ahead:
            able = self._beside(ahead, job.claim, utilization, able)
        calm = [gpu for gpu in able if gpu.is_calm_with(utilization)]
        chosen = choose(job.claim, calm, self.score)
        if chosen is None and len(calm) < len(able):
            chosen = choose(job.claim, able, self.score)
        if chosen is None:
            return False
        self._grant(job, chosen, utilization, ahead)
        return True

    def _ahead_of(self, need: Need) -> Sequence[Reservation]:
        """Return the reservations that a job which starts now may run into."""
        if not self.reservations or need.preemptible:
            return ()
        return [
            kept
            for kept in self.reservations
            if kept.is_outlasted_by(need, self.now_s, self.history, self.policy)
        ]

    def _beside(
        self,
        ahead: Sequence[Reservation],
        claim: Claim,
        utilization: float,
        gpus: Iterable[PlannedGpu],
    ) -> list[PlannedGpu]:
        """Return the GPUs where a claim fits beside the jobs with these reservations."""
        return [
            gpu
            for gpu in gpus
            if all(kept.leaves(gpu.uuid, claim, utilization, self.policy) for kept in ahead)
        ]

    def _grant(
        self,
        job: Job,
        gpus: Sequence[PlannedGpu],
        utilization: float,
        ahead: Sequence[Reservation],
    ) -> None:
        allocations = []
        for gpu in gpus:
            allocations.append((gpu.uuid, gpu.take(job.claim, utilization)))
            for kept in ahead:
                if gpu.uuid in kept.gpus:
                    kept.gpus[gpu.uuid].take(job.claim, utilization)
        if job.claim.leases_host:
            self._take_of_host(job.claim, ahead)
        self.grants[job.id] = Placement(tuple(allocations), bounds_on(job.claim, gpus))
        self._count(job, sum(memory for _, memory in allocations))

    def _take_of_host(self, claim: Claim, ahead: Sequence[Reservation] = ()) -> None:
        for pool in (self.host, *(kept.host for kept in ahead)):
            if pool is not None:
                pool.take(claim)

    def _count(self, job: Job, memory: int) -> None:
        """Count a job that gets so many bytes against the limits and the share of its user."""
        self.limits.start(job, memory)
        self.order.started(job.owner.user, memory)

    # Preemption.

    def keep_promises(self, promised: Mapping[JobId, frozenset[GpuUuid]]) -> None:
        """Start the jobs that others made way for, or keep for them what is being freed."""
        every = self.planned_gpus
        for job_id, gpus in promised.items():
            job = self.queue.jobs.get(job_id)
            if job is None:
                continue
            # Elsewhere it would take what others have been promised.
            self.planned_gpus = [gpu for gpu in every if gpu.uuid in gpus]
            if self.limits.exceeded_by(job) or self._start(job, need := self.queue.need(job)):
                continue
            able = self._open_to(need, self.planned_gpus)
            if self.making_way.keep_for(job_id, self._wanted(need), self.planned_gpus, able):
                self._count_promise(job)
        self.planned_gpus = every

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
        """Have the jobs make way without which a job fits; return whether it fits then."""
        if not self.making_way.is_possible or wait_has_expired(job, self.at):
            return False
        if self.limits.exceeded_by(job) is not None:
            return False
        wanted, able = self._wanted(need), self._open_to(need, self.planned_gpus)
        ahead = self._ahead_of(need)
        if job.claim.leases_host and not all(kept.leaves_host(job.claim) for kept in ahead):
            return False
        if ahead:
            able = self._beside(ahead, job.claim, wanted.utilization, able)
        if not self.making_way.find_way(job.id, wanted, self.planned_gpus, able):
            return False
        self._count_promise(job)
        return True

    def _count_promise(self, job: Job) -> None:
        """Count a job for which others make way as if it had started."""
        kept = self.making_way.promised[job.id]
        sizes = (gpu.allocatable for gpu in self.planned_gpus if gpu.uuid in kept)
        self._count(job, sum(job.claim.memory_on(size) for size in sizes))
        if job.claim.leases_host:
            self._take_of_host(job.claim)

    def _wanted(self, need: Need) -> Wanted:
        utilization = need.utilization(self.history)
        host = self.host if need.claim.leases_host else None
        return Wanted(need.claim, utilization, self.policy, self.score, host)

    # What else the plan says.

    def gives_up(self) -> tuple[JobId, ...]:
        """Return the jobs that have waited for as long as they may."""
        over = (job for job, at in self._longest_waits() if at <= self.at)
        return tuple(sorted(job for job in over if job not in self.grants))

    def next_give_up(self) -> datetime | None:
        """Return when the next job will have waited for as long as it may."""
        return min((at for _, at in self._longest_waits() if at > self.at), default=None)

    def _longest_waits(self) -> Iterator[tuple[JobId, datetime]]:
        yield from self.queue.impatient.items()
        for job in self.jobs if self.blocked else ():
            if job.gives_up_at is not None and job.id in self.blocked:
                yield job.id, job.gives_up_at

    def one_of_each(self) -> tuple[Job, ...]:
        """Return the jobs that still wait: one of each claim and user, and all with a promise."""
        kept = {*self.making_way.promised, *(each.job for each in self.reservations)}
        found = [self.queue.jobs[job] for job in kept - self.grants.keys() & self.queue.jobs.keys()]
        for groups in self.queue.groups.values():
            of_user: dict[str, JobId] = {}
            for group in groups.values():
                if group.need.user not in of_user:
                    left = (turn[2] for turn in group.turns if turn[2] not in self.grants)
                    if (first := next(left, None)) is not None:
                        of_user[group.need.user] = JobId(first)
            found += (self.queue.jobs[job] for job in of_user.values())
        return tuple(found)

    def newly_aging(self) -> tuple[JobId, ...]:
        """Return the jobs that are among the first of their user since the grants."""
        new = (job for job in self._first() if job.queue.aging_since_at is None)
        return tuple(job.id for job in new if self.limits.exceeded_by(job) is None)

    def stops_aging(self) -> tuple[JobId, ...]:
        """Return the jobs that gained age, and are not among the first, blocked or over a limit."""
        first = {job.id: job for job in self._first() if job.queue.aging_since_at is not None}
        over = [job.id for job in first.values() if self.limits.exceeded_by(job) is not None]
        over += (
            job
            for aging in self.queue.aging.values()
            for job in sorted(aging)
            if job not in first and job not in self.grants
        )
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
