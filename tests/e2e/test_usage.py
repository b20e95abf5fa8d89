"""What a hook reports of its pools: heard from a job's own user alone, shown, kept, and bounded."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from e2e.asking import raw

M = 1 << 20


def post(daemon: Daemon, job: int, content: object) -> int:
    return int(raw(daemon, "POST", f"/v1/jobs/{job}/usage", json.dumps(content))[0])


@pytest.fixture
def job(daemon: Daemon) -> Iterator[int]:
    number = daemon.submit("--mem", "1G", "sleep", "600")
    daemon.wait_until(number, "active")
    yield number
    daemon.run("cancel", str(number), check=False)


def report(gpu: str, **sizes: Any) -> dict[str, Any]:
    return {"framework": "torch", "version": "2.13.0", "gpus": [{"gpu": gpu, **sizes}]}


def test_what_a_process_reports_is_shown_and_outlives_job_and_daemon(
    daemon: Daemon, job: int
) -> None:
    gpu = daemon.job(job)["leases"][0]["gpu"]

    assert post(daemon, job, report(gpu, pool=300 * M, peak=250 * M, limit=424 * M)) == 204
    assert post(daemon, job, report(gpu, pool=100 * M, peak=200 * M, limit=424 * M)) == 204

    shown = daemon.job(job)["leases"][0]["pools"]
    assert shown == [
        {
            "framework": "torch", "version": "2.13.0", "limit": 424 * M, "peak": 250 * M,
            "charged": 600 * M, "beside": None,
        }
    ]  # fmt: skip
    assert "torch 2.13.0" in daemon.run("show", str(job)).stdout

    daemon.cancel(job)
    daemon.wait_until(job, "ended")
    assert daemon.job(job)["leases"][0]["pools"] == shown

    def is_written() -> bool:
        with closing(sqlite3.connect(daemon.state / "gpulease.db")) as connection:
            return (
                connection.execute("SELECT 1 FROM pools WHERE job = ?", [job]).fetchone()
                is not None
            )

    wait_for("it is written down", is_written)
    daemon.kill()
    daemon.start()
    assert daemon.job(job)["leases"][0]["pools"] == shown


def test_a_report_on_a_gpu_that_was_not_leased_is_passed_over(daemon: Daemon, job: int) -> None:
    assert post(daemon, job, report("GPU-of-somebody-else", pool=1)) == 204

    assert daemon.job(job)["leases"][0]["pools"] == []


NO_REPORTS: list[object] = [
    {"framework": "caffe", "version": "1", "gpus": []},
    {"framework": "torch", "version": "1", "gpus": [{"gpu": "x"}] * 65},
    {"framework": "torch", "version": "1", "gpus": [{"gpu": "x", "pool": -1}]},
    {"framework": "torch", "version": "1", "gpus": [{"gpu": "x", "peak": 1 << 60}]},
    {"framework": "torch", "version": "1", "gpus": [{"gpu": "x", "limit": 1e300}]},
    {"framework": "", "version": "1", "gpus": [], "state": "limited"},
    {"framework": "torch", "version": "1", "gpus": [], "state": "unlimited"},
    {"framework": "torch", "version": "1", "gpus": [], "steps": -1, "seconds": 1},
    {"framework": "torch", "version": "1", "gpus": [], "steps": 1, "seconds": 1e300},
    [],
]


def test_what_is_no_report_is_refused(daemon: Daemon, job: int) -> None:
    assert [post(daemon, job, each) for each in NO_REPORTS] == [400] * len(NO_REPORTS)
    assert post(daemon, 77, report("GPU", pool=1)) == 404
