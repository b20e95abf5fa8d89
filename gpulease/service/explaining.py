"""Keeps what a recent plan says about waiting jobs: their order and predicted starts.

That takes a while in a long queue, so it is computed on request, in a thread, and for some plans
only. An answer does not wait for it where an earlier one is good enough.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

from gpulease.domain.explain import Explanations, Suggestion, suggestions
from gpulease.domain.forecast import Start
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.plan import Plan
from gpulease.domain.queue import Queue
from gpulease.domain.snapshot import capacity
from gpulease.service.ports import Clock

_RESTS = 30
"""So many times as long as a computation took, its result is used for newer plans too: answers take
3% of a processor at most for them."""
_OUTDATED_AFTER = timedelta(seconds=5)
"""An answer waits for newer explanations if the latest are of a plan so long ago."""
_SHORT_S = 0.005
"""An answer waits for computations that take no longer."""
_LONGEST_WAIT_S = 2.0
_PATIENCE_S = 0.2
"""The same where there are earlier explanations."""


class Explainer:
    """Explains the latest plan, or one shortly before. For any thread."""

    def __init__(self, plan: Callable[[], Plan | None], clock: Clock) -> None:
        """`plan` returns the latest plan."""
        self.latest: Explanations | None = None
        self.first_starts: Mapping[JobId, Start] = {}
        """The first predicted start of each waiting job."""
        self._plan = plan
        self._clock = clock
        self._took_s = 0.0
        """CPU time of the latest computation."""
        self._rests_until = timedelta(0)
        self._starting = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "explanations")
        self._computing: Future[None] | None = None
        self._index = Queue(0)
        """Of the waiting jobs of the latest; used in the thread only."""

    async def refresh(self, job: JobId) -> None:
        """Explain the latest plan if that is due; wait if it is short or does not know the job."""
        is_awaited, computing = self._is_awaited(job), self.start()
        if is_awaited and computing is not None:
            await asyncio.wait({ended := asyncio.wrap_future(computing)}, timeout=_LONGEST_WAIT_S)
            if ended.done():
                ended.result()

    def refresh_here(self) -> None:
        """Explain the latest plan if that is due and short, or if there is nothing recent."""
        if self._is_awaited() and (computing := self.start()) is not None:
            with contextlib.suppress(TimeoutError):
                computing.result(_LONGEST_WAIT_S if self.latest is None else _PATIENCE_S)

    def start(self) -> Future[None] | None:
        """Begin to explain the latest plan, unless that is not due; all share the result."""
        with self._starting:
            if self._computing is None or self._computing.done():
                plan = self._due()
                self._computing = None if plan is None else self._thread.submit(self._explain, plan)
            return self._computing

    def _explain(self, plan: Plan) -> None:
        begun_s = self._clock.thread_s()
        largest = capacity(plan.gpus)
        if self._index.capacity != largest:
            self._index = Queue(largest)
        self._index.update(job for job in plan.after.jobs if job.id not in plan.blocked)
        latest = Explanations(plan, self._index)
        # Replaced, not changed, for readers in other threads.
        self.first_starts = {**latest.starts} | {
            job.id: self.first_starts[job.id] for job in latest.order if job.id in self.first_starts
        }
        self.latest = latest
        self._took_s = self._clock.thread_s() - begun_s
        self._rests_until = self._clock.steady() + timedelta(seconds=_RESTS * self._took_s)

    async def suggestions(self, job: Job, smallest: int) -> Sequence[Suggestion]:
        """Return the changes with which a waiting job would start now.

        `smallest` is the smallest lease, in bytes.
        """
        plan = self._plan()
        if plan is None or job.state is not State.QUEUED:
            return ()
        return await asyncio.to_thread(suggestions, plan, job, smallest)

    def _is_awaited(self, job: JobId | None = None) -> bool:
        """Tell whether an answer, about `job` or all jobs, waits for newer explanations."""
        plan, latest = self._plan(), self.latest
        if plan is None or latest is None or self._took_s <= _SHORT_S:
            return True
        is_unknown = job is not None and job > latest.newest
        return is_unknown or plan.snapshot.at - latest.plan.snapshot.at >= _OUTDATED_AFTER

    def _due(self) -> Plan | None:
        """Return the plan to explain; None if there is no need."""
        plan, latest = self._plan(), self.latest
        if plan is None or (latest is not None and latest.plan is plan):
            return None
        is_short = latest is None or self._took_s <= _SHORT_S
        return plan if is_short or self._clock.steady() >= self._rests_until else None
