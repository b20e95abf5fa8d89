"""The watch: what is done about leases that hold too much, that nobody uses, or that are short.

An observer of the looks at the GPUs. The first look that shows it has the owner told; when it has
gone on for the grace, the job is stopped in the way in which `cancel` stops one.
"""

import logging
from dataclasses import dataclass

from gpulease.domain.idleness import IdleStep
from gpulease.domain.job import Outcome
from gpulease.domain.memory import GpuUuid
from gpulease.domain.overuse import Step
from gpulease.domain.plan import Plan, ledgers
from gpulease.errors import RecordUnwritable
from gpulease.service.idleness import AtRest, RestWatch
from gpulease.service.keeper import Keeper
from gpulease.service.look import Look, snapshot
from gpulease.service.notices import (
    idle_release,
    idle_warning,
    overuse_clear,
    overuse_stop,
    overuse_warning,
    shortfall_warning,
)
from gpulease.service.overuse import (
    HELD_BY_OTHERS,
    IN_USE,
    Finding,
    OveruseWatch,
    record,
    wanted_gpus,
)
from gpulease.service.ports import Clock, InThread
from gpulease.service.shortfall import ShortfallWatch
from gpulease.service.sizes import most_of

_log = logging.getLogger(__name__)


class Overseer:
    """Does what the watch finds to be done."""

    def __init__(
        self,
        keeper: Keeper,
        watch: OveruseWatch,
        rests: RestWatch,
        clock: Clock,
        writing: InThread,
    ) -> None:
        self._shortfalls = ShortfallWatch()
        self._keeper = keeper
        self._watch = watch
        self._rests = rests
        self._clock = clock
        self._writing = writing
        self._wanted: tuple[Plan | None, _Wanted] = (None, _Wanted())

    async def look_for_idleness(self, seen: Look) -> None:
        """Take in one look.

        Raises:
            RecordUnwritable: something could not be done, and is found again.
        """
        keeper, wanted = self._keeper, self._wanted_now().leased
        rests, failures = self._rests, _Failures()
        for found in rests.look(keeper.store.live(), seen, wanted, self._clock.steady()):
            with failures:
                await self._act_on_idle(found)
                rests.settled(found)
        failures.raise_first()

    async def look_for_overuse(self, seen: Look) -> None:
        """Take in one look.

        Raises:
            RecordUnwritable: something could not be done, and is found again.
        """
        keeper, watch = self._keeper, self._watch
        wanted, now = self._wanted_now(), self._clock.steady()
        failures = _Failures()
        for found in watch.look(keeper.store.live(), seen, wanted.leased, now, wanted.in_use):
            with failures:
                await self._act(found)
                watch.settled(found)
        failures.raise_first()
        behind = watch.unrecorded(keeper.store.live())
        if behind:
            await self._writing(lambda: record(keeper.store, behind))

    async def look_for_shortfalls(self, seen: Look) -> None:
        """Take in one look.

        Raises:
            RecordUnwritable: an owner could not be notified, and is at the next look.
        """
        keeper, live, failures = self._keeper, self._keeper.store.live(), _Failures()
        gpus = ledgers(snapshot(live, seen, keeper.policy, {}, seen.at))
        for found in self._shortfalls.look(live, gpus, self._clock.steady()):
            with failures:
                await keeper.tell_owner(found.job.id, shortfall_warning(found))
                self._shortfalls.settled(found)
        failures.raise_first()

    def _wanted_now(self) -> "_Wanted":
        """Return the GPUs for whose memory somebody waits, found once for each plan."""
        plan = self._keeper.plan
        if self._wanted[0] is not plan:
            self._wanted = (
                plan,
                _Wanted(wanted_gpus(plan, HELD_BY_OTHERS), wanted_gpus(plan, IN_USE)),
            )
        return self._wanted[1]

    async def _act(self, found: Finding) -> None:
        job = found.job
        peak = self._keeper.peaks.by_lease.get((job.id, found.lease.gpu), found.used)
        peak = max(peak, found.used)
        keeper = self._keeper
        most = most_of(keeper.seen, keeper.policy, len(job.leases), self._clock.now())
        if found.step is Step.WARN:
            await self._keeper.tell_owner(job.id, overuse_warning(found, peak, most))
            return
        if found.step is Step.CLEAR:
            await self._keeper.tell_owner(job.id, overuse_clear(found))
            return
        detail, notice = overuse_stop(found, peak, most)
        await self._keeper.revoke(job.id, Outcome.OVER_LEASE, detail, notice)
        _log.info("%s (of %s)", notice, job.owner.user)

    async def _act_on_idle(self, found: AtRest) -> None:
        if found.step is IdleStep.WARN:
            await self._keeper.tell_owner(found.job.id, idle_warning(found))
            return
        detail, notice = idle_release(found)
        await self._keeper.revoke(found.job.id, Outcome.IDLE, detail, notice)
        _log.info("%s (of %s)", notice, found.job.owner.user)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The GPUs for whose memory somebody waits: leased to others, or in use at all."""

    leased: frozenset[GpuUuid] = frozenset()
    in_use: frozenset[GpuUuid] = frozenset()


class _Failures:
    """Keeps what could not be put on record for one job from the others, and for the end."""

    def __init__(self) -> None:
        self._first: RecordUnwritable | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, RecordUnwritable):
            return False
        self._first = self._first or error
        return True

    def raise_first(self) -> None:
        if self._first is not None:
            raise self._first
