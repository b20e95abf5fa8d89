"""The handlers of what jobs take: what their hooks report, and asked against used.

What a hook in a job reports, checked against every bound; and how what is known is shown.

It is the word of the job's owner: nothing here is believed beyond being a number of its kind.
"""

import asyncio

from fastapi import Request
from fastapi.responses import Response

from gpulease.domain.gpu import GpuUuid
from gpulease.errors import BadValue, NotAllowed
from gpulease.server.auth import caller_in
from gpulease.server.context import RequestContext
from gpulease.server.job_views import report_view
from gpulease.server.jobs import existing_job, json_response, read_body
from gpulease.server.request_limits import turn_in
from gpulease.server.validation import printable, span, user_of
from gpulease.service.usage import FrameworkReport, PoolReport
from gpulease.wire.requests import PoolUsage, UsageRequest

FRAMEWORKS = frozenset({"tensorflow", "torch", "jax", "cupy"})
_MOST_GPUS = 64
_LARGEST = 1 << 50
_LONGEST_VERSION = 40
_LONGEST_UUID = 96


def report_of(request: UsageRequest) -> FrameworkReport:
    """Return what a hook reports.

    Raises:
        BadValue: it is none.
    """
    if request.framework not in FRAMEWORKS or len(request.gpus) > _MOST_GPUS:
        raise BadValue("cannot read the report: of no framework that is known, or of too many GPUs")
    version = printable(request.version[:_LONGEST_VERSION])
    return FrameworkReport(request.framework, version, tuple(_pool(each) for each in request.gpus))


def _pool(given: PoolUsage) -> PoolReport:
    for size in (given.pool, given.peak, given.limit):
        if size is not None and not 0 <= size <= _LARGEST:
            raise BadValue("cannot read the report: a size in it is out of range")
    uuid = GpuUuid(given.gpu[:_LONGEST_UUID])
    return PoolReport(uuid, given.pool, given.peak, given.limit)


class AccountHandlers:
    """One method for each route; FastAPI reads the parameters from the signatures."""

    def __init__(self, desk: RequestContext) -> None:
        self._desk = desk

    async def usage(self, request: Request, job_id: int) -> Response:
        """Hear what a process of a job says of its pools."""
        caller, job = caller_in(dict(request.scope)), existing_job(self._desk, job_id)
        report = report_of(read_body(UsageRequest, await request.body()))
        if job.holds_memory:
            self._desk.usage.hear(job, caller.pid, report, self._desk.clock.now())
        return Response(status_code=204)

    async def report(
        self, request: Request, user: str | None = None, since: float | None = None
    ) -> Response:
        """Tell what users asked for and used; `since` is seconds ago, and no `user` is all."""
        caller, desk = caller_in(dict(request.scope)), self._desk
        if desk.rights.hides_from(caller) and user != user_of(caller):
            raise NotAllowed(
                "cannot report on others: what they run is hidden here",
                "gpulease report, without --user and --all, is about yourself",
            )
        ago = span("time to look back", since, at_least=1)
        border = None if ago is None else desk.clock.now() - ago
        # A year of jobs takes a while to add up: for one user once at a time, and in a thread.
        await turn_in(dict(request.scope)).for_much()
        found = await asyncio.to_thread(desk.uses, user, border)
        return json_response(report_view(found, border))
