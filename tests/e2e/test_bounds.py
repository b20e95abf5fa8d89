"""What the API refuses: every bound, over the real socket."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from fuzz.unix import said

from daemon_rig import Daemon, wait_for
from e2e.asking import raw
from gpulease.wire.requests import LARGEST_REQUEST

GOOD: dict[str, Any] = {"argv": ["true"], "cwd": "/", "environment": {}}

LIMITED: dict[str, Any] = {"claim": {"time_limit": 60}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("bounds"))
    yield made.start()
    made.end_all()


def post(daemon: Daemon, body: object, path: str = "/v1/jobs") -> tuple[int, Any]:
    status, content = raw(daemon, "POST", path, json.dumps(body))
    return status, json.loads(content)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"argv": []}, 400),
        ({"argv": [""]}, 400),
        ({"argv": ["a\0b"]}, 400),
        ({"argv": ["\u20ac"]}, 400),
        ({"argv": "true"}, 400),
        ({"argv": ["x" * 200_000]}, 413),
        ({"argv": ["x" * 100_000] * 30}, 413),
        ({"cwd": "relative"}, 400),
        ({"cwd": "/" + "x" * 5000}, 400),
        ({"environment": {"A=B": "c"}}, 400),
        ({"environment": {"": "c"}}, 400),
        ({"environment": {"A": "\0"}}, 400),
        ({"environment": {"A": "x" * 200_000}}, 413),
        ({"umask": 0o1000}, 400),
        ({"umask": -1}, 400),
        ({"nice": 99}, 400),
        ({"soft_limits": {"PATH": 3}}, 400),
        ({"soft_limits": {"RLIMIT_NOFILE": 1 << 80}}, 400),
        ({"name": ""}, 400),
        ({"name": "a\nb"}, 400),
        ({"name": "x" * 129}, 400),
        ({"wait": -1}, 400),
        ({"wait": 1e300}, 400),
        ({"claim": {"memory": 0}}, 400),
        ({"claim": {"memory": -5}}, 400),
        ({"claim": {"memory": 1 << 80}}, 400),
        ({"claim": {"memory": 1 << 50}}, 422),
        ({"claim": {"memory": 1 << 30, "share": 50}}, 400),
        ({"claim": {"share": 0}}, 400),
        ({"claim": {"share": 101}}, 400),
        ({"claim": {"gpus": 0}}, 400),
        ({"claim": {"gpus": 99}}, 422),
        ({"claim": {"time_limit": 0}}, 400),
        ({"claim": {"time_limit": "soon"}}, 400),
        ({"options": {"split": 0}}, 400),
        ({"options": {"split_sizes": [0]}}, 400),
        ({"options": {"split_sizes": [1 << 20] * 65}}, 400),
        ({"claim": {"memory": 1 << 30}, "options": {"split_sizes": [1 << 30, 1]}}, 400),
        ({"options": {"omp_threads": 0}}, 400),
        ({"options": {"processes": 0}}, 400),
        ({"options": {"visible": "all"}}, 400),
        ({"options": {"inter_op_threads": 0}}, 400),
        ({"grace": -1}, 400),
        ({"grace": 86401}, 400),
        ({"terminal": {"rows": 0, "columns": 80}}, 400),
        ({"terminal": {"rows": 24, "columns": 65536}}, 400),
        ({"terminal": {"rows": 24}}, 400),
        ({"terminal": {"rows": 24, "columns": 80, "attributes": [0] * 65}}, 400),
        ({"terminal": {"rows": 24, "columns": 80, "attributes": [0] * 5}}, 400),
        ({"terminal": {"rows": 24, "columns": 80, "attributes": [0] * 5 + [-1]}}, 400),
        ({"terminal": {"rows": 24, "columns": 80, "attributes": [0] * 5 + [1 << 32]}}, 400),
        ({"early_signal": {"signal": 10, "before": 5}}, 400),
        ({**LIMITED, "early_signal": {"signal": 9, "before": 5}}, 400),
        ({**LIMITED, "early_signal": {"signal": 19, "before": 5}}, 400),
        ({**LIMITED, "early_signal": {"signal": 0, "before": 5}}, 400),
        ({**LIMITED, "early_signal": {"signal": 65, "before": 5}}, 400),
        ({**LIMITED, "early_signal": {"signal": 10, "before": 0}}, 400),
        ({**LIMITED, "early_signal": {"signal": 10, "before": 60}}, 400),
    ],
)
def test_a_submission_past_a_bound_is_refused_with_a_sentence(
    daemon: Daemon, change: dict[str, Any], status: int
) -> None:
    got, content = post(daemon, {**GOOD, **change})
    assert got == status, content
    assert content["error"]["message"]
    assert "\n" not in content["error"]["message"]


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        ({}, 400),
        ({"environment": {}}, 400),
        ({"environment": {}, "pid": "me"}, 400),
        ({"environment": {}, "pid": 1 << 80}, 400),
        ({"environment": {"A": "\0"}, "pid": os.getpid()}, 400),
        ({"environment": {"A": "x" * 200_000}, "pid": os.getpid()}, 413),
        ({"environment": {}, "pid": os.getpid(), "name": "a\nb"}, 400),
        ({"environment": {}, "pid": os.getpid(), "wait": -1}, 400),
        ({"environment": {}, "pid": os.getpid(), "claim": {"gpus": 99}}, 422),
        ({"environment": {}, "pid": os.getpid(), "options": {"split": 65}}, 400),
    ],
)
def test_a_lease_past_a_bound_is_refused_with_a_sentence(
    daemon: Daemon, wanted: dict[str, Any], status: int
) -> None:
    got, content = post(daemon, wanted, "/v1/holds")
    assert got == status, content
    assert content["error"]["message"]


def test_a_terminal_a_warning_and_a_grace_within_their_bounds_are_taken(daemon: Daemon) -> None:
    wanted = {
        **GOOD,
        "claim": {"memory": 1 << 30, "time_limit": 60},
        "terminal": {"rows": 24, "columns": 80, "attributes": None, "stderr": False},
        "early_signal": {"signal": 10, "before": 59},
        "grace": 0,
    }
    status, content = post(daemon, wanted)
    assert (status, content["terminal"]) == (201, True), content
    assert daemon.wait_until(content["id"], "ended")["exit_status"] is not None


def refusal(answer: bytes) -> tuple[bytes, Any]:
    """Return the first line of the answer, and its error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body)["error"]


