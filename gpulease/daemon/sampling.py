"""What the timers do: look at the GPUs, keep the history, thin it, and wake the loop."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from gpulease.domain.lease import State
from gpulease.domain.plan import ledgers
from gpulease.errors import RecordUnwritable
from gpulease.service.complaints import Complaints
from gpulease.service.keeper import Keeper
from gpulease.service.look import Look, snapshot
from gpulease.service.ports import Clock, InThread
from gpulease.store.occupancy import Occupancy, Sample

Observer = Callable[[Look], Awaitable[None]]
"""Is shown each look that a timer took, in the order of the looks."""

_log = logging.getLogger(__name__)

_MOST_UNWRITTEN = 3600
"""Samples that are held while the disk cannot take them; then the oldest are let go."""


class Sampler:
    """Takes a sample of the GPUs' memory each time it is called, and writes some at a time."""

    def __init__(
        self,
        keeper: Keeper,
        occupancy: Occupancy,
        clock: Clock,
        writing: InThread,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._observers = observers
        self._keeper = keeper
        self._occupancy = occupancy
        self._clock = clock
        self._writing = writing
        self._unwritten: list[Sample] = []
        self._complaints = Complaints(_log)

    async def sample(self) -> None:
        """Look at the GPUs; wake the loop if somebody waits for what may have come free."""
        seen = await self._keeper.look()
        live = self._keeper.store.live()
        now = snapshot(live, seen, self._keeper.policy, {}, seen.at)
        self._unwritten.append(Sample(seen.at, ledgers(now)))
        del self._unwritten[:-_MOST_UNWRITTEN]
        if any(job.state is State.QUEUED for job in live):
            self._keeper.wake()
        for observe in self._observers:
            await self._shown(seen, observe)

    async def _shown(self, seen: Look, observe: Observer) -> None:
        """Show a look to one observer; that it fails keeps nothing from the others."""
        try:
            await observe(seen)
            self._complaints.passed(observe)
        except RecordUnwritable as error:
            _log.debug("%s; what was seen is looked at again", error.message)
        except Exception as error:  # noqa: BLE001 - told in full; the next look is a new try
            self._complaints.say(
                observe, "an observer of the GPUs failed",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip

    async def write(self) -> None:
        """Store the samples taken since the last time."""
        samples, peaks = self._unwritten, dict(self._keeper.peaks.by_lease)
        if not samples:
            return
        self._unwritten = []
        try:
            await self._writing(lambda: self._occupancy.record(samples, peaks))
        except RecordUnwritable as error:
            _log.debug("%s; the history is kept in memory meanwhile", error.message)
            self._unwritten = [*samples, *self._unwritten][-_MOST_UNWRITTEN:]
            return
        self._keeper.peaks.forget_all_but({job.id for job in self._keeper.store.live()})

    async def thin(self) -> None:
        """Fold what has grown old."""
        with contextlib.suppress(RecordUnwritable):
            await self._writing(lambda: self._occupancy.thin(self._clock.now()))


class IdleWatch:
    """Tells when nothing has happened for so long that a personal daemon may leave."""

    def __init__(self, keeper: Keeper, clock: Clock, connections: Callable[[], int]) -> None:
        self._keeper = keeper
        self._clock = clock
        self._connections = connections
        self._busy_at = clock.steady()

    def idle_s(self) -> float:
        """Return for how many seconds there has been neither a live job nor a caller."""
        if self._keeper.store.live() or self._connections():
            self._busy_at = self._clock.steady()
        return (self._clock.steady() - self._busy_at).total_seconds()
