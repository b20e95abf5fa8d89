"""The table of routes: what is served, to whom, and in which shape."""

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
from gpulease.server.auth import ABOUT_A_JOB, Who, caller_in
from gpulease.server.context import RequestContext
from gpulease.server.jobs import FRAMES, JSON_LINES, Handlers, existing_job, json_response
from gpulease.server.request_limits import RequestLimits
from gpulease.server.usage import AccountHandlers
from gpulease.wire.requests import (
    API_PREFIX,
    CancelRequest,
    DrainRequest,
    ExtendRequest,
    HoldRequest,
    KeepRequest,
    NestedRequest,
    SubmitRequest,
    UsageRequest,
)
from gpulease.wire.views import (
    DoctorView,
    EnvironmentView,
    ErrorBody,
    ErrorReply,
    GpuAvailabilityView,
    JobList,
    JobView,
    NestedView,
    ReportView,
    StatusView,
)

_SHAPES = "#/components/schemas/"
_BODIES = (
    SubmitRequest,
    HoldRequest,
    NestedRequest,
    ExtendRequest,
    CancelRequest,
    KeepRequest,
    DrainRequest,
    UsageRequest,
)
_MAY_BE_LEFT_OUT = (CancelRequest, KeepRequest, DrainRequest)


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table."""

    method: str
    path: str
    who: Who
    endpoint: Callable[..., Any]
    reply: type | None
    status: int = 200
    takes: type | None = None
    streams: str = ""
    """What is streamed where there is no one reply: its media type."""
    verb: str = ""
    """What a caller who is refused cannot do: "cancel", and the job follows."""


def table(handlers: Handlers, accounts: AccountHandlers) -> tuple[Route, ...]:
    """Return every route with who may use it; there is no other, and no handler checks that again.

    What of an answer is hidden from a caller is the handler's.
    """
    return (
        Route("GET", "/status", Who.ANYONE, handlers.status, StatusView),
        Route("GET", "/doctor", Who.ANYONE, handlers.doctor, DoctorView),
        Route("POST", "/jobs", Who.SUBMITTER, handlers.submit, JobView, 201, SubmitRequest),
        Route("POST", "/holds", Who.SUBMITTER, handlers.hold, JobView, 201, HoldRequest),
        Route("POST", "/nested", Who.ANYONE, handlers.nested, NestedView, takes=NestedRequest),
        Route("GET", "/jobs", Who.ANYONE, handlers.jobs, JobList),
        Route("GET", "/jobs/{job_id}", Who.ANYONE, handlers.show, JobView),
        Route("GET", "/jobs/{job_id}/watch", Who.ANYONE, handlers.watch, None, streams=JSON_LINES),
        Route(
            "POST",
            "/jobs/{job_id}/extend",
            Who.MANAGER,
            handlers.extend,
            JobView,
            takes=ExtendRequest,
            verb="extend",
        ),
        Route(
            "POST",
            "/jobs/{job_id}/keep",
            Who.MANAGER,
            handlers.keep,
            JobView,
            takes=KeepRequest,
            verb="keep",
        ),
        Route(
            "GET",
            "/jobs/{job_id}/environment",
            Who.OWNER,
            handlers.environment,
            EnvironmentView,
            verb="read the environment of",
        ),
        Route(
            "POST",
            "/jobs/{job_id}/usage",
            Who.OWNER,
            accounts.usage,
            None,
            204,
            UsageRequest,
            verb="report on",
        ),
        Route("GET", "/report", Who.ANYONE, accounts.report, ReportView),
        Route(
            "GET",
            "/jobs/{job_id}/logs",
            Who.OWNER,
            handlers.logs,
            None,
            streams=FRAMES,
            verb="read the output of",
        ),
        Route(
            "POST",
            "/jobs/{job_id}/cancel",
            Who.MANAGER,
            handlers.cancel,
            JobView,
            takes=CancelRequest,
            verb="cancel",
        ),
        Route(
            "POST",
            "/gpus/{gpu}/drain",
            Who.ADMIN,
            handlers.gpus.drain,
            GpuAvailabilityView,
            takes=DrainRequest,
            verb="drain a GPU",
        ),
        Route(
            "POST",
            "/gpus/{gpu}/resume",
            Who.ADMIN,
            handlers.gpus.resume,
            GpuAvailabilityView,
            verb="resume a GPU",
        ),
    )


def guard(route: Route, desk: RequestContext) -> Callable[..., Awaitable[None]]:
    """Return what runs before the handler of `route`, and refuses those who may not use it."""

    async def check(request: Request) -> None:
        desk.rights.check(route.who, caller_in(dict(request.scope)), route.verb)

    async def check_with_job(request: Request, job_id: int) -> None:
        caller = caller_in(dict(request.scope))
        desk.rights.check(route.who, caller, route.verb, existing_job(desk, job_id))

    return check_with_job if route.who in ABOUT_A_JOB else check


def build_api(desk: RequestContext, routes: Sequence[Route] | None = None) -> ASGIApp:
    """Return the ASGI application, which serves the table, or `routes` in its place."""
    api = FastAPI(
        title="gpulease", version=__version__, docs_url=None, redoc_url=None,
        openapi_url=f"{API_PREFIX}/openapi.json",
    )  # fmt: skip
    for route in table(Handlers(desk), AccountHandlers(desk)) if routes is None else routes:
        api.add_api_route(
            API_PREFIX + route.path,
            route.endpoint,
            methods=[route.method],
            dependencies=[Depends(guard(route, desk))],
            status_code=route.status,
            response_model=None,
            response_class=StreamingResponse if route.streams else JSONResponse,
            openapi_extra=_body(route.takes) if route.takes else None,
            responses={route.status: _reply(route), "default": {"model": ErrorReply}},
        )
    _describe_bodies(api)
    api.add_exception_handler(GpuleaseError, _refusal)
    api.add_exception_handler(RequestValidationError, _not_understood)
    api.add_exception_handler(HTTPException, _no_such_route)
    api.add_exception_handler(ClientDisconnect, _to_nobody)
    api.add_exception_handler(Exception, _bug)
    return RequestLimits(api, _refusal)


def _reply(route: Route) -> dict[str, Any]:
    if route.streams:
        return {"content": {route.streams: {"schema": {"type": "string"}}}}
    return {"model": route.reply} if route.reply is not None else {"description": "Done"}


def _schema(kind: type) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema(ref_template=f"{_SHAPES}{{model}}")


def _body(kind: type) -> dict[str, Any]:
    """Describe a request's body for the OpenAPI document; reading it is the handler's."""
    schema = {"$ref": f"{_SHAPES}{kind.__name__}"}
    return {
        "requestBody": {
            "required": kind not in _MAY_BE_LEFT_OUT,
            "content": {"application/json": {"schema": schema}},
        }
    }


def _describe_bodies(api: FastAPI) -> None:
    """Put what `_body` refers to into the document, where FastAPI puts the shapes it knows of."""
    describe = api.openapi  # replaced below, which is FastAPI's own way to change the document

    def whole() -> dict[str, Any]:
        document = describe()
        shapes = document["components"]["schemas"]
        for kind in _BODIES:
            shape = _schema(kind)
            shapes |= {**shape.pop("$defs", {}), kind.__name__: shape}
        return document

    api.openapi = whole  # type: ignore[method-assign]


async def _refusal(_request: object, error: Exception) -> Response:
    assert isinstance(error, GpuleaseError)
    body = ErrorBody(error.code, error.message, error.hint)
    return json_response(ErrorReply(body), error.http_status)


async def _not_understood(request: object, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return await _refusal(request, BadValue(f"cannot read the request: {where}: {first['msg']}"))


async def _no_such_route(_request: object, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ErrorBody(NoSuchRoute.code, f"cannot serve this: {error.detail}")
    return json_response(ErrorReply(body), error.status_code)


async def _to_nobody(_request: object, _error: Exception) -> Response:
    """Answer one who left in the middle of a request, which is nothing to tell the log of."""
    return Response(status_code=400)


async def _bug(_request: object, _error: Exception) -> Response:
    """Answer; the traceback is the log's, where the one who can mend it will find it."""
    body = ErrorBody(
        GpuleaseError.code,
        "cannot do this: gpuleased met an error of its own",
        "its log has the details; an admin finds them with journalctl -u gpuleased",
    )
    return json_response(ErrorReply(body), 500)
