"""The router holds every route against the table, whatever its handler does."""

import asyncio
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Claim
from gpulease.server.app import ApiParts, build_api, routes
from gpulease.server.auth import Access, Caller, Rights
from gpulease.server.context import RequestContext
from gpulease.server.messages import Response
from gpulease.server.request_limits import RequestLimits
from gpulease.server.router import Route, Router

ADMINS = 2000
DAEMONS_OWNER = 500
CALLERS = {
    "stranger": Caller(1, 1002, 1002),
    "owner": Caller(1, 1001, 1001),
    "admin": Caller(1, 1003, 1003, (ADMINS,)),
    "root": Caller(1, 0, 0),
}
OPEN_TO = {
    Access.ANYONE: set(CALLERS),
    Access.SUBMITTER: set(CALLERS),
    Access.MANAGER: {"owner", "admin", "root"},
    Access.EACH: set(CALLERS),
    Access.OWNER: {"owner", "root"},
    Access.ADMIN: {"admin", "root"},
    Access.ROOT: {"root"},
}
JOB = Job(
    id=JobId(7),
    owner=Owner(1001, 1001, "owner"),
    name="job",
    command="true",
    claim=Claim(1 << 30),
    submitted_at=datetime(2026, 1, 1, tzinfo=UTC),
)
NO_PARTS: Any = dict.fromkeys(each.name for each in fields(ApiParts))
ROUTES = routes(ApiParts(**NO_PARTS))


class WithAdmins(Rights):
    """Rights on a machine whose group of admins has a fixed id."""

    def _admins_gid(self) -> int:
        return ADMINS


async def careless() -> Response:
    """Answer whoever asks."""
    return Response(status=204)


def api(daemon_uid: int = 0) -> RequestLimits:
    """Return the application over one job, with handlers that check nothing."""
    jobs = SimpleNamespace(job=lambda number: JOB if number == JOB.id else None)
    context: Any = SimpleNamespace(
        rights=WithAdmins(daemon_uid, "admins"), scheduler=SimpleNamespace(store=jobs)
    )
    context.existing_job = partial(RequestContext.existing_job, context)
    parts = ApiParts(**NO_PARTS | {"context": context})
    return build_api(parts, [replace(route, handler=careless) for route in ROUTES])


def status_of(app: RequestLimits, method: str, path: str, caller: Caller, query: str = "") -> int:
    sent: list[Any] = []
    state = {"caller": caller, "transport": SimpleNamespace(get_write_buffer_size=lambda: 0)}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "state": state,
        "query_string": query.encode(), "headers": [], "http_version": "1.1", "scheme": "http",
        "root_path": "",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_route_whose_handler_checks_nothing_is_open_to_whom_the_table_says(route: Route) -> None:
    app, path = api(), "/v1" + route.path.format(job_id=JOB.id, gpu=0, window=1, number=1)
    answers = {name: status_of(app, route.method, path, who) for name, who in CALLERS.items()}
    assert answers == {name: 204 if name in OPEN_TO[route.access] else 403 for name in CALLERS}


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/holds"])
def test_a_daemon_of_one_user_submits_for_that_user_alone(path: str) -> None:
    app = api(DAEMONS_OWNER)
    own = Caller(1, DAEMONS_OWNER, DAEMONS_OWNER)
    assert status_of(app, "POST", path, own) == 204
    assert {status_of(app, "POST", path, who) for who in CALLERS.values()} == {403}


@pytest.mark.parametrize("number", [8, -1, 1 << 70])
def test_a_job_that_is_not_there_is_not_found_by_anyone(number: int) -> None:
    for caller in CALLERS.values():
        assert status_of(api(), "POST", f"/v1/jobs/{number}/cancel", caller) == 404


def test_nothing_is_served_but_the_table_and_its_description() -> None:
    app = api()._app
    assert isinstance(app, Router)
    served = {(each.route.method, each.path) for each in app.endpoints}
    table = {(route.method, "/v1" + route.path) for route in ROUTES}
    assert served == table | {("GET", "/v1/openapi.json")}


@pytest.mark.parametrize(
    "path", ["/", "/v1/job", "/v1/jobs/", "/v1/jobs//cancel", "/v1/jobs/1/2/3"]
)
def test_a_path_outside_the_table_is_not_found(path: str) -> None:
    assert status_of(api(), "POST", path, CALLERS["root"]) == 404


@pytest.mark.parametrize("method", ["PUT", "HEAD"])
def test_a_route_serves_no_other_method(method: str) -> None:
    assert status_of(api(), method, "/v1/jobs/1/cancel", CALLERS["root"]) == 405


@pytest.mark.parametrize("number", ["x", "1.5", "", "9" * 5000])
def test_a_number_that_is_none_is_refused(number: str) -> None:
    expected = 400 if number else 404
    assert status_of(api(), "POST", f"/v1/jobs/{number}/cancel", CALLERS["root"]) == expected


def test_parameters_are_parsed_as_the_handler_declares_them() -> None:
    seen: list[object] = []

    async def handler(
        job_id: int, user: str | None = None, since: float = 1.0, all: bool = False
    ) -> Response:
        seen.append((job_id, user, since, all))
        return Response(status=204)

    route = Route("GET", "/jobs/{job_id}", Access.ANYONE, "", handler, None)
    context = SimpleNamespace(rights=WithAdmins(0))
    app = build_api(ApiParts(**NO_PARTS | {"context": context}), [route])
    for query in ("", "user=a%20b&since=2.5&all=true&unknown=1", "user=&all=0"):
        assert status_of(app, "GET", "/v1/jobs/7", CALLERS["root"], query) == 204
    for query in ("since=soon", "all=perhaps"):
        assert status_of(app, "GET", "/v1/jobs/7", CALLERS["root"], query) == 400
    # The path says which job it is, whatever the query says.
    assert status_of(app, "GET", "/v1/jobs/7", CALLERS["root"], "job_id=8") == 204
    defaults = (7, None, 1.0, False)
    assert seen == [defaults, (7, "a b", 2.5, True), (7, "", 1.0, False), defaults]
