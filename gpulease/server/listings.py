"""Listings of many jobs, drawn away from the event loop, and as little of them anew as can be.

Ten thousand jobs wait as they waited a second ago: what was drawn of each is kept, and only its
place in the line is put in. Who asks while a status is being drawn gets the next one, all together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.plan import WaitReason
from gpulease.server.job_views import Views
from gpulease.service.ports import Clock

T = TypeVar("T")

_PLACE = b',"position":'
"""As in a JobView that is encoded; within a string, quotes would be escaped."""
_NO_JOBS = b'"jobs":[]'
"""As in a StatusView, likewise."""
_MOST_KEPT = 50_000
"""Jobs; a status keeps only those that wait."""
_NOWHERE = b"null"
_DRAWN_BEFORE = tuple[Job, WaitReason | None, bytes, bytes]


class Listings:
    """Draws listings, one after the other."""

    def __init__(self, views: Views, clock: Clock) -> None:
        """`views` is used in a thread, and by nobody else."""
        self._views = views
        self._clock = clock
        self._lane = ThreadPoolExecutor(1, "listings")
        self._drawn: dict[JobId, _DRAWN_BEFORE] = {}
        self._next: asyncio.Task[bytes] | None = None
        self._drawing = asyncio.Lock()

    async def status(self) -> bytes:
        """Return the status of the whole machine, as JSON."""
        if self._next is None:
            self._next = asyncio.create_task(self._next_status(), name="status")
        return await asyncio.shield(self._next)

    async def _next_status(self) -> bytes:
        async with self._drawing:
            self._next = None
            return await self._away(self._status)

    def _status(self) -> bytes:
        live = self._views.live()
        view = msgspec.json.encode(self._views.machine(live, self._clock.now()))
        jobs, self._drawn = self._parts(live)
        head, _, tail = view.partition(_NO_JOBS)
        return b"%b%b%b" % (head + _NO_JOBS[:-1], b",".join(jobs), _NO_JOBS[-1:] + tail)

    async def listing(
        self, find: Callable[[], Iterable[Job]], to_owner: Callable[[Job], bool]
    ) -> bytes:
        """Return those jobs as JSON; `to_owner` tells of which everything may be shown."""

        def draw() -> bytes:
            encoded = (
                msgspec.json.encode(self._views.job(job, to_owner=True))
                if to_owner(job) and job.state is not State.QUEUED
                else self._part(job)
                for job in find()
            )
            return b'{"jobs":[' + b",".join(encoded) + b"]}"

        drawn = await self._away(draw)
        if len(self._drawn) > _MOST_KEPT:
            self._drawn = {}
        return drawn

    async def changed(
        self, drawn: bytes, change: Callable[[bytes, str], bytes], viewer: str
    ) -> bytes:
        """Return what was drawn, as `change` makes it for one user."""
        return await self._away(lambda: change(drawn, viewer))

    def close(self) -> None:
        """Draw no more."""
        self._lane.shutdown(wait=True, cancel_futures=True)

    def _away(self, call: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._lane, call)

    def _parts(self, jobs: Sequence[Job]) -> tuple[list[bytes], dict[JobId, _DRAWN_BEFORE]]:
        """Return each job drawn, and what is worth keeping of that."""
        parts = [self._part(job) for job in jobs]
        kept = {job.id: self._drawn[job.id] for job in jobs if job.id in self._drawn}
        return parts, kept

    def _part(self, job: Job) -> bytes:
        if job.state is not State.QUEUED:
            return msgspec.json.encode(self._views.job(job))
        waiting, place = self._views.waiting(job), self._views.position(job)
        before = self._drawn.get(job.id)
        if before is None or before[0] is not job or before[1] is not waiting:
            head, _, rest = msgspec.json.encode(self._views.job(job)).partition(_PLACE)
            tail = rest[rest.index(b",") :]
            before = self._drawn[job.id] = job, waiting, head + _PLACE, tail
        return b"%b%b%b" % (before[2], _NOWHERE if place is None else b"%d" % place, before[3])
