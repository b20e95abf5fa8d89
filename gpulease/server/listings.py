"""Listings of many jobs, drawn in a thread of their own: ten thousand jobs take a while.

The requests for a status that arrive while one is drawn share the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec

from gpulease.domain.job import Job
from gpulease.server.job_views import JobViews
from gpulease.server.machine_views import MachineViews
from gpulease.server.redaction import redact_list, redact_status
from gpulease.service.explaining import Explainer
from gpulease.service.ports import Clock
from gpulease.wire.jobs import JobList
from gpulease.wire.machine import StatusView

T = TypeVar("T")


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
        self._next: asyncio.Task[_Status] | None = None
        self._drawing = asyncio.Lock()

    async def status(self, redacted_for: str | None = None) -> bytes:
        """Return the status of the machine; `redacted_for` a user, with what others run hidden."""
        if self._next is None:
            self._next = asyncio.create_task(self._next_status(), name="status")
        status = await asyncio.shield(self._next)
        if redacted_for is None:
            return status.json
        return await self._in_thread(
            lambda: msgspec.json.encode(redact_status(status.view, redacted_for))
        )

    async def _next_status(self) -> _Status:
        async with self._drawing:
            self._next = None
            return await self._in_thread(self._status)

    def _status(self) -> _Status:
        self._explainer.refresh_here()
        live = self._machine.live()
        view = self._machine.status(live, self._clock.now())
        view.jobs = [self._jobs.job(job) for job in live]
        drawn = _Status(view, msgspec.json.encode(view))
        self._explainer.start()
        return drawn

    async def jobs(
        self,
        find: Callable[[], Iterable[Job]],
        to_owner: Callable[[Job], bool],
        redacted_for: str | None = None,
    ) -> bytes:
        """Return the jobs that `find` returns; `to_owner` tells which the caller owns."""

        def draw() -> bytes:
            self._explainer.refresh_here()
            view = JobList([self._jobs.job(job, to_owner=to_owner(job)) for job in find()])
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
