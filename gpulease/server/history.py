"""The route about past jobs, in pages: a year of them is more than one answer should hold."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.server.context import (
    RequestContext,
    caller_of_request,
    json_response,
    slot_of_request,
)
from gpulease.server.job_queries import LARGEST_ID
from gpulease.server.messages import Request, Response
from gpulease.server.reasons import exit_status
from gpulease.server.redaction import HIDDEN
from gpulease.server.validation import span, within
from gpulease.server.view_sources import instant
from gpulease.units import Share
from gpulease.wire.usage import HistoryView, PastJobView

MOST_IN_PAGE = 1000
_VERB = "list past jobs"


class HistoryHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    async def history(
        self,
        request: Request,
        user: str | None = None,
        since: float | None = None,
        before: int | None = None,
        limit: int = MOST_IN_PAGE,
    ) -> Response:
        """List ended jobs, the newest first: those with ids below `before`.

        `since` is in seconds ago, no `user` means all.
        """
        context = self._context
        within("limit", limit, 1, MOST_IN_PAGE, _VERB)
        if before is not None:
            within("job", before, 0, LARGEST_ID, _VERB)
        ago = span("time to look back", since, at_least=1, verb=_VERB)
        begin = None if ago is None else context.clock.now() - ago
        store = context.scheduler.store
        await slot_of_request(request).for_expensive()
        jobs = await asyncio.to_thread(
            lambda: store.jobs(user, State.ENDED, limit, before=before, since=begin)
        )
        viewer = context.redacted_for(caller_of_request(request))
        return json_response(history_view(jobs, limit, viewer))


def history_view(jobs: Sequence[Job], limit: int, viewer: str | None) -> HistoryView:
    """Return a page of past jobs, oldest first in `jobs`, as the user `viewer` may see them."""
    views = [past_job_view(job) for job in reversed(jobs)]
    if viewer is not None:
        views = [
            view if view.user == viewer else replace(view, name=HIDDEN, command=None)
            for view in views
        ]
    return HistoryView(views, before=jobs[0].id if len(jobs) == limit else None)


def past_job_view(job: Job) -> PastJobView:
    """Return an ended job as a wire object."""
    claim, fingerprint, leases = job.claim, job.usage.fingerprint, job.leases
    asked = None if isinstance(claim.memory, Share) else claim.memory
    used = [lease.used for lease in leases if lease.used is not None]
    return PastJobView(
        id=job.id,
        label=job.label,
        name=job.name,
        user=job.owner.user,
        kind=job.kind,
        outcome=job.outcome.value if job.outcome else None,
        exit_status=exit_status(job),
        submitted_at=instant(job.submitted_at) or "",
        granted_at=instant(job.granted_at),
        ended_at=instant(job.ended_at) or "",
        gpus=claim.gpus,
        memory=max((lease.memory for lease in leases), default=asked),
        used=max(used, default=None),
        utilization=job.utilization,
        time_limit=claim.time_limit.total_seconds() if claim.time_limit else None,
        command=f"{fingerprint.similar_key} {fingerprint.exact_key}" if fingerprint else None,
        slurm_job=None if job.slurm is None else job.slurm.id,
    )
