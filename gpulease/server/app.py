"""The table of routes: what is served, who may use it, and the shapes of requests and answers."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from gpulease import __version__
from gpulease.errors import BadValue, GpuleaseError, NoSuchRoute
from gpulease.server.auth import Access
from gpulease.server.changes import ChangeHandlers
from gpulease.server.context import RequestContext, caller_of_request, json_response
from gpulease.server.explain import ExplainHandlers
from gpulease.server.history import HistoryHandlers
from gpulease.server.holds import HoldHandlers
from gpulease.server.jobs import FRAMES, JSON_LINES, JobHandlers
from gpulease.server.machine import MachineHandlers
from gpulease.server.request_limits import RequestLimits
from gpulease.server.usage import UsageHandlers
from gpulease.server.windows import WindowHandlers
from gpulease.wire.errors import ErrorBody, ErrorReply
from gpulease.wire.jobs import (
    CancelledView,
    EditedView,
    EnvironmentView,
    ExplainView,
    JobList,
    JobView,
    NestedView,
)
from gpulease.wire.machine import (
    DoctorView,
    GpuAvailabilityView,
    PauseChangeView,
    StatusView,
    WindowList,
    WindowView,
)
from gpulease.wire.requests import (
    API_PREFIX,
    AdoptRequest,
    CancelJobsRequest,
    CancelRequest,
    DrainRequest,
    EditRequest,
    ExtendRequest,
    HoldRequest,
    KeepRequest,
    MoveRequest,
    NestedRequest,
    PauseRequest,
    ReserveRequest,
    SubmitRequest,
    UsageRequest,
    WaitRequest,
)
from gpulease.wire.usage import HistoryView, ReportView, SharesView

_SCHEMAS = "#/components/schemas/"
_OPTIONAL_BODIES = (CancelRequest, KeepRequest, DrainRequest, PauseRequest)


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table."""

    method: str
    path: str
    access: Access
    verb: str
    """What a caller without access cannot do; the job follows where the path has one."""
    handler: Callable[..., Any]
    reply: type | str | None
    """The shape of the answer, or the media type of a stream; None: no content."""
    body: type | None = None
    status: int = 200
    followed: str | None = None
    """The media type of the answer to a request with follow=true, if that is a stream."""


def routes(context: RequestContext) -> tuple[Route, ...]:
    """Return every route with its access, which the router checks before the handler runs.

    Handlers do not check access again, except of EACH; they decide which fields of an answer a
    caller sees.
    """
    jobs, holds = JobHandlers(context), HoldHandlers(context)
    changes = ChangeHandlers(context)
    machine, usage = MachineHandlers(context), UsageHandlers(context)
    explain = ExplainHandlers(context)
    history = HistoryHandlers(context)
    windows = WindowHandlers(context)
    everyone, submitter = Access.ANYONE, Access.SUBMITTER
    owner, manager, admin = Access.OWNER, Access.MANAGER, Access.ADMIN
    each = Access.EACH
    get, post = "GET", "POST"
    read_env, read_logs = "read the environment of", "read the output of"
    return (
        Route(get, "/status", everyone, "", machine.status, StatusView),
        Route(get, "/doctor", everyone, "", machine.doctor, DoctorView),
        Route(get, "/report", everyone, "", usage.report, ReportView),
        Route(get, "/shares", everyone, "", usage.shares, SharesView),
        Route(get, "/history", everyone, "", history.history, HistoryView),
        Route(get, "/jobs", everyone, "", jobs.jobs, JobList),
        Route(get, "/jobs/{job_id}", everyone, "", jobs.show, JobView),
        Route(get, "/jobs/{job_id}/watch", everyone, "", jobs.watch, JSON_LINES),
        Route(post, "/jobs/wait", everyone, "", jobs.wait, JSON_LINES, WaitRequest),
        Route(post, "/nested", everyone, "", holds.nested, NestedView, NestedRequest),
        Route(
            post, "/explain", submitter, "submit", explain.explain, ExplainView, SubmitRequest
        ),
        Route(
            post, "/jobs", submitter, "submit", jobs.submit, JobView, SubmitRequest, 201,
            JSON_LINES,
        ),
        Route(post, "/holds", submitter, "submit", holds.hold, JobView, HoldRequest, 201),
        Route(
            post, "/adoptions", submitter, "adopt a process", holds.adopt, JobView, AdoptRequest,
            201,
        ),
        Route(get, "/jobs/{job_id}/logs", owner, read_logs, jobs.logs, FRAMES),
        Route(
            get, "/jobs/{job_id}/environment", owner, read_env, holds.environment, EnvironmentView
        ),
        Route(
            post, "/jobs/{job_id}/usage", owner, "report on", usage.usage, None, UsageRequest, 204
        ),
        Route(
            post, "/jobs/{job_id}/cancel", manager, "cancel", jobs.cancel, JobView, CancelRequest
        ),
        Route(post, "/jobs/{job_id}/requeue", manager, "requeue", jobs.requeue, JobView),
        Route(
            post, "/jobs/cancel", each, "cancel", changes.cancel, CancelledView,
            CancelJobsRequest,
        ),
        Route(post, "/jobs/edit", each, "edit", changes.edit, EditedView, EditRequest),
        Route(post, "/jobs/move", each, "move", changes.move, EditedView, MoveRequest),
        Route(
            post, "/jobs/{job_id}/extend", manager, "extend", jobs.extend, JobView, ExtendRequest
        ),
        Route(post, "/jobs/{job_id}/keep", manager, "keep", jobs.keep, JobView, KeepRequest),
        Route(
            post, "/gpus/{gpu}/drain", admin, "drain a GPU", machine.drain, GpuAvailabilityView,
            DrainRequest,
        ),
        Route(
            post, "/gpus/{gpu}/resume", admin, "resume a GPU", machine.resume, GpuAvailabilityView
        ),
        Route(
            post, "/queue/pause", admin, "pause the queue", machine.pause, PauseChangeView,
            PauseRequest,
        ),
        Route(
            post, "/queue/unpause", admin, "end the pause of the queue", machine.unpause,
            PauseChangeView,
        ),
        Route(get, "/windows", everyone, "", windows.windows, WindowList),
        Route(
            post, "/windows", admin, "reserve GPUs", windows.reserve, WindowView, ReserveRequest,
            201,
        ),
        Route(
            post, "/windows/{window}/cancel", admin, "cancel a window", windows.cancel, WindowView
        ),
    )  # fmt: skip


