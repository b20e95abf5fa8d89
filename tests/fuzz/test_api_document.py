"""The API against its own document: requests are made from that, and each answer is in it."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given, strategies
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from daemon_rig import Daemon
from fuzz import examples
from fuzz.unix import BASE, PATIENCE_S, session_on
from gpulease.server.app import ApiParts, routes

_CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
_A_PIECE = 64 << 10
_SOUND = {"argv": ["true"], "cwd": "/", "environment": {}, "pid": os.getpid(), "wait": 0}
_NO_PARTS = ApiParts(*[None] * 8)  # type: ignore[arg-type]
OPERATIONS = [(route.method, f"/v1{route.path}") for route in routes(_NO_PARTS)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("document"), settings={"grace": "1s"})
    yield made.start()
    made.end_all()


@pytest.fixture(scope="module")
def session(daemon: Daemon) -> Iterator[requests.Session]:
    with session_on(daemon.socket) as made:
        yield made


@pytest.fixture(scope="module")
def document(session: requests.Session) -> dict[str, Any]:
    found: dict[str, Any] = session.get(f"{BASE}/v1/openapi.json", timeout=PATIENCE_S).json()
    return found


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_whatever_is_asked_the_answer_is_one_of_those_documented(
    daemon: Daemon,
    session: requests.Session,
    document: dict[str, Any],
    method: str,
    path: str,
) -> None:
    _end_all(daemon)
    operation = schemathesis.openapi.from_dict(document)[path][method]
    some = [_one_that_runs(session), _one_that_has_ended(daemon)]

    @examples(20)
    @given(_cases(operation), strategies.sampled_from([*some, None]))
    def check(case: schemathesis.Case, job: int | None) -> None:
        if job is not None and "job_id" in case.path_parameters:
            case.path_parameters["job_id"] = job
        # Who follows waits for more, and has no answer until then.
        case.query.pop("follow", None)
        if job is not None and isinstance(case.body, dict) and method == "POST":
            # Else no body would get past its first mistake.
            case.body.update({name: it for name, it in _SOUND.items() if name in case.body})
        with _answered(session, case) as answer:
            _check(case, answer)

    check()
    assert daemon.process is not None
    assert daemon.process.poll() is None, daemon.log
    assert "Traceback" not in daemon.log
    assert session.get(f"{BASE}/v1/status", timeout=PATIENCE_S).status_code == 200


def _cases(operation: Any) -> strategies.SearchStrategy[schemathesis.Case]:
    """Make requests as they are described, and others where there is something to get wrong."""
    right = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    wrong = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    return right | wrong if operation.body or operation.query else right


def _one_that_runs(session: requests.Session) -> int:
    job = {"argv": ["sleep", "600"], "cwd": "/", "environment": {"PATH": "/bin:/usr/bin"}}
    claim = {"memory": 1 << 29, "time_limit": 3600.0}
    made = session.post(f"{BASE}/v1/jobs", json={**job, "claim": claim}, timeout=PATIENCE_S)
    assert made.status_code == 201, made.text
    return int(made.json()["id"])


def _one_that_has_ended(daemon: Daemon) -> int:
    job = daemon.submit("--mem", "512M", "--", "echo", "hello")
    daemon.wait_until(job, "ended")
    return job


def _end_all(daemon: Daemon) -> None:
    daemon.run("unpause", check=False)
    for window in json.loads(daemon.run("reserve", "--list", "--json").stdout)["windows"]:
        daemon.run("reserve", "--cancel", str(window["id"]))
    for job in [each["id"] for each in daemon.status()["jobs"]]:
        daemon.run("cancel", str(job), check=False)
        daemon.wait_until(job, "ended")


@contextlib.contextmanager
def _answered(session: requests.Session, case: schemathesis.Case) -> Iterator[requests.Response]:
    """Make the request; of a stream without end the beginning is the answer."""
    asked = case.as_transport_kwargs(base_url=BASE)
    with session.request(**asked, stream=True, timeout=PATIENCE_S) as answer:
        if answer.headers["content-type"] == "application/json":
            assert answer.content
        else:
            answer._content = next(answer.iter_content(_A_PIECE), b"")
            answer._content_consumed = True
        yield answer


def _check(case: schemathesis.Case, answer: requests.Response) -> None:
    assert answer.status_code < 500, answer.text
    case.validate_response(Response.from_requests(answer, verify=False), checks=_CHECKS)
    if answer.status_code >= 400 and answer.headers["content-type"] == "text/plain":
        assert answer.text.startswith("cannot "), answer.text
    elif answer.status_code >= 400:
        told = json.loads(answer.content)["error"]
        assert told["message"], told
        assert "\n" not in told["message"], told
        assert len(answer.content) < 4096, told
