"""The route that says what would happen to a job, and submits nothing."""

import asyncio
from datetime import timedelta

from fastapi import Request
from fastapi.responses import Response

from gpulease.domain.explain import Explanations, run_time_of, suggestions
from gpulease.domain.job import Job
from gpulease.domain.placement import Placement
from gpulease.domain.plan import Plan, why_waiting
from gpulease.server.context import (
    RequestContext,
    caller_of_request,
    json_response,
    read_body,
    slot_of_request,
)
from gpulease.server.job_requests import submission_of
from gpulease.server.job_views import claim_view, instant, suggestion_view, whole_minute
from gpulease.server.reasons import explanation
from gpulease.wire.requests import SubmitRequest
from gpulease.wire.views import ExplainView


class ExplainHandlers:
    """One method for the route."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    async def explain(self, request: Request) -> Response:
        """Check a submission, and explain what would happen to its job."""
        caller, context = caller_of_request(request), self._context
        body = read_body(SubmitRequest, await request.body())
        is_admin = context.rights.is_admin(caller)
        submission = submission_of(body, caller, context.defaults, is_admin=is_admin)
        await slot_of_request(request).for_expensive()
        job, plan = await context.scheduler.rehearse(submission)
        smallest = context.scheduler.policy.smallest_lease
        return json_response(await asyncio.to_thread(explain_view, plan, job, smallest))


def explain_view(plan: Plan, job: Job, smallest: int) -> ExplainView:
    """Return what a plan says about a job, as a wire object."""
    placement = dict(plan.grants).get(job.id)
    if placement is not None:
        return _view(plan, job, placement)
    waits = explanation(job.claim, why_waiting(plan, job), len(plan.gpus))
    explained = Explanations(plan)
    start = explained.starts.get(job.id)
    view = _view(plan, job, None)
    view.reason = waits.why
    view.position = explained.positions.get(job.id)
    view.expected_start_at = None if start is None else instant(whole_minute(start.at))
    view.refusals = waits.refusals
    view.waits_for = waits.waits_for
    view.behind = waits.behind
    view.suggestions = [suggestion_view(each) for each in suggestions(plan, job, smallest)]
    return view


def _view(plan: Plan, job: Job, placement: Placement | None) -> ExplainView:
    labels = {gpu.uuid: gpu.reading.label for gpu in plan.gpus}
    allocations = () if placement is None else placement.allocations
    return ExplainView(
        starts_now=placement is not None,
        gpus=[labels[uuid] for uuid, _ in allocations],
        claim=claim_view(job.claim),
        sized=job.usage.size_reason,
        runs_for=run_time_of(plan, job) / timedelta(seconds=1),
        reason=None,
        position=None,
        expected_start_at=None,
        refusals=[],
        waits_for=[],
        behind=None,
        suggestions=[],
    )
