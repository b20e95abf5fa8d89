"""Listings of many jobs, drawn in a thread of their own: ten thousand jobs take a while.

The requests for a status that arrive while one is drawn share the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec

from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.server.job_queries import JobPage
from gpulease.server.job_views import JobViews
from gpulease.server.machine_views import MachineViews
from gpulease.server.redaction import redact_list, redact_status
from gpulease.service.explaining import Explainer
from gpulease.service.ports import Clock
from gpulease.wire.jobs import JobList
from gpulease.wire.machine import StatusView

T = TypeVar("T")

_ALL_IN_QUEUE = "gpulease status --queue all --json"


class _Status(NamedTuple):
    view: StatusView
    json: bytes


class Listings:
    """Draws listings as JSON, one after the other."""

    def __init__(
        self, jobs: JobViews, machine: MachineViews, clock: Clock, explainer: Explainer
    ) -> None:
        """`jobs` and `machine` are used in the thread of the listings only."""
        self._jobs = jobs
        self._machine = machine
        self._clock = clock
        self._explainer = explainer
        self._thread = ThreadPoolExecutor(1, "listings")
        self._next: dict[int | None, asyncio.Task[_Status]] = {}
        """The statuses to draw next, by how much of the queue they show."""
        self._drawing = asyncio.Lock()

    async def status(self, first: int | None = None, redacted_for: str | None = None) -> bytes:
        """Return the status of the machine, with the `first` jobs of the queue or all of them.

        For the user `redacted_for`, what others run is hidden.
        """
        if first not in self._next:
            self._next[first] = asyncio.create_task(self._next_status(first), name="status")
        status = await asyncio.shield(self._next[first])
        if redacted_for is None:
            return status.json
        return await self._in_thread(
            lambda: msgspec.json.encode(redact_status(status.view, redacted_for))
        )

    async def _next_status(self, first: int | None) -> _Status:
        async with self._drawing:
            del self._next[first]
            return await self._in_thread(lambda: self._status(first))

    def _status(self, first: int | None) -> _Status:
        self._explainer.refresh_here()
        live = self._machine.live()
        view = self._machine.status(live, self._clock.now())
        holding = [job for job in live if job.state is not State.QUEUED]
        waiting = [job for job in live if job.state is State.QUEUED]
        shown = self._jobs.in_order(waiting)[:first]
        view.jobs = [self._jobs.job(job) for job in (*holding, *shown)]
        view.waiting = len(waiting)
        view.more = None if len(shown) == len(waiting) else _ALL_IN_QUEUE
        drawn = _Status(view, msgspec.json.encode(view))
        self._explainer.start()
        return drawn

    async def jobs(
        self,
        find: Callable[[], JobPage],
        to_owner: Callable[[Job], bool],
        redacted_for: str | None = None,
    ) -> bytes:
        """Return the page that `find` returns; `to_owner` tells which jobs the caller owns."""

        def draw() -> bytes:
            self._explainer.refresh_here()
            page = find()
            jobs = [self._jobs.job(job, to_owner=to_owner(job)) for job in page.jobs]
            view = JobList(jobs, page.total, page.next)
            drawn = msgspec.json.encode(
                view if redacted_for is None else redact_list(view, redacted_for)
            )
            self._explainer.start()
            return drawn

        return await self._in_thread(draw)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _in_thread(self, call: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call)
