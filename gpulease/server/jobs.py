"""JSON in, one call of a use case, JSON out: a handler for each route."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import LONGEST_TIME, State
from gpulease.errors import BadValue, NoSuchJob, WrongState
from gpulease.server.auth import Caller, Who, caller_in
from gpulease.server.context import RequestContext
from gpulease.server.gpus import GpuHandlers
from gpulease.server.job_views import conceal, conceal_list, conceal_status
from gpulease.server.nested import invocation_of, job_around, part_of
from gpulease.server.output import OutputQuery, frames_of
from gpulease.server.request_limits import turn_in
from gpulease.server.submissions import (
    cancel_grace_of,
    environment_view,
    hold_order_of,
    keep_span_of,
    order_of,
    refuse_to_tell,
    refuse_within_a_job,
)
from gpulease.server.validation import environment_of, owner_of, user_of
from gpulease.service.ports import Event
from gpulease.wire.frames import FrameKind
from gpulease.wire.requests import (
    CancelRequest,
    ExtendRequest,
    HoldRequest,
    KeepRequest,
    NestedRequest,
    SubmitRequest,
    to_wire,
)
from gpulease.wire.views import JobView, NestedView

Body = TypeVar("Body")

JSON_LINES = "application/x-ndjson"
FRAMES = "application/octet-stream"
"""As gpulease.wire.frames has them."""
_REFRESH_S = 1.0
"""How often a watcher of a waiting job looks whether its reason has changed."""
_KEEP_ALIVE_S = 15.0
_MOST_LISTED = 10_000


class Handlers:
    """One method for each route; FastAPI reads the parameters from the signatures.

    That the caller may use the route has been checked by then, as the table of routes says.
    """

    def __init__(self, desk: RequestContext) -> None:
        self._desk = desk
        self.gpus = GpuHandlers(desk)

    async def status(self, request: Request) -> Response:
        """Show GPUs, leases, the queue and unmanaged processes."""
        caller, board = _caller(request), self._desk.board
        drawn = await board.status()
        if self._hides(caller):
            drawn = await board.changed(drawn, conceal_status, user_of(caller))
        return encoded_response(drawn)

    async def doctor(self, request: Request) -> Response:
        """Tell what this machine can do and what is wrong with it, and what holds for who asks."""
        overuse = self._desk.overuse_of(owner_of(_caller(request)))
        return json_response(replace(self._desk.doctor(), overuse=overuse))

    async def submit(self, request: Request) -> Response:
        """Queue a job; the answer means that it is on disk."""
        caller = _caller(request)
        body = read_body(SubmitRequest, await request.body())
        job = await self._desk.keeper.submit(order_of(body, caller, self._desk.defaults))
        return json_response(self._desk.views.job(job, to_owner=True), 201)

    async def hold(self, request: Request) -> Response:
        """Queue a lease without a job; the answer means that it is on disk."""
        caller, desk = _caller(request), self._desk
        body = read_body(HoldRequest, await request.body())
        order = hold_order_of(body, caller, desk.defaults, desk.processes.living)
        live, jobs_of = desk.keeper.store.live(), desk.processes.jobs_of
        await asyncio.to_thread(refuse_within_a_job, order.holder, live, jobs_of)
        job = await desk.keeper.submit(order)
        desk.watch_asker(job)
        return json_response(desk.views.job(job, to_owner=True), 201)

    async def nested(self, request: Request) -> Response:
        """Tell the job under whose lease the caller runs, and a part of that lease."""
        caller, desk = _caller(request), self._desk
        body = read_body(NestedRequest, await request.body())
        environment = environment_of(body.environment)
        live, jobs_of = desk.keeper.store.live(), desk.processes.jobs_of
        job = await asyncio.to_thread(job_around, caller, environment, live, jobs_of)
        if job is None:
            return json_response(NestedView(None))
        allocatable = desk.views.allocatable()
        invocation = invocation_of(desk.keeper.store.invocation(job.id), body, environment)
        by_index = invocation.options.get("visible") == "index"
        part = part_of(job, body, environment, desk.defaults, allocatable, by_index=by_index)
        changes = environment_view(environment, desk.environment(part, invocation))
        gpus = [lease.gpu for lease in part.leases]
        memory = min(lease.memory for lease in part.leases)
        return json_response(NestedView(self._view(job, caller), list(gpus), memory, changes))

    async def jobs(
        self, request: Request, user: str | None = None, state: str | None = None, all: bool = False
    ) -> Response:
        """List jobs, oldest first: those that wait or hold memory, or all."""
        if state is not None and state not in set(State):
            raise BadValue(
                f"cannot list jobs in the state {state[:40]!r}: there is no such state",
                f"states: {', '.join(State)}",
            )
        store, caller = self._desk.keeper.store, _caller(request)

        def find() -> Sequence[Job]:
            if all or state == State.ENDED:
                return store.jobs(user, state, _MOST_LISTED)
            return [
                job
                for job in store.live()
                if user in (None, job.owner.user) and state in (None, job.state)
            ]

        # What takes a second is done for one user once at a time.
        await turn_in(dict(request.scope)).for_much()
        rights, board = self._desk.rights, self._desk.board
        drawn = await board.listing(find, lambda job: rights.has(Who.OWNER, caller, job))
        if self._hides(caller):
            drawn = await board.changed(drawn, conceal_list, user_of(caller))
        return encoded_response(drawn)

    async def show(self, request: Request, job_id: int) -> Response:
        """Show all about one job, with its events and how many processes it has."""
        job = self._job(job_id)
        count = None
        if job.state in (State.ACTIVE, State.RELEASING):
            count = await asyncio.to_thread(self._desk.processes.count, job)
        view = self._view(job, _caller(request), with_events=True)
        return json_response(replace(view, processes=count, cwd=self._directory_of(job, request)))

    def _directory_of(self, job: Job, request: Request) -> str | None:
        """Return where a live job runs, for its owner."""
        owned = self._desk.rights.has(Who.OWNER, _caller(request), job)
        if not owned or job.holder is not None or job.state is State.ENDED:
            return None
        with suppress(NoSuchJob):  # it has ended meanwhile
            return to_wire(self._desk.keeper.store.invocation(job.id).cwd)
        return None

    async def watch(self, request: Request, job_id: int) -> Response:
        """Stream a job, a line of JSON at once and one at each change, until it has ended."""
        job = self._job(job_id)
        self._go_on_as_stream(request)
        lines = self._changes(job.id, _caller(request))
        return StreamingResponse(lines, media_type=JSON_LINES)

    async def cancel(self, request: Request, job_id: int) -> Response:
        """End a waiting job; ask a running one to go."""
        caller, job = _caller(request), self._job(job_id)
        grace = cancel_grace_of(read_body(CancelRequest, await request.body() or b"{}"), job)
        cancelled = await self._desk.keeper.cancel(job.id, _who(caller, job), grace)
        return json_response(self._view(cancelled, caller))

    async def extend(self, request: Request, job_id: int) -> Response:
        """Give a job more time, or less."""
        caller, job = _caller(request), self._job(job_id)
        by_s = read_body(ExtendRequest, await request.body()).by
        if not 0 < abs(by_s) <= LONGEST_TIME.total_seconds():
            raise BadValue(
                f"cannot extend job {job.id} by {by_s:g} seconds: that is out of range",
                f"gpulease extend {job.id} +2h",
            )
        extended = await self._desk.keeper.extend(
            job.id, timedelta(seconds=by_s), _who(caller, job)
        )
        return json_response(self._view(extended, caller))

    async def keep(self, request: Request, job_id: int) -> Response:
        """Let a job be idle for a while."""
        caller, job = _caller(request), self._job(job_id)
        span = keep_span_of(read_body(KeepRequest, await request.body() or b"{}"), job)
        kept = await self._desk.keeper.keep(job.id, span, _who(caller, job))
        return json_response(self._view(kept, caller))

    async def environment(self, job_id: int) -> Response:
        """Tell what a lease changes in the environment of its holder."""
        job = self._job(job_id)
        refuse_to_tell(job)
        invocation = self._desk.keeper.store.invocation(job.id)
        under_it = self._desk.environment(job, invocation)
        return json_response(environment_view(invocation.environment, under_it))

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
    ) -> Response:
        """Stream the kept output of a job as frames, each stream from a byte of it on."""
        job = self._job(job_id)
        if job.holder is not None:
            raise WrongState(
                f"cannot read the output of job {job.id}: it is a lease without a job",
                f"gpulease show {job.id} tells who holds it",
            )
        wanted = {}
        if stdout:
            wanted[FrameKind.STDOUT] = max(0, stdout_from)
        if stderr:
            wanted[FrameKind.STDERR] = max(0, stderr_from)
        query = OutputQuery(wanted, None if tail is None else max(0, tail), follow)
        # Also without `follow`: a log may be long, and its reader slow.
        self._go_on_as_stream(request)
        directory = self._desk.directory_of(job.id)
        frames = frames_of(
            directory, query, self._desk.log_limit, lambda: self._job(job.id).state is State.ENDED
        )
        return StreamingResponse(frames, media_type=FRAMES)

    def _go_on_as_stream(self, request: Request) -> None:
        most = self._desk.most_streams if _caller(request).uid != 0 else None
        turn_in(dict(request.scope)).go_on_as_stream(most)

    def _job(self, job_id: int) -> Job:
        return existing_job(self._desk, job_id)

    def _view(self, job: Job, caller: Caller, *, with_events: bool = False) -> JobView:
        events = self._desk.keeper.store.events(job.id) if with_events else ()
        view = self._owners_view(job, caller, events)
        return conceal(view, user_of(caller)) if self._hides(caller) else view

    def _owners_view(self, job: Job, caller: Caller, events: Sequence[Event] = ()) -> JobView:
        """Return a job with what only its owner may see, if that is who calls."""
        owned = self._desk.rights.has(Who.OWNER, caller, job)
        stored = self._desk.stored_pools if events and job.state is State.ENDED else None
        pools = None if stored is None else stored(job.id)
        return self._desk.views.job(job, to_owner=owned, events=events, pools=pools)

    def _hides(self, caller: Caller) -> bool:
        return self._desk.rights.hides_from(caller)

    async def _changes(self, job_id: JobId, caller: Caller) -> AsyncIterator[bytes]:
        shown, quiet_s = None, 0.0
        while True:
            change = self._desk.keeper.next_change
            job = self._job(job_id)
            view = self._view(job, caller)
            if view != shown:
                yield msgspec.json.encode(view) + b"\n"
                shown, quiet_s = view, 0.0
            elif quiet_s >= _KEEP_ALIVE_S:
                yield b"\n"
                quiet_s = 0.0
            if job.state is State.ENDED:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), _REFRESH_S)
            quiet_s += _REFRESH_S


def existing_job(desk: RequestContext, job_id: int) -> Job:
    """Return a job. Raises: NoSuchJob, if there is none."""
    # SQLite's integers end here.
    job = desk.keeper.store.job(JobId(job_id)) if 0 < job_id < 1 << 63 else None
    if job is None:
        raise NoSuchJob(
            f"cannot find job {job_id}: there is none", "gpulease list --all shows them"
        )
    return job


def read_body(kind: type[Body], content: bytes) -> Body:
    """Return a request's body. Raises: BadValue, if it is not of this kind."""
    # Stops at the first thing that is wrong, however much more there is.
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadValue(f"cannot read the request: {str(error)[:200]}") from error


def _who(caller: Caller, job: Job) -> str:
    return job.owner.user if caller.uid == job.owner.uid else user_of(caller)


def _caller(request: Request) -> Caller:
    return caller_in(dict(request.scope))


def encoded_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
