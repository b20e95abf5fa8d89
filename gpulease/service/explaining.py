"""Keeps what a recent plan says about waiting jobs: their order and predicted starts.

That takes a while in a long queue, so it is computed on request, in a thread, and not for each
plan.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from gpulease.domain.explain import Explanations, Suggestion, suggestions
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.plan import Plan
from gpulease.service.ports import Clock

_RESTS = 5
"""So many times as long as a computation took, its result is used for newer plans too."""


class Explainer:
    """Explains the latest plan, or one shortly before. For any thread."""

    def __init__(self, plan: Callable[[], Plan | None], clock: Clock) -> None:
        """Take the function that returns the latest plan."""
        self.latest: Explanations | None = None
        self.first_starts: Mapping[JobId, datetime] = {}
        """The first predicted start of each waiting job."""
        self._plan = plan
        self._clock = clock
        self._rests_until = timedelta(0)
        self._computing = threading.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Explain the latest plan in a thread, if that is due; all who wait share the result."""
        if self._due() is None:
            return
        if self._refreshing is None or self._refreshing.done():
            refreshing = asyncio.to_thread(self.refresh_here)
            self._refreshing = asyncio.create_task(refreshing, name="explanations")
        await asyncio.shield(self._refreshing)

    def refresh_here(self) -> None:
        """Explain the latest plan in this thread, if that is due."""
        with self._computing:
            plan = self._due()
            if plan is None:
                return
            begun = self._clock.steady()
            self.latest = latest = Explanations(plan)
            starts = {job: start.at for job, start in latest.starts.items()}
            # Replaced, not changed, for readers in other threads.
            self.first_starts = starts | {
                job.id: self.first_starts[job.id]
                for job in latest.order
                if job.id in self.first_starts
            }
            ended = self._clock.steady()
            self._rests_until = ended + _RESTS * (ended - begun)

    async def suggestions(self, job: Job, smallest: int) -> Sequence[Suggestion]:
        """Return the changes with which a waiting job would start now.

        `smallest` is the smallest lease, in bytes.
        """
        plan = self._plan()
        if plan is None or job.state is not State.QUEUED:
            return ()
        return await asyncio.to_thread(suggestions, plan, job, smallest)

    def _due(self) -> Plan | None:
        """Return the plan to explain; None if there is no need."""
        plan, latest = self._plan(), self.latest
        if plan is None or (latest is not None and latest.plan is plan):
            return None
        rests = latest is not None and self._clock.steady() < self._rests_until
        return None if rests else plan