@pytest.mark.parametrize(
    "malformed",
    [b"no request\r\n\r\n", b"GET /v1/status HTTP/1.1\r\n:\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"],
)
def test_what_is_no_http_is_refused_as_all_else_is(daemon: Daemon, malformed: bytes) -> None:
    status, error = refusal(said(daemon.socket, malformed))
    assert (status, error["code"]) == (b"HTTP/1.1 400 Bad Request", "bad_value")
    assert error["hint"]


def test_a_body_declared_too_large_is_refused_before_it_is_sent(daemon: Daemon) -> None:
    head = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    )
    _, error = refusal(said(daemon.socket, head % (LARGEST_REQUEST + 1), more=True))
    assert error["code"] == "too_large"


@pytest.mark.parametrize("asked", ["jobs?limit=0", "jobs?after=-1", "history?since=nan"])
def test_a_listing_that_is_refused_is_not_called_a_submission(daemon: Daemon, asked: str) -> None:
    _, error = refusal(said(daemon.socket, f"GET /v1/{asked} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))
    assert "submit" not in error["message"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/status HTTP/1.1\r\nA: " + b"x" * 60_000, 200),
        (b"GET /v1/status HTTP/1.1\r\nA: " + b"x" * 70_000, 413),
        (b"GET /v1/status HTTP/1.1\r\n" + b"\r\n".join([b"A: " + b"x" * 1000] * 70), 413),
        (b"GET /v1/status?" + b"x" * 70_000 + b" HTTP/1.1\r\nA: x", 413),
    ],
    ids=["below", "one header", "many headers", "address"],
)
def test_a_head_over_64_kib_is_refused_also_when_it_comes_all_at_once(
    daemon: Daemon, head: bytes, status: int
) -> None:
    end = b"\r\nHost: g\r\nConnection: close\r\n\r\n"
    answer = said(daemon.socket, head + end, more=True)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert (b" 64" in answer) == (status != 200)


def test_a_process_with_a_name_that_is_no_text_does_not_hide_the_status(daemon: Daemon) -> None:
    odd = b"B\xe4h".decode("utf-8", "surrogateescape")
    script = "import time; print('up', flush=True); time.sleep(600)"
    job = daemon.submit("--mem", "1G", "--", "python3", "-c", script, odd)
    seen = wait_for(
        "it is seen on its GPU",
        lambda: [p for gpu in daemon.status()["gpus"] for p in gpu["processes"] if p["job"] == job],
    )
    assert "xe4h" in seen[0]["command"]
    assert daemon.status()
    daemon.cancel(job)


@pytest.mark.parametrize("start", [6, 10**6, (1 << 63) - 1, 10**23])
def test_output_from_a_byte_that_was_never_written_is_nothing(daemon: Daemon, start: int) -> None:
    job = daemon.submit("--mem", "512M", "--", "echo", "hello")
    daemon.wait_until(job, "ended")
    assert raw(daemon, "GET", f"/v1/jobs/{job}/logs?stdout_from={start}")[1] == b""