def access_check(route: Route, context: RequestContext) -> Callable[..., Awaitable[None]]:
    """Return what runs before the handler of `route`, and raises if the caller lacks access."""

    async def check(request: Request) -> None:
        context.rights.check(route.access, caller_of_request(request), route.verb)

    async def check_with_job(request: Request, job_id: int) -> None:
        job = context.existing_job(job_id)
        context.rights.check(route.access, caller_of_request(request), route.verb, job)

    return check_with_job if route.access.concerns_job else check


def build_api(context: RequestContext, served: Sequence[Route] | None = None) -> ASGIApp:
    """Return the ASGI application, which serves the table, or `served` in its place."""
    api = FastAPI(
        title="gpulease", version=__version__, docs_url=None, redoc_url=None,
        openapi_url=f"{API_PREFIX}/openapi.json",
    )  # fmt: skip
    table = routes(context) if served is None else served
    for route in table:
        api.add_api_route(
            API_PREFIX + route.path,
            route.handler,
            methods=[route.method],
            dependencies=[Depends(access_check(route, context))],
            status_code=route.status,
            response_model=None,
            response_class=StreamingResponse if isinstance(route.reply, str) else JSONResponse,
            openapi_extra=_body_schema(route.body) if route.body else None,
            responses={route.status: _reply_schema(route), "default": {"model": ErrorReply}},
        )
    _add_schemas(api, [route.body for route in table if route.body])
    api.add_exception_handler(GpuleaseError, _error)
    api.add_exception_handler(RequestValidationError, _bad_parameter)
    api.add_exception_handler(HTTPException, _no_such_route)
    api.add_exception_handler(ClientDisconnect, _disconnected)
    api.add_exception_handler(Exception, _bug)
    return RequestLimits(api, _error)


def _reply_schema(route: Route) -> dict[str, Any]:
    if isinstance(route.reply, str):
        return {"content": {route.reply: {"schema": {"type": "string"}}}}
    stream = {"content": {route.followed: {"schema": {"type": "string"}}}} if route.followed else {}
    return {"model": route.reply, **stream} if route.reply is not None else {"description": "Done"}


def _body_schema(kind: type) -> dict[str, Any]:
    """Describe the body of a request for the OpenAPI document; handlers read it themselves."""
    schema = {"$ref": f"{_SCHEMAS}{kind.__name__}"}
    return {
        "requestBody": {
            "required": kind not in _OPTIONAL_BODIES,
            "content": {"application/json": {"schema": schema}},
        }
    }


def _add_schemas(api: FastAPI, bodies: Sequence[type]) -> None:
    """Add the schemas that `_body_schema` refers to: FastAPI knows only those of the answers."""
    describe = api.openapi  # replaced below, as FastAPI documents for extensions

    def complete() -> dict[str, Any]:
        document = describe()
        schemas = document["components"]["schemas"]
        for kind in bodies:
            schema = TypeAdapter(kind).json_schema(ref_template=f"{_SCHEMAS}{{model}}")
            schemas |= {**schema.pop("$defs", {}), kind.__name__: schema}
        return document

    api.openapi = complete  # type: ignore[method-assign]


async def _error(_request: object, error: Exception) -> Response:
    assert isinstance(error, GpuleaseError)
    body = ErrorBody(error.code, error.message, error.hint)
    return json_response(ErrorReply(body), error.http_status)


async def _bad_parameter(request: object, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return await _error(request, BadValue(f"cannot read the request: {where}: {first['msg']}"))


async def _no_such_route(_request: object, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ErrorBody(NoSuchRoute.code, f"cannot serve this request: {error.detail}")
    return json_response(ErrorReply(body), error.status_code)


async def _disconnected(_request: object, _error: Exception) -> Response:
    """Answer a client that has closed the connection; nothing is logged."""
    return Response(status_code=400)


async def _bug(_request: object, _error: Exception) -> Response:
    """Answer after an unexpected exception; the server has logged its traceback."""
    body = ErrorBody(
        GpuleaseError.code,
        "cannot answer: internal error in gpuleased",
        "an admin finds the details in the log: journalctl -u gpuleased",
    )
    return json_response(ErrorReply(body), 500)
