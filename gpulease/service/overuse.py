"""The watch over jobs that hold more than they were granted: look, decide, remember.

A job that uses a GPU without a lease there is over a lease of zero. A bare context is tolerated
there, and its owner is notified of it once.

What is to be done about a finding is for the caller to do; when that is done, and not before, the
finding is `settled`, so that what failed (a full disk, say) is found again at the next look.

The watch over promised memory that is in use outside any lease: look, decide, remember.

A stranger, or what a driver keeps, can take memory of a GPU that is leased to jobs there. Nothing
can be done about that for them; but their owners are to know why an allocation within the lease
fails. As with the watch over use, a finding is `settled` when its owner has been notified.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId
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

HELD_BY_OTHERS = frozenset({ObstacleKind.LEASED, ObstacleKind.RESERVED})
IN_USE = HELD_BY_OTHERS | {ObstacleKind.UNMANAGED}
_SHORTEST_STEP = timedelta(seconds=1)
Key = tuple[JobId, GpuUuid]


@dataclass(frozen=True, slots=True)
class Finding:
    """A lease about which something is to be done."""

    job: Job
    lease: Lease
    """Of zero bytes on a GPU that the job did not lease."""
    label: str
    """Of the GPU, as people call it."""
    used: int
    """0 where the driver does not say."""
    policy: OverusePolicy
    wanted: bool
    step: OveruseAction
    standing: OveruseState
    """How it stands when that has been done."""

    @property
    def is_leased(self) -> bool:
        """Whether the job has a lease on the GPU at all."""
        return any(lease.gpu == self.lease.gpu for lease in self.job.leases)


def wanted_gpus(plan: Plan | None, why: frozenset[ObstacleKind]) -> frozenset[GpuUuid]:
    """Return the GPUs for which a job waits for one of these reasons, as of the latest plan."""
    if plan is None:
        return frozenset()
    # Of ten thousand that wait, most wait for the same reason, which is one object.
    reasons = {id(waiting): waiting for waiting in plan.waiting.values()}
    return frozenset(
        each.gpu
        for waiting in reasons.values()
        for each in waiting.refusal.obstacles
        if each.kind in why
    )


class OveruseWatch:
    """Remembers how each lease stands from one look to the next."""

    def __init__(self, policy_of: Callable[[Owner], OverusePolicy]) -> None:
        self._policy_of = policy_of
        self._standings: dict[Key, OveruseState] = {}
        self._notified: set[Key] = set()
        """The uses without a lease that their owners know of."""

    def policy_of(self, owner: Owner) -> OverusePolicy:
        """Return what holds for the usual job of a user."""
        return self._policy_of(owner)

    def policy(self, job: Job) -> OverusePolicy:
        """Return what holds for a job: not all that are over are stopped.

        A lease without a job is held by a process that we did not start; and beside an exclusive
        one nobody has a lease whose memory it could take.
        """
        policy = self._policy_of(job.owner)
        if job.holder is not None or job.claim.exclusive:
            return replace(policy, consequence=Consequence.WARN)
        return policy

    def _policy_without_lease(self, job: Job) -> OverusePolicy:
        """Return what holds for a job on a GPU that it did not lease, exclusive or not."""
        policy = self._policy_of(job.owner)
        if job.holder is not None:
            policy = replace(policy, consequence=Consequence.WARN)
        return replace(policy, tolerance=max(policy.tolerance, BARE_CONTEXT))

    def stops(self, job: Job) -> bool:
        """Tell whether a job is stopped that stays over its lease."""
        return self.policy(job).consequence is Consequence.STOP

    def standing(self, job: JobId, gpu: GpuUuid) -> OveruseState:
        """Return how a lease stands since the last look."""
        return self._standings.get((job, gpu), OveruseState())

    def findings(
        self,
        jobs: Sequence[Job],
        seen: Observation,
        wanted: frozenset[GpuUuid],
        now: timedelta,
        in_use: frozenset[GpuUuid] = frozenset(),
    ) -> list[Finding]:
        """Take in one look at the GPUs; return what something is to be done about.

        Args:
            jobs: those that wait or hold memory.
            seen: the look.
            wanted: the GPUs for whose leased memory somebody waits.
            now: when the look was, by a clock that nobody can set.
            in_use: the GPUs for whose memory somebody waits, leased or used without a lease.
        """
        running = [job for job in jobs if job.state is State.ACTIVE]
        self._forget_all_but({job.id for job in running})
        sums, there = seen.used_by_job(), self._without_lease(running, seen)
        labels = {each.uuid: each.label for each in seen.readings}
        found = []
        for job in running:
            policy = self.policy(job)
            for lease in job.leases:
                used = seen.used(job.id, lease.gpu, sums)
                found.append(self._judge(job, lease, used, policy, lease.gpu in wanted, now))
            for gpu, is_there in there.get(job.id, {}).items():
                none = Lease(gpu, 0, job.submitted_at)
                used = seen.used(job.id, gpu, sums)
                policy = self._policy_without_lease(job)
                notify = is_there and (job.id, gpu) not in self._notified
                found.append(self._judge(job, none, used, policy, gpu in in_use, now, notify))
        return [replace(each, label=labels[each.lease.gpu]) for each in found if each is not None]

    def _without_lease(
        self, running: Sequence[Job], seen: Observation
    ) -> Mapping[JobId, Mapping[GpuUuid, bool]]:
        """Return the GPUs that jobs use or used without a lease, and whether they do now."""
        leases = {(job.id, lease.gpu) for job in running for lease in job.leases}
        now = {(job, gpu) for job, gpus in seen.gpus_by_job().items() for gpu in gpus}
        found: dict[JobId, dict[GpuUuid, bool]] = {}
        for job, gpu in sorted((now | self._standings.keys()) - leases):
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
    ) -> Finding | None:
        key = job.id, lease.gpu
        before = self._standings.get(key) or _recorded(lease, policy)
        after, step = judge(lease.memory, used, before, policy, wanted=wanted, now=now)
        if step is OveruseAction.NOTHING and notify:
            step = OveruseAction.WARN
        if step is OveruseAction.NOTHING:
            self._standings[key] = after
            return None
        # Time goes on; what is to be done about it is not done yet.
        self._standings[key] = replace(
            after,
            warned=before.warned,
            warned_at=before.warned_at,
            stopped=before.stopped,
            threatened=before.threatened,
            within_since=before.within_since,
        )
        return Finding(job, lease, "", used or 0, policy, wanted, step, after)

    def settled(self, finding: Finding) -> None:
        """Note that what was to be done about a finding has been done."""
        key = finding.job.id, finding.lease.gpu
        self._standings[key] = finding.standing
        if not finding.is_leased:
            self._notified.add(key)

    def unrecorded(self, jobs: Sequence[Job]) -> Mapping[Key, timedelta | None]:
        """Return how long leases have been over, where the record is behind by some steps.

        A quarter of the grace is what a daemon that is killed may forget.
        """
        behind: dict[Key, timedelta | None] = {}
        for job in jobs:
            for lease in job.leases:
                standing = self._standings.get((job.id, lease.gpu))
                if standing is None or standing.over_for is lease.over_for is None:
                    continue
                step = max(self.policy(job).grace / 4, _SHORTEST_STEP)
                if _is_behind(lease.over_for, standing, step):
                    behind[job.id, lease.gpu] = standing.over_for
        return behind

    def _forget_all_but(self, jobs: set[JobId]) -> None:
        for key in [key for key in self._standings if key[0] not in jobs]:
            del self._standings[key]
        self._notified = {key for key in self._notified if key[0] in jobs}


def _recorded(lease: Lease, policy: OverusePolicy) -> OveruseState:
    """Return how a lease stood when a daemon before this one last wrote it down.

    Its owner has been told. The time in which nobody looked does not count.
    """
    told = lease.over_for is not None
    threatened = told and policy.consequence is Consequence.STOP
    return OveruseState(over_for=lease.over_for, warned=told, threatened=threatened)


def _is_behind(recorded: timedelta | None, standing: OveruseState, step: timedelta) -> bool:
    if standing.over_for is None:
        return recorded is not None
    if recorded is None:
        return standing.warned  # before its owner was told there is nothing to remember
    return standing.over_for - recorded >= step


def record(store: Store, changes: Mapping[Key, timedelta | None]) -> None:
    """Store for how long leases have been over; None: they are not any more."""
    with store.write() as tx:
        for (job, gpu), over_for in changes.items():
            tx.note_over(job, gpu, over_for)


_NOTICEABLE = 256 * MIB
"""What a driver keeps for itself or a display takes comes and goes, and is less than this."""
_ENOUGH_LOOKS = 2
"""A process that begins at the very moment of a look may not be known as its job's yet."""
_OVER_AFTER = timedelta(minutes=5)
"""A shortfall that comes back sooner is the same one, of which the owner knows."""
_Key = tuple[JobId, GpuUuid]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A lease that may not get all that it was granted; sizes in bytes."""

    job: Job
    lease: Lease
    label: str
    """Of the GPU, as people call it."""
    unmanaged: int
    """What is used there outside any lease."""
    promised: int
    """How much of that is leased."""


@dataclass(slots=True)
class _Occurrence:
    seen_at: timedelta
    looks: int = 0
    """How many looks in a row have shown it."""
    notified: bool = False


class ShortfallWatch:
    """Remembers from look to look which leases are short of memory."""

    def __init__(self) -> None:
        self._occurrences: dict[_Key, _Occurrence] = {}

    def findings(
        self, jobs: Sequence[Job], gpus: Sequence[GpuMemory], now: timedelta
    ) -> list[Shortfall]:
        """Take in the ledgers of one look; return the shortfalls that their owners do not know.

        `now` is when the look was, by a clock that nobody can set.
        """
        running = {job.id: job for job in jobs if job.state is State.ACTIVE}
        short = {(each.job.id, each.lease.gpu): each for each in _shortfalls(running, gpus)}
        for key in [key for key in self._occurrences if key[0] not in running]:
            del self._occurrences[key]
        for key, occurrence in self._occurrences.items():
            if key not in short:
                occurrence.looks = 0
        return [each for key, each in short.items() if self._is_news(key, now)]

    def _is_news(self, key: _Key, now: timedelta) -> bool:
        occurrence = self._occurrences.get(key)
        if occurrence is None or now - occurrence.seen_at > _OVER_AFTER:
            occurrence = self._occurrences[key] = _Occurrence(now)
        occurrence.seen_at = now
        occurrence.looks += 1
        return occurrence.looks >= _ENOUGH_LOOKS and not occurrence.notified

    def settled(self, found: Shortfall) -> None:
        """Note that the owner of a lease knows of its shortfall."""
        self._occurrences[found.job.id, found.lease.gpu].notified = True


def _shortfalls(running: dict[JobId, Job], gpus: Sequence[GpuMemory]) -> Iterator[Shortfall]:
    for gpu in gpus:
        promised = _promised_and_taken(gpu)
        if promised <= _NOTICEABLE:
            continue
        for holding in gpu.entries:
            # One that has all of its lease already can lose none of it.
            has_all = holding.used is not None and holding.used >= holding.memory
            job = running.get(holding.job)
            if job is not None and not has_all:
                (lease,) = (each for each in job.leases if each.gpu == gpu.uuid)
                yield Shortfall(job, lease, gpu.reading.label, gpu.unmanaged or 0, promised)


def _promised_and_taken(gpu: GpuMemory) -> int:
    """Return how much of a GPU's memory is both leased and in use outside any lease.

    The margin is leased to nobody: what others use of it is missed by nobody.
    """
    if gpu.allocatable is None or gpu.reading.total is None or gpu.unmanaged is None:
        return 0
    capacity = gpu.reading.total - (gpu.reading.reserved or 0)
    return min(gpu.unmanaged, gpu.leased + gpu.unmanaged - capacity)
