"""The route about past jobs, in pages: a year of them is more than one answer should hold."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from gpulease.domain.job import Outcome
from gpulease.errors import BadValue
from gpulease.server.context import (
    RequestContext,
    caller_of_request,
    json_response,
    slot_of_request,
)
from gpulease.server.job_queries import LARGEST_ID
from gpulease.server.messages import Request, Response
from gpulease.server.reasons import shell_status
from gpulease.server.redaction import HIDDEN
from gpulease.server.validation import span, within
from gpulease.server.view_sources import instant
from gpulease.service.job_history import FAILED, EndedJob, EndedJobsQuery
from gpulease.wire.jobs import JobKind
from gpulease.wire.jobs import Outcome as WireOutcome
from gpulease.wire.requests import LONGEST_NAME
from gpulease.wire.usage import HistoryView, PastJobView

MOST_IN_PAGE = 1000
_VERB = "list past jobs"
_OUTCOMES = frozenset(Outcome) | {FAILED}
_MICROSECONDS = 1_000_000


class HistoryHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    async def history(
        self,
        request: Request,
        user: str | None = None,
        since: float | None = None,
        outcome: str | None = None,
        name: str | None = None,
        before: int | None = None,
        limit: int = MOST_IN_PAGE,
    ) -> Response:
        """List ended jobs, the newest first: those with ids below `before`.

        `since` is in seconds ago; `outcome` is that of a job, or "failed" for any end without
        success; `name` is a shell pattern. No value means all.
        """
        context = self._context
        _check(outcome, name, before, limit)
        ago = span("time to look back", since, at_least=1, verb=_VERB)
        viewer = context.redacted_for(caller_of_request(request))
        query = EndedJobsQuery(
            user=user,
            since=None if ago is None else context.clock.now() - ago,
            outcome=outcome,
            name=name,
            # A pattern must not find out the names that are hidden.
            name_of=None if name is None else viewer,
            before=before,
            limit=limit,
        )
        await slot_of_request(request).for_expensive()
        jobs = await asyncio.to_thread(context.ended_jobs, query)
        return json_response(history_view(jobs, limit, viewer))


def _check(outcome: str | None, name: str | None, before: int | None, limit: int) -> None:
    """Raises: BadValue, if one of them is out of range."""
    within("limit", limit, 1, MOST_IN_PAGE, _VERB)
    if before is not None:
        within("job", before, 0, LARGEST_ID, _VERB)
    if outcome is not None and outcome not in _OUTCOMES:
        known = ", ".join(sorted(_OUTCOMES))
        raise BadValue(f"cannot {_VERB}: no outcome {outcome[:40]!r}", f"outcomes: {known}")
    if name is not None and len(name) > LONGEST_NAME:
        raise BadValue(f"cannot {_VERB}: a name has at most {LONGEST_NAME} characters")


def history_view(jobs: Sequence[EndedJob], limit: int, viewer: str | None) -> HistoryView:
    """Return a page of ended jobs, newest first, as the user `viewer` may see them."""
    views = [past_job_view(job) for job in jobs]
    if viewer is not None:
        views = [
            view if view.user == viewer else replace(view, name=HIDDEN, command=None)
            for view in views
        ]
    return HistoryView(views, before=jobs[-1].id if len(jobs) == limit else None)


def past_job_view(job: EndedJob) -> PastJobView:
    """Return an ended job as a wire object."""
    limit = job.time_limit_us
    return PastJobView(
        id=job.id,
        label=_label(job),
        name=job.name,
        user=job.user,
        kind=_kind(job),
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
        command=None if job.alike is None else f"{job.alike} {job.same}",
        slurm_job=job.slurm_job,
        out_of_memory=job.out_of_memory,
    )


def _label(job: EndedJob) -> str:
    if job.slurm_job is not None:
        return str(job.slurm_job)
    return str(job.id) if job.array is None else f"{job.array}_{job.array_index}"


def _kind(job: EndedJob) -> JobKind:
    if job.slurm_job is not None:
        return "slurm"
    return "hold" if job.is_hold else "run"
