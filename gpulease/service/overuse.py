"""Finds jobs that exceed their leases, and leases that are short of memory.

A job that uses a GPU without a lease there exceeds a lease of zero. A bare CUDA context is
tolerated, and its owner is notified once.

A lease is short if its memory is in use without a lease, by an unmanaged process or the driver.
gpulease cannot change that, but tells the owner why an allocation within the lease may fail.

The caller acts on the findings and calls `settled` after each. An action that failed (with a full
disk, say) is found again in the next observation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from gpulease.domain.gpu import EXCESS_TOLERANCE, GpuMemory, GpuUuid, JobId
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Lease, State
from gpulease.domain.overuse import (
    BARE_CONTEXT,
    Consequence,
    OveruseAction,
    OverusePolicy,
    OveruseState,
    judge,
)
from gpulease.domain.placement import ObstacleKind
from gpulease.domain.plan import Plan
from gpulease.service.observation import Observation
from gpulease.service.ports import Store
from gpulease.units import MIB

HELD_BY_OTHERS = frozenset({ObstacleKind.LEASED, ObstacleKind.EXCESS, ObstacleKind.RESERVED})
IN_USE = HELD_BY_OTHERS | {ObstacleKind.UNMANAGED}
_SHORTEST_STEP = timedelta(seconds=1)
Key = tuple[JobId, GpuUuid]


@dataclass(frozen=True, slots=True)
class Finding:
    """A lease that needs an action."""

    job: Job
    lease: Lease
    """Has zero bytes on a GPU that the job did not lease."""
    label: str
    """The index of the GPU, or another short name."""
    used: int
    """0 if unknown."""
    policy: OverusePolicy
    wanted: bool
    action: OveruseAction
    state: OveruseState
    """The state after the action."""
    overhead: int = 0
    """Bytes over the lease that frameworks hold beside their pools (`excess_overhead`)."""

    @property
    def limit(self) -> int:
        """The bytes that the job may hold now."""
        return self.lease.memory if self.wanted else self.lease.most

    @property
    def is_asked_back(self) -> bool:
        """Whether the job is asked to give back what it holds above its guarantee."""
        return self.wanted and self.lease.memory_bound is not None

    @property
    def is_leased(self) -> bool:
        """Whether the job has a lease on the GPU at all."""
        return any(lease.gpu == self.lease.gpu for lease in self.job.leases)


def wanted_gpus(plan: Plan | None, why: frozenset[ObstacleKind]) -> frozenset[GpuUuid]:
    """Return the GPUs that a queued job waits for because of one of these reasons."""
    return frozenset() if plan is None else plan.wanted(why)


def asked_back(plan: Plan | None) -> frozenset[Key]:
    """Return the leases of which a queued job needs what is used above the guarantee."""
    return frozenset() if plan is None else plan.asked_back()


def overdrawn(gpus: Iterable[GpuMemory]) -> frozenset[Key]:
    """Return the leases of which other leases need what is used above the guarantee.

    The jobs of those leases do not use all of it yet, and would find less than they have leased.
    """
    found: set[Key] = set()
    for gpu in gpus:
        if gpu.allocatable is not None and gpu.unmanaged is not None:
            outside = gpu.unmanaged + gpu.reading.leased_elsewhere
            missing = gpu.committed + outside - gpu.allocatable
            every = [entry for entry in gpu.entries if entry.excess and missing > 0]
            found.update((entry.job, gpu.uuid) for entry in gpu.excess_of(missing) or every)
    return frozenset(found)


class OveruseWatch:
    """Tracks the overuse of each lease from one observation to the next."""

    def __init__(
        self,
        policy_of: Callable[[Owner], OverusePolicy],
        went_over: Callable[[Job], None] = lambda _: None,
        overhead: Callable[[Job, Lease, Observation], int] = lambda *_: 0,
    ) -> None:
        """`went_over` is called when a job goes over a lease.

        `overhead` returns the bytes over a lease that do not cause a stop (`excess_overhead`).
        """
        self._policy_of = policy_of
        self._went_over = went_over
        self._overhead = overhead
        self._states: dict[Key, OveruseState] = {}
        self._notified: set[Key] = set()
        """Uses without a lease that their owners were notified of."""

    def policy_of(self, owner: Owner) -> OverusePolicy:
        """Return the policy for an ordinary job of a user."""
        return self._policy_of(owner)

    def policy(self, job: Job) -> OverusePolicy:
        """Return the policy for a job.

        Two kinds of leases cause warnings only: those without a job, since gpulease did not start
        their process, and exclusive ones, since no other lease on the GPU can be short of memory.
        """
        policy = self._usual_policy(job)
        if job.holder is not None or job.claim.exclusive:
            return replace(policy, consequence=Consequence.WARN)
        return policy

    def _usual_policy(self, job: Job) -> OverusePolicy:
        policy = self._policy_of(job.owner)
        # The jobs that wait for the rest of the GPU are in the queue of Slurm, not in ours.
        return policy if job.slurm is None else replace(policy, elastic=False)

    def _policy_without_lease(self, job: Job) -> OverusePolicy:
        """Return the policy for a job on a GPU that it did not lease, exclusive or not."""
        policy = self._usual_policy(job)
        if job.holder is not None:
            policy = replace(policy, consequence=Consequence.WARN)
        return replace(policy, tolerance=max(policy.tolerance, BARE_CONTEXT))

    def stops(self, job: Job) -> bool:
        """Return whether the job is stopped if it stays over its lease."""
        return self.policy(job).consequence is Consequence.STOP

    def state(self, job: JobId, gpu: GpuUuid) -> OveruseState:
        """Return the state of a lease since the last observation."""
        return self._states.get((job, gpu), OveruseState())

    def findings(
        self,
        jobs: Sequence[Job],
        seen: Observation,
        wanted: frozenset[GpuUuid],
        now: timedelta,
        in_use: frozenset[GpuUuid] = frozenset(),
        needed: frozenset[Key] = frozenset(),
    ) -> list[Finding]:
        """Return the leases that need an action after one observation.

        Args:
            jobs: those that hold memory.
            seen: the observation.
            wanted: the GPUs with leased memory that a queued job waits for.
            now: the time of the observation by the steady clock.
            in_use: the GPUs with any used memory that a queued job waits for.
            needed: the leases with ranges of which others need what is above the guarantee.
        """
        running = [job for job in jobs if job.state is State.ACTIVE]
        ids = {job.id for job in running}
        for key in [key for key in self._states if key[0] not in ids]:
            del self._states[key]
        self._notified = {key for key in self._notified if key[0] in ids}
        there = self._without_lease(running, seen)
        found = []
        for job in running:
            policy = self.policy(job)
            for lease in job.leases:
                used, rule, is_wanted = seen.used(job.id, lease.gpu), policy, lease.gpu in wanted
                if lease.memory_bound is not None:
                    # Its own bound takes the place of `elastic`.
                    is_wanted = (job.id, lease.gpu) in needed
                    tolerance = EXCESS_TOLERANCE if is_wanted else policy.tolerance
                    rule = replace(policy, elastic=False, tolerance=tolerance)
                is_over = used is not None and used > lease.most + policy.tolerance
                overhead = self._overhead(job, lease, seen) if is_over else 0
                found.append(self._judge(job, lease, used, rule, is_wanted, now, overhead=overhead))
            for gpu, is_there in there.get(job.id, {}).items():
                none = Lease(gpu, 0, job.submitted_at)
                used = seen.used(job.id, gpu)
                policy = self._policy_without_lease(job)
                notify = is_there and (job.id, gpu) not in self._notified
                found.append(self._judge(job, none, used, policy, gpu in in_use, now, notify))
        return [
            replace(each, label=seen.by_gpu[each.lease.gpu].label)
            for each in found
            if each is not None
        ]

    def _without_lease(
        self, running: Sequence[Job], seen: Observation
    ) -> Mapping[JobId, Mapping[GpuUuid, bool]]:
        """Return the GPUs that jobs use or used without a lease, and whether they use them now."""
        leases = {(job.id, lease.gpu) for job in running for lease in job.leases}
        # The processes on a GPU that MIG divides are on one of its MIG devices.
        now = {key for key in seen.processes if not seen.by_gpu[key[1]].mig_mode}
        found: dict[JobId, dict[GpuUuid, bool]] = {}
        for job, gpu in sorted((now | self._states.keys()) - leases):
            found.setdefault(job, {})[gpu] = (job, gpu) in now
        return found

    def _judge(
        self,
        job: Job,
        lease: Lease,
        used: int | None,
        policy: OverusePolicy,
        wanted: bool,
        now: timedelta,
        notify: bool = False,
        overhead: int = 0,
    ) -> Finding | None:
        key, limit = (job.id, lease.gpu), lease.memory if wanted else lease.most
        before = self._states.get(key) or _recorded(lease, policy)
        after, action = judge(
            limit, used, before, policy, wanted=wanted, now=now, overhead=overhead
        )
        if before.over_for is None and after.over_for is not None:
            self._went_over(job)
        if action is OveruseAction.NOTHING and notify:
            action = OveruseAction.WARN
        if action is OveruseAction.NOTHING:
            self._states[key] = after
            return None
        # The time passes, but the action has not happened yet.
        self._states[key] = replace(
            after,
            warned=before.warned,
            warned_at=before.warned_at,
            stopped=before.stopped,
            threatened=before.threatened,
            within_since=before.within_since,
        )
        return Finding(job, lease, "", used or 0, policy, wanted, action, after, overhead)

    def settled(self, finding: Finding) -> None:
        """Note that the action for a finding has been taken."""
        key = finding.job.id, finding.lease.gpu
        self._states[key] = finding.state
        if not finding.is_leased:
            self._notified.add(key)

    def unrecorded(self, jobs: Sequence[Job]) -> Mapping[Key, timedelta | None]:
        """Return for how long leases have been exceeded, where the database is out of date.

        A killed daemon loses at most a quarter of the grace.
        """
        behind: dict[Key, timedelta | None] = {}
        for job in jobs:
            for lease in job.leases:
                state = self._states.get((job.id, lease.gpu))
                if state is None or state.over_for is lease.over_for is None:
                    continue
                step = max(self.policy(job).grace / 4, _SHORTEST_STEP)
                if _is_behind(lease.over_for, state, step):
                    behind[job.id, lease.gpu] = _counted(state)
        return behind


def _recorded(lease: Lease, policy: OverusePolicy) -> OveruseState:
    """Return the state of a lease that an earlier daemon recorded.

    Its owner has been notified. The time without a daemon does not count.
    """
    notified = lease.over_for is not None
    threatened = notified and policy.consequence is Consequence.STOP
    return OveruseState(over_for=lease.over_for, warned=notified, threatened=threatened)


def _counted(state: OveruseState) -> timedelta | None:
    """Return the time over the lease that counts after a restart of the daemon."""
    return None if state.is_excused else state.over_for


def _is_behind(recorded: timedelta | None, state: OveruseState, step: timedelta) -> bool:
    over_for = _counted(state)
    if over_for is None:
        return recorded is not None
    if recorded is None:
        return state.warned  # nothing to record before the first notice
    return over_for - recorded >= step


def record(store: Store, changes: Mapping[Key, timedelta | None]) -> None:
    """Store for how long leases have been exceeded; None: they no longer are."""
    with store.write() as tx:
        for (job, gpu), over_for in changes.items():
            tx.note_over(job, gpu, over_for)


_NOTICEABLE = 256 * MIB
"""The memory of the driver and of a display varies by less than this."""
_ENOUGH_OBSERVATIONS = 2
"""A process that starts during an observation may not be attributed to its job yet."""
_OVER_AFTER = timedelta(minutes=5)
"""A shortfall that returns sooner is the same one, and causes no second notice."""
_Key = tuple[JobId, GpuUuid]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A lease that may not get all of its memory; sizes in bytes."""

    job: Job
    lease: Lease
    label: str
    """The index of the GPU, or another short name."""
    unmanaged: int
    """Memory in use on the GPU without a lease."""
    promised: int
    """How much of that leases need."""


