"""The status and the listings of many jobs, drawn in threads of their own.

A status does not wait for a list of ten thousand jobs. The requests for a status that arrive while
one is drawn share the next one.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from itertools import chain, starmap
from typing import Any

import msgspec

from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.server.job_views import JobViews
from gpulease.server.machine_views import MachineViews
from gpulease.server.queue_positions import without
from gpulease.server.view_sources import Recent, redact_job, redact_machine, redact_row
from gpulease.service.explaining import Explainer
from gpulease.service.job_list import JobPage
from gpulease.service.ports import Clock
from gpulease.shared_calls import SharedCalls
from gpulease.units import MIB
from gpulease.wire.jobs import JobList, JobRowView, JobView
from gpulease.wire.machine import UserWaitingView

_LIBC = CDLL(None)
_LARGE = MIB
"""Bytes of a reply."""
_ALL_IN_QUEUE = "gpulease status --queue all --json"


class Listings:
    """Draws the status and listings as JSON, each kind one after the other."""

    def __init__(
        self,
        views: Callable[[Callable[[int], bool]], JobViews],
        machine: MachineViews,
        clock: Clock,
        explainer: Explainer,
        is_stopped: Callable[[int], bool],
    ) -> None:
        """`machine` is used for the status only.

        `views` makes views for one thread, and takes what tells whether a process is stopped.
        """
        self._stopped = Recent(is_stopped, clock)
        self._status_views = views(self._stopped.of)
        self._list_views = views(is_stopped)
        self._machine = machine
        self._clock = clock
        self._explainer = explainer
        self._status_thread = ThreadPoolExecutor(1, "status")
        self._list_thread = ThreadPoolExecutor(1, "listings")
        self._shared = SharedCalls()
        self._counted: tuple[Sequence[Job], list[UserWaitingView]] = (), []
        """The jobs of which those that wait were counted, by user."""

    async def status(self, first: int | None = None, redacted_for: str | None = None) -> bytes:
        """Return the status of the machine, with the `first` rows of the queue or each job.

        For the user `redacted_for`, what others run is hidden.
        """
        loop = asyncio.get_running_loop()
        return await self._shared(
            lambda: loop.run_in_executor(self._status_thread, self._status, first, redacted_for),
            (first, redacted_for),
        )

    def _status(self, first: int | None, viewer: str | None) -> bytes:
        self._explainer.refresh_here()
        self._stopped.begin()
        rows = self._status_views.rows(first)
        # Afterwards, so that no job that starts meanwhile is missing.
        holding = self._machine.holding()
        started = {job.id for job in holding}
        shown = without(rows, started)
        view = self._machine.status(holding, self._clock.now())
        live = self._machine.live()
        if live is not self._counted[0]:
            # While nothing changes, a long queue is gone through once.
            waiting = (job.owner.user for job in live if job.state is State.QUEUED)
            self._counted = live, list(starmap(UserWaitingView, Counter(waiting).items()))
        view.waiting_by_user = self._counted[1]
        # While the queue changes, the rows may be of fewer or more jobs.
        view.waiting = sum(each.jobs for each in view.waiting_by_user)
        view.more = None if len(shown) == view.waiting else _ALL_IN_QUEUE
        view = redact_machine(view, viewer)
        views = self._status_views
        jobs = chain(map(views.job, holding), map(views.row, shown))
        view.jobs = _drawn(redact_job(each, viewer) for each in jobs)
        drawn = msgspec.json.encode(view)
        del view
        self._explainer.start()
        return_memory(drawn)
        return drawn

    async def jobs(
        self,
        find: Callable[[], JobPage],
        to_owner: Callable[[Job], bool],
        redacted_for: str | None = None,
        *,
        brief: bool = False,
    ) -> bytes:
        """Return the page that `find` returns; `to_owner` tells which jobs the caller owns.

        In `brief`, the jobs are a `JobRowView` each.
        """

        def draw() -> bytes:
            self._explainer.refresh_here()
            page, views = find(), self._list_views
            views.begin()
            jobs: Iterable[JobView | JobRowView]
            if brief:
                jobs = (redact_row(views.brief(job), redacted_for) for job in page.jobs)
            else:
                whole = (views.job(job, to_owner=to_owner(job)) for job in page.jobs)
                jobs = (redact_job(job, redacted_for) for job in whole)
            listed = JobList(_drawn(jobs), page.total, page.next)
            drawn = msgspec.json.encode(listed)
            del listed
            self._explainer.start()
            return_memory(drawn)
            return drawn

        return await asyncio.get_running_loop().run_in_executor(self._list_thread, draw)

    def close(self) -> None:
        """End the threads."""
        for thread in (self._status_thread, self._list_thread):
            thread.shutdown(wait=True, cancel_futures=True)


def return_memory(reply: bytes) -> None:
    """Return what a large reply took to the system: glibc's malloc(3) would keep it.

    The pieces of a list of 10,000 jobs lie among small objects that stay, 26 MiB of them.
    """
    trim = getattr(_LIBC, "malloc_trim", None) if len(reply) > _LARGE else None
    if trim is not None:
        trim(0)


def _drawn(jobs: Iterable[JobView | JobRowView]) -> list[Any]:
    """Return jobs as JSON, one by one: ten thousand views would take much memory.

    Each begins a line, so that people and grep can read a long listing.
    """
    return [msgspec.Raw(b"\n" + msgspec.json.encode(each)) for each in jobs]
