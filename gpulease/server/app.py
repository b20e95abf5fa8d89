"""The table of routes: what is served, who may use it, and the shapes of requests and answers.

The OpenAPI document is made from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from gpulease import __version__
from gpulease.server.auth import Access
from gpulease.server.changes import ChangeHandlers
from gpulease.server.context import HolderParts, RequestContext
from gpulease.server.holds import HoldHandlers
from gpulease.server.job_list import JobListHandlers
from gpulease.server.jobs import FRAMES, JSON_LINES, JobHandlers, OutputSettings
from gpulease.server.machine import MachineHandlers, MachineParts
from gpulease.server.messages import JSON, PLAIN_TEXT, Response, json_response
from gpulease.server.request_limits import RequestLimits
from gpulease.server.router import Endpoint, Route, Router, error_response
from gpulease.server.usage import MemorySeriesHandlers, ReportParts, UsageHandlers
from gpulease.server.windows import WindowHandlers
from gpulease.service.ports import MemoryReader
from gpulease.service.windows import Windows
from gpulease.slurm.node.leases import SlurmLeases
from gpulease.slurm.node.routes import SlurmHandlers
from gpulease.wire.history import GpuHistoryView, JobMemoryView
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
    TopologyView,
    WindowList,
    WindowView,
)
from gpulease.wire.metrics import MetricsView
from gpulease.wire.notifications import NotifyTestView
from gpulease.wire.requests import (
    API_PREFIX,
    AdoptRequest,
    CancelJobsRequest,
    CancelRequest,
    DrainRequest,
    EditRequest,
    ErrorReply,
    ExtendRequest,
    HoldRequest,
    KeepRequest,
    MoveRequest,
    NestedRequest,
    PauseRequest,
    ReserveRequest,
    SlurmEndRequest,
    SlurmEnvironmentRequest,
    SlurmLeaseRequest,
    SubmitRequest,
    UsageRequest,
    WaitRequest,
)
from gpulease.wire.usage import HistoryView, ReportView, SharesView

_OPTIONAL_BODIES = (CancelRequest, KeepRequest, DrainRequest, PauseRequest)
_REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class ApiParts:
    """What handlers work with: the context, and what only some of them need."""

    context: RequestContext
    machine: MachineParts
    reports: ReportParts
    holders: HolderParts
    output: OutputSettings
    windows: Windows
    memory_series: Callable[[], MemoryReader]
    """Returns the memory of GPUs and jobs over time, until now."""
    slurm: SlurmLeases | None
    """None in a personal daemon."""


def routes(parts: ApiParts) -> tuple[Route, ...]:
    """Return every route with its access, which the router checks before the handler runs.

    Handlers do not check access again, except of EACH; they decide which fields of an answer a
    caller sees.
    """
    context = parts.context
    jobs, holds = JobHandlers(context, parts.output), HoldHandlers(context, parts.holders)
    changes = ChangeHandlers(context)
    machine, usage = MachineHandlers(context, parts.machine), UsageHandlers(context, parts.reports)
    lists, series = JobListHandlers(context), MemorySeriesHandlers(context, parts.memory_series)
    windows = WindowHandlers(context, parts.windows)
    slurm = SlurmHandlers(context, parts.slurm, parts.holders)
    everyone, submitter = Access.ANYONE, Access.SUBMITTER
    owner, manager, admin = Access.OWNER, Access.MANAGER, Access.ADMIN
    each, root = Access.EACH, Access.ROOT
    get, post = "GET", "POST"
    read_env, read_logs = "read the environment of", "read the output of"
    return (
        Route(get, "/status", everyone, "", machine.status, StatusView),
        Route(get, "/topology", everyone, "", machine.topology, TopologyView),
        Route(get, "/doctor", everyone, "", machine.doctor, DoctorView),
        Route(get, "/metrics", everyone, "", machine.metrics, MetricsView),
        Route(get, "/report", everyone, "", usage.report, ReportView),
        Route(get, "/shares", everyone, "", usage.shares, SharesView),
        Route(get, "/history", everyone, "", lists.history, HistoryView),
        Route(get, "/gpus/{gpu}/history", everyone, "", series.gpu, GpuHistoryView),
        Route(get, "/jobs/{job_id}/memory", everyone, "", series.job, JobMemoryView),
        Route(get, "/jobs", everyone, "", lists.jobs, JobList),
        Route(get, "/jobs/{job_id}", everyone, "", jobs.show, JobView),
        Route(get, "/jobs/{job_id}/watch", everyone, "", jobs.watch, JSON_LINES),
        Route(post, "/jobs/wait", everyone, "", jobs.wait, JSON_LINES, WaitRequest),
        Route(post, "/nested", everyone, "", holds.nested, NestedView, NestedRequest),
        Route(
            post, "/explain", submitter, "submit", jobs.explain, ExplainView, SubmitRequest
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
        Route(
            get, "/jobs/{job_id}/submission", owner, "repeat", jobs.submission,
            SubmitRequest,
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
        Route(
            post, "/slurm/leases", root, "lease for a job of Slurm", slurm.lease, JobView,
            SlurmLeaseRequest, 201, plain_errors=True,
        ),
        Route(
            post, "/slurm/leases/{number}/end", root, "end the lease of a job of Slurm", slurm.end,
            None, SlurmEndRequest, 204, plain_errors=True,
        ),
        Route(
            post, "/slurm/leases/{number}/environment", each, "read the environment of",
            slurm.environment, PLAIN_TEXT, SlurmEnvironmentRequest, plain_errors=True,
        ),
        Route(
            post, "/notifications/test", submitter, "send notifications", machine.test_notification,
            NotifyTestView,
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


def build_api(parts: ApiParts, served: Sequence[Route] | None = None) -> RequestLimits:
    """Return the application, which serves the table, or `served` in its place."""
    table = [Endpoint(each, API_PREFIX) for each in (routes(parts) if served is None else served)]

    async def document() -> Response:
        return json_response(api_document(table))

    described = Route("GET", "/openapi.json", Access.ANYONE, "", document, None)
    router = Router([*table, Endpoint(described, API_PREFIX)], parts.context)
    return RequestLimits(router, error_response)


def api_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document, to be encoded as JSON."""
    kinds = {each.route.body for each in endpoints} | {each.route.reply for each in endpoints}
    wire = [kind for kind in kinds if isinstance(kind, type)]
    _, schemas = msgspec.json.schema_components([*wire, ErrorReply], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.route.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpulease", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    route = endpoint.route
    error = _json(ErrorReply)
    if route.plain_errors:
        error = {PLAIN_TEXT: {"schema": {"type": "string"}}, **error}
    made: dict[str, Any] = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "operationId": route.handler.__name__ + endpoint.path.replace("/", "_"),
        "parameters": _parameters(endpoint),
        "responses": {
            str(route.status): _reply(route),
            "default": {"description": "An error", "content": error},
        },
    }
    if route.body is not None:
        made["requestBody"] = {
            "required": route.body not in _OPTIONAL_BODIES,
            "content": _json(route.body),
        }
    return made


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    in_path = endpoint.path_values(endpoint.parts)
    return [
        {
            "name": field.name,
            "in": "path" if field.name in in_path else "query",
            "required": field.required,
            "schema": msgspec.json.schema(field.type),
        }
        for field in msgspec.structs.fields(endpoint.parameters)
    ]


def _reply(route: Route) -> dict[str, Any]:
    described: dict[str, Any] = {"description": HTTPStatus(route.status).phrase}
    streams = [each for each in (route.followed, route.reply) if isinstance(each, str)]
    content: dict[str, Any] = {each: {"schema": {"type": "string"}} for each in streams}
    if isinstance(route.reply, type):
        content |= _json(route.reply)
    return {**described, "content": content} if content else described


def _json(kind: type) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}
