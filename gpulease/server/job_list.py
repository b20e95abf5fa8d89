"""The routes that list jobs: of any state in full, and ended ones in brief."""

import asyncio
from collections.abc import Container
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, cast

from msgspec import Meta

from gpulease.domain.gpu import LARGEST_ID
from gpulease.domain.job import Outcome
from gpulease.domain.lease import State
from gpulease.errors import BadValue
from gpulease.server.context import Request, RequestContext
from gpulease.server.messages import JSON, Response, json_response
from gpulease.server.reasons import shell_status
from gpulease.server.validation import LookBack, NamePattern
from gpulease.server.view_sources import HIDDEN, instant
from gpulease.service.job_list import FAILED, MOST_LISTED, EndedJob, JobQuery
from gpulease.wire.jobs import JobKind
from gpulease.wire.jobs import Outcome as WireOutcome
from gpulease.wire.usage import HistoryView, PastJobView

_MOST_IN_BRIEF = 1000
_Number = Annotated[int, Meta(ge=0, le=LARGEST_ID)]
_ENDS = (*Outcome, FAILED)
_MICROSECONDS = 1_000_000


class JobListHandlers:
    """One method for each route. Both take the same filters, and have the same pages."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    async def jobs(  # noqa: PLR0913, PLR0917  each is a parameter of the query
        self,
        request: Request,
        user: str | None = None,
        state: str | None = None,
        all: bool = False,
        array: _Number | None = None,
        index: _Number | None = None,
        newest: bool = False,
        after: _Number | None = None,
        limit: Annotated[int, Meta(ge=1, le=MOST_LISTED)] | None = None,
        name: NamePattern | None = None,
        since: LookBack | None = None,
        brief: bool = False,
    ) -> Response:
        """List jobs, oldest first: those that wait or hold memory, or all, or those of an array.

        `state` is that of a job, the way it ended, or "failed" for any end without success. With
        `limit`, one page of them: those that follow the job `after`. With `name`, a shell pattern,
        those with such a name. With `since`, jobs that ended so many seconds ago or earlier are
        left out. In `brief`, jobs have the fields of `JobRowView` only.
        """
        caller, context = request.caller, self._context
        query = JobQuery(user, state, all, array, index, newest, after, limit, name)
        query = self._checked(request, query, since, {*State, *_ENDS})
        if index is None:
            await request.slot.for_expensive()
        content = await context.listings.jobs(
            lambda: context.scheduler.store.jobs(query),
            lambda job: context.rights.owns(caller, job),
            context.redacted_for(caller),
            brief=brief,
        )
        return Response(content, media_type=JSON)

    async def history(
        self,
        request: Request,
        user: str | None = None,
        since: LookBack | None = None,
        outcome: str | None = None,
        name: NamePattern | None = None,
        before: _Number | None = None,
        limit: Annotated[int, Meta(ge=1, le=_MOST_IN_BRIEF)] = _MOST_IN_BRIEF,
    ) -> Response:
        """List ended jobs in brief, the newest first: those with ids below `before`.

        The same as /jobs with newest=true and `outcome` as the state.
        """
        query = JobQuery(
            user, outcome or State.ENDED, newest=True, after=before, limit=limit, name=name
        )
        query = self._checked(request, query, since, {State.ENDED, *_ENDS})
        await request.slot.for_expensive()
        found = await asyncio.to_thread(self._context.scheduler.store.ended_jobs, query)
        viewer = self._context.redacted_for(request.caller)
        views = [past_job_view(job, viewer) for job in found.jobs]
        return json_response(HistoryView(views, before=found.next))

    def _checked(
        self,
        request: Request,
        query: JobQuery,
        since: float | None,
        states: Container[str],
    ) -> JobQuery:
        """Return a query with what depends on time and caller.

        Raises:
            BadValue: there is no such state.
        """
        if query.state is not None and query.state not in states:
            known = ", ".join(each for each in (*State, *_ENDS) if each in states)
            raise BadValue(f"cannot list jobs: no state {query.state[:40]!r}", f"states: {known}")
        now = self._context.clock.now()
        begin = None if since is None else now - timedelta(seconds=since)
        viewer = self._context.redacted_for(request.caller)
        return replace(query, name_of=viewer, since=begin)


def past_job_view(job: EndedJob, viewer: str | None = None) -> PastJobView:
    """Return an ended job as a wire object; for a `viewer`, what other users ran is hidden."""
    limit = job.time_limit_us
    is_hidden = viewer not in (None, job.user)
    kind: JobKind = "hold" if job.is_hold else "run"
    label = str(job.id) if job.array is None else f"{job.array}_{job.array_index}"
    return PastJobView(
        id=job.id,
        label=label if job.slurm_job is None else str(job.slurm_job),
        name=HIDDEN if is_hidden else job.name,
        user=job.user,
        kind=kind if job.slurm_job is None else "slurm",
        outcome=cast("WireOutcome", job.outcome),
        exit_status=shell_status(job.outcome, job.exit_code, job.exit_signal),
        submitted_at=instant(job.submitted_at) or "",
        granted_at=instant(job.granted_at),
        ended_at=instant(job.ended_at) or "",
        gpus=job.gpus,
        memory=job.asked if job.leased is None else job.leased,
        used=job.used,
        utilization=job.utilization,
        time_limit=None if limit is None else limit / _MICROSECONDS,
        command=None if is_hidden or job.alike is None else f"{job.alike} {job.same}",
        slurm_job=job.slurm_job,
        out_of_memory=job.out_of_memory,
        ram_peak=job.ram_peak,
        cpu_seconds=None if job.cpu_us is None else job.cpu_us / _MICROSECONDS,
    )
