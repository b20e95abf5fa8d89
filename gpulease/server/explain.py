"""The route that says what would happen to a job, and submits nothing."""

import asyncio
from datetime import timedelta

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
from gpulease.server.job_views import block_sentence, claim_view, suggestion_view
from gpulease.server.messages import Request, Response
from gpulease.server.reasons import explanation
from gpulease.server.view_sources import instant, whole_minute
from gpulease.service.ports import Store
from gpulease.service.scheduler import Rehearsal
from gpulease.wire.jobs import ExplainView
from gpulease.wire.requests import SubmitRequest


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
        context.refuse_closed_queue(caller, "submit")
        await slot_of_request(request).for_expensive()
        await context.look()
        rehearsal = await context.scheduler.rehearse(submission)
        smallest, store = context.scheduler.policy.smallest_lease, context.scheduler.store
        return json_response(await asyncio.to_thread(explain_view, rehearsal, smallest, store))


def explain_view(rehearsal: Rehearsal, smallest: int, store: Store) -> ExplainView:
    """Return what would happen to a job, as a wire object."""
    plan, job = rehearsal.plan, rehearsal.job
    placement = dict(plan.grants).get(job.id)
    view = _view(plan, job, placement)
    if placement is not None:
        return view
    explained = Explanations(plan)
    start = None if rehearsal.closed else explained.starts.get(job.id)
    view.expected_start_at = None if start is None else instant(whole_minute(start.at))
    if (block := plan.blocked.get(job.id)) is not None:
        view.reason = block_sentence(block, store)
        view.begin_at = instant(block.begin_at)
        return view
    view.position = explained.positions.get(job.id)
    view.suggestions = [suggestion_view(each) for each in suggestions(plan, job, smallest)]
    view.preempts = [preempted for preempted, wanted_by in plan.preempts if wanted_by == job.id]
    if view.preempts:
        view.waits_for = view.preempts
        return view
    waits = explanation(job.claim, why_waiting(plan, job), len(plan.gpus))
    view.reason = rehearsal.closed or waits.why
    view.refusals = waits.refusals
    view.waits_for = waits.waits_for
    view.behind = waits.behind
    view.waits_for_labels = waits.waits_for_labels
    view.behind_label = waits.behind_label
    return view


def _view(plan: Plan, job: Job, placement: Placement | None) -> ExplainView:
    labels = {gpu.uuid: gpu.reading.label for gpu in plan.gpus}
    allocations = () if placement is None else placement.allocations
    return ExplainView(
        starts_now=placement is not None,
        gpus=[labels[uuid] for uuid, _ in allocations],
        claim=claim_view(job.claim, {gpu.uuid: gpu.reading for gpu in plan.gpus}),
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