@dataclass(slots=True)
class _Occurrence:
    seen_at: timedelta
    in_a_row: int = 0
    """Number of consecutive observations that show it."""
    notified: bool = False


class ShortfallWatch:
    """Tracks the leases that are short of memory from one observation to the next."""

    def __init__(self) -> None:
        self._occurrences: dict[_Key, _Occurrence] = {}

    def findings(
        self, jobs: Sequence[Job], gpus: Sequence[GpuMemory], now: timedelta
    ) -> list[Shortfall]:
        """Return the new shortfalls, from the ledgers of one observation.

        `now` is the time of the observation by the steady clock.
        """
        running = {job.id: job for job in jobs if job.state is State.ACTIVE}
        short = {(each.job.id, each.lease.gpu): each for each in _shortfalls(running, gpus)}
        for key in [key for key in self._occurrences if key[0] not in running]:
            del self._occurrences[key]
        for key, occurrence in self._occurrences.items():
            if key not in short:
                occurrence.in_a_row = 0
        return [each for key, each in short.items() if self._is_new(key, now)]

    def _is_new(self, key: _Key, now: timedelta) -> bool:
        occurrence = self._occurrences.get(key)
        if occurrence is None or now - occurrence.seen_at > _OVER_AFTER:
            occurrence = self._occurrences[key] = _Occurrence(now)
        occurrence.seen_at = now
        occurrence.in_a_row += 1
        return occurrence.in_a_row >= _ENOUGH_OBSERVATIONS and not occurrence.notified

    def settled(self, found: Shortfall) -> None:
        """Note that the owner was notified of a shortfall."""
        self._occurrences[found.job.id, found.lease.gpu].notified = True


def _shortfalls(running: dict[JobId, Job], gpus: Sequence[GpuMemory]) -> Iterator[Shortfall]:
    for gpu in gpus:
        promised = _leased_and_in_use(gpu)
        if promised <= _NOTICEABLE:
            continue
        for holding in gpu.entries:
            # A job that already uses all of its lease cannot lose any.
            has_all = holding.used is not None and holding.used >= holding.memory
            job = running.get(holding.job)
            if job is not None and not has_all:
                (lease,) = (each for each in job.leases if each.gpu == gpu.uuid)
                yield Shortfall(job, lease, gpu.reading.label, gpu.unmanaged or 0, promised)


def _leased_and_in_use(gpu: GpuMemory) -> int:
    """Return how much of a GPU's memory is leased and also in use without a lease.

    Use of the margin takes nothing from a lease.
    """
    if gpu.allocatable is None or gpu.reading.total is None or gpu.unmanaged is None:
        return 0
    capacity = gpu.reading.total - (gpu.reading.reserved or 0)
    return min(gpu.unmanaged, gpu.leased + gpu.unmanaged - capacity)
