"""The handlers of what jobs take: what their hooks report, and asked against used."""

import asyncio

from fastapi import Request
from fastapi.responses import Response

from gpulease.errors import NotAllowed
from gpulease.server.desk import Desk
from gpulease.server.fields import span, user_of
from gpulease.server.handlers import existing_job, json_response, read_body
from gpulease.server.peer import caller_in
from gpulease.server.turns import turn_in
from gpulease.server.usage import report_of
from gpulease.server.views import report_view
from gpulease.wire import UsageRequest


class AccountHandlers:
    """One method for each route; FastAPI reads the parameters from the signatures."""

    def __init__(self, desk: Desk) -> None:
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
