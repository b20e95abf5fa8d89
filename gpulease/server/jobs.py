"""The routes about jobs: JSON in, one call of the service, JSON out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from pathlib import Path

import msgspec

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import State
from gpulease.domain.limits import NO_LIMITS
from gpulease.errors import BadValue, NoSuchJob, TooMany, WithinLease, WrongState
from gpulease.server.auth import Caller
from gpulease.server.context import Request, RequestContext, acting_on
from gpulease.server.job_requests import request_of, submission_of, why_not_again
from gpulease.server.messages import Response, StreamingResponse, json_response
from gpulease.server.nested import job_of_caller
from gpulease.server.output import OutputQuery, frames_of
from gpulease.server.reasons import explain_view
from gpulease.server.validation import span
from gpulease.service.idleness import KEPT_FOR, LONGEST_KEPT
from gpulease.service.ports import Submission
from gpulease.setting_parsers import LONGEST_GRACE
from gpulease.wire.frames import FrameKind
from gpulease.wire.jobs import DeviceView, JobView, SuggestionView
from gpulease.wire.requests import (
    CancelRequest,
    ExtendRequest,
    KeepRequest,
    SubmitRequest,
    WaitRequest,
    to_wire,
)

JSON_LINES = "application/x-ndjson"
FRAMES = "application/octet-stream"
"""The media type of gpulease.wire.frames."""
_REFRESH_S = 1.0
"""How often `watch` checks whether the reason of a waiting job has changed."""
_REFRESH_EACH_S = 0.01
"""The same for each stream of one user: together they get a hundred checks a second."""
_KEEP_ALIVE_S = 15.0
_SETTLES_AFTER_S = 0.2
_STARTED = (State.ACTIVE, State.RELEASING, State.ENDED)
_LOOK_EVERY_S = 0.1
_MOST_WAITED = 20_000
"""Jobs that one request waits for: as many as a user may have in the queue, twice."""


@dataclass(slots=True)
class OutputSettings:
    """Where output is, and how much of it is sent. A reload of the settings changes the numbers."""

    directory_of: Callable[[JobId], Path]
    log_limit: int
    most_streams: int
    """Of one user at once; root has no such limit."""


class JobWatch:
    """Wakes the streams that follow a job when that job changes.

    Each change is examined once for all streams. Otherwise hundreds of them would compute their job
    again at each change of another job.
    """

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._waiting: dict[asyncio.Future[None], Job] = {}
        """What wakes each stream, and its job as the stream has seen it."""
        self._looking: asyncio.Task[None] | None = None

    async def change_of(self, job: Job, within_s: float) -> None:
        """Wait until the store has another version of `job`, for at most `within_s` seconds."""
        if self._has_changed(job):
            return
        changed = asyncio.get_running_loop().create_future()
        self._waiting[changed] = job
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="job watch")
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await changed
        finally:
            del self._waiting[changed]

    async def _look(self) -> None:
        """Look at the watched jobs at each change of any job."""
        while self._waiting:
            change = self._context.scheduler.next_change
            for changed, job in self._waiting.items():
                if self._has_changed(job) and not changed.done():
                    changed.set_result(None)
            await change.wait()

    def _has_changed(self, job: Job) -> bool:
        return self._context.scheduler.store.live_job(job.id) is not job


class JobHandlers:
    """One method for each route.

    The router has checked the access of the caller.
    """

    def __init__(self, context: RequestContext, output: OutputSettings) -> None:
        self._context = context
        self._output = output
        self._watch = JobWatch(context)

    async def submit(self, request: Request, follow: bool = False) -> Response:
        """Queue a job; the answer means that it is on disk.

        With `follow`, the answer is a stream: the job as a line of JSON, at once and at each
        change, until it has started or ended.
        """
        context = self._context
        submission = await self._submission(request)
        job = await context.scheduler.submit(submission)
        view = context.job_views.job(job, to_owner=True)
        if not follow:
            return json_response(view, 201)
        with contextlib.suppress(TooMany):  # the job is queued; its view is the whole stream
            self._become_stream(request)
            lines = self._changes(job.id, request, _STARTED, view)
            return StreamingResponse(lines, 201, media_type=JSON_LINES)
        return Response(msgspec.json.encode(view) + b"\n", 201, media_type=JSON_LINES)

    async def _submission(self, request: Request) -> Submission:
        """Return what a request asks for.

        Raises:
            WithinLease: the caller runs within a lease, and asks to refuse that.
            NotAllowed: Slurm assigns all GPUs.
        """
        caller, context = request.caller, self._context
        body = request.read(SubmitRequest)
        is_admin = context.rights.is_admin(caller)
        submission = submission_of(body, caller, context.defaults, is_admin=is_admin)
        if body.refuse_nested:
            around = await job_of_caller(caller, submission.invocation.environment, context)
            if around is not None:
                raise WithinLease(f"cannot submit: this process runs within {around.title}")
        context.refuse_closed_queue(caller, "submit")
        return submission

    async def explain(self, request: Request) -> Response:
        """Check a submission, and explain what would happen to its job."""
        context = self._context
        submission = await self._submission(request)
        await request.slot.for_expensive()
        await context.look()
        rehearsal = await context.scheduler.rehearse(submission)
        smallest, store = context.scheduler.policy.smallest_lease, context.scheduler.store
        return json_response(await asyncio.to_thread(explain_view, rehearsal, smallest, store))

    async def show(self, request: Request, job_id: int) -> Response:
        """Show a job with its events and its processes."""
        job, context = self._job(job_id), self._context
        pids = None
        if job.state in (State.ACTIVE, State.RELEASING):
            pids = await asyncio.to_thread(context.processes.pids_of, job)
        await context.scheduler.explainer.refresh(job.id)
        smallest = context.scheduler.policy.smallest_lease
        suggested = await context.scheduler.explainer.suggestions(job, smallest)
        if (now := self._job(job_id)).state is not job.state:  # it has moved on meanwhile
            job, pids, suggested = now, None, ()
        caller = request.caller
        view = context.view_for(caller, job, with_events=True)
        sees_it = context.redacted_for(caller) in (None, job.owner.user)
        invocation = None if job.state is State.ENDED else self._invocation(job)
        shows_cwd = job.has_shim and context.rights.owns(caller, job)
        return json_response(
            replace(
                view,
                processes=None if pids is None else len(pids),
                pids=sorted(pids) if pids and sees_it else None,
                cwd=to_wire(invocation.cwd) if invocation and shows_cwd else None,
                devices=self._devices(job, invocation) if job.holds_memory else [],
                suggestions=[SuggestionView(each.options, each.before) for each in suggested],
            )
        )

    def _invocation(self, job: Job) -> Invocation | None:
        """Return how a live job was invoked; None if it has ended in the meantime."""
        with contextlib.suppress(NoSuchJob):
            return self._context.scheduler.store.invocation(job.id)
        return None

    def _devices(self, job: Job, invocation: Invocation | None) -> list[DeviceView]:
        if invocation is None:
            return []
        return self._context.job_views.leases.devices(job, invocation.options)

    async def submission(self, request: Request, job_id: int) -> Response:
        """Return the request for the same work as that of an ended job, without environment."""
        job = self._job(job_id)
        if (why := why_not_again(job)) is not None:
            raise WrongState(f"cannot repeat job {job.label}: {why[0]}", why[1])
        invocation = await asyncio.to_thread(self._context.scheduler.store.past_invocation, job)
        return json_response(request_of(job, invocation))

    async def watch(self, request: Request, job_id: int) -> Response:
        """Stream a job as a line of JSON, at once and at each change, until it has ended."""
        job = self._job(job_id)
        self._become_stream(request)
        lines = self._changes(job.id, request)
        return StreamingResponse(lines, media_type=JSON_LINES)

    async def _changes(
        self,
        job_id: JobId,
        request: Request,
        last: Collection[State] = (State.ENDED,),
        first: JobView | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield a job at each change until it is in one of the `last` states.

        `first` is the view of a job that was just queued: most start at once, so what it waits for
        is computed, and sent, only if it still waits after a moment.
        """
        caller, slot, context = request.caller, request.slot, self._context
        sent: JobView | None = None
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        settles_at = sent_at + _SETTLES_AFTER_S if first else 0.0
        # A short job has ended before its command can ask for its devices.
        invocation = self._invocation(self._job(job_id)) if first else None
        if first:
            yield msgspec.json.encode(first) + b"\n"
        while True:
            job = self._job(job_id)
            if job.state not in last and (left := settles_at - clock()) > 0:
                await self._watch.change_of(job, left)
                continue
            if job.state is State.QUEUED:
                await context.scheduler.explainer.refresh(job.id)
            view = context.view_for(caller, job)
            view.devices = self._devices(job, invocation)
            if view != sent:
                yield msgspec.json.encode(view) + b"\n"
                sent, sent_at = view, clock()
            elif clock() - sent_at >= _KEEP_ALIVE_S:
                yield b"\n"
                sent_at = clock()
            if job.state in last:
                return
            await self._watch.change_of(job, max(_REFRESH_S, slot.streams * _REFRESH_EACH_S))

    async def wait(self, request: Request) -> Response:
        """Stream each of some jobs as a line of JSON when it ends, until all have ended.

        A job that was retried or queued again is followed by the one that continues it.
        """
        asked = request.read(WaitRequest)
        if not 0 < len(asked.jobs) <= _MOST_WAITED:
            raise BadValue(f"cannot wait for {len(asked.jobs)} jobs: 1 to {_MOST_WAITED} at once")
        await request.slot.for_expensive()
        numbers = set(await asyncio.to_thread(lambda: [self._job(each).id for each in asked.jobs]))
        self._become_stream(request)
        lines = self._ends(numbers, request.caller, asked.timeout)
        return StreamingResponse(lines, media_type=JSON_LINES)

    async def _ends(
        self, waiting: set[JobId], caller: Caller, timeout_s: float | None
    ) -> AsyncIterator[bytes]:
        """Yield the jobs that end, each as a line, and empty lines as keep-alives."""
        context, clock = self._context, asyncio.get_running_loop().time
        deadline = inf if timeout_s is None else clock() + timeout_s
        live_job = context.scheduler.store.live_job
        while True:
            change = context.scheduler.next_change
            for number in sorted(each for each in waiting if live_job(each) is None):
                job = self._job(number)
                yield msgspec.json.encode(context.view_for(caller, job)) + b"\n"
                waiting.remove(number)
                if job.usage.retried_as is not None:
                    waiting.add(job.usage.retried_as)
            if not waiting or clock() >= deadline:
                return
            # Many jobs may change at once: look at the queue only some times a second.
            await asyncio.sleep(_LOOK_EVERY_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), min(_KEEP_ALIVE_S, deadline - clock()))
            if not change.is_set():
                yield b"\n"

    async def cancel(self, request: Request, job_id: int) -> Response:
        """Remove a job from the queue, or ask a running one to end."""
        caller, job = request.caller, self._job(job_id)
        grace = span("grace", request.read(CancelRequest).grace, LONGEST_GRACE)
        cancelled = await self._context.scheduler.cancel(job.id, acting_on(caller, job), grace)
        return json_response(self._context.view_for(caller, cancelled))

    async def requeue(self, request: Request, job_id: int) -> Response:
        """Stop a running job, and queue it again when it has ended."""
        caller, job = request.caller, self._job(job_id)
        stopped = await self._context.scheduler.requeue(job.id, acting_on(caller, job))
        return json_response(self._context.view_for(caller, stopped))

    async def extend(self, request: Request, job_id: int) -> Response:
        """Add time to the time limit of a job, or subtract it."""
        caller, job = request.caller, self._job(job_id)
        by_s = request.read(ExtendRequest).by
        span("by", abs(by_s), least=1)
        by = timedelta(seconds=by_s)
        scheduler, is_admin = self._context.scheduler, self._context.rights.is_admin(caller)
        limits = NO_LIMITS if is_admin else scheduler.policy.limits(job.owner)
        extended = await scheduler.extend(job.id, by, acting_on(caller, job), limits)
        return json_response(self._context.view_for(caller, extended))

    async def keep(self, request: Request, job_id: int) -> Response:
        """Allow a job to be idle for some time."""
        caller, job = request.caller, self._job(job_id)
        asked = span("span", request.read(KeepRequest).span, LONGEST_KEPT, least=1)
        kept = await self._context.scheduler.keep(job.id, asked or KEPT_FOR, acting_on(caller, job))
        return json_response(self._context.view_for(caller, kept))

    async def logs(
        self,
        request: Request,
        job_id: int,
        stdout: bool = True,
        stderr: bool = True,
        tail: int | None = None,
        follow: bool = False,
        stdout_from: int = 0,
        stderr_from: int = 0,
        positions: bool = False,
    ) -> Response:
        """Stream the kept output of a job as frames, each stream from some byte on."""
        job = self._job(job_id)
        if job.holder is not None:
            raise WrongState(
                f"cannot read the output of job {job.label}: it is a hold, which has none",
                f"gpulease show {job.label} shows the process that holds it",
            )
        if job.slurm is not None:
            raise WrongState(
                f"cannot read the output of {job.title}: Slurm has it",
                f"scontrol show job {job.slurm.id} names its files",
            )
        begin = {}
        if stdout:
            begin[FrameKind.STDOUT] = max(0, stdout_from)
        if stderr:
            begin[FrameKind.STDERR] = max(0, stderr_from)
        query = OutputQuery(begin, None if tail is None else max(0, tail), follow, positions)
        # Also without `follow`: a log may be long and its reader slow.
        self._become_stream(request)
        frames = frames_of(
            self._output.directory_of(job.id),
            query,
            self._output.log_limit,
            lambda: self._job(job.id).state is State.ENDED,
        )
        return StreamingResponse(frames, media_type=FRAMES)

    def _become_stream(self, request: Request) -> None:
        is_root = request.caller.uid == 0
        request.slot.become_stream(None if is_root else self._output.most_streams)

    def _job(self, job_id: int) -> Job:
        return self._context.existing_job(job_id)
