"""`doctor --prove`: a job that takes more than it leased, and what was done about it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon


def proofs(daemon: Daemon) -> dict[str, dict[str, Any]]:
    done = daemon.run("doctor", "--prove", "--json", check=False, timeout=240.0)
    checks = json.loads(done.stdout)["checks"]
    return {each["name"]: each for each in checks if each["name"].startswith("proof")}


@pytest.mark.parametrize(
    ("rules", "state", "said", "outcome"),
    [
        ({}, "ok", "ended", "over_lease"),
        ({"overuse": "warn"}, "warning", "not", "cancelled"),
        ({"overuse_tolerance": "2G"}, "warning", "2G", "exited"),
    ],
)
def test_what_the_watch_does_is_seen_and_told(
    make_daemon: Callable[..., Daemon],
    rules: dict[str, str],
    state: str,
    said: str,
    outcome: str,
) -> None:
    settings = {"grace": "2s", "overuse_grace": "1s"} | rules
    daemon = make_daemon(simulate="1x4G", settings=settings).start()
    found = proofs(daemon)
    assert found["proof: watch"]["state"] == state, found
    assert said in found["proof: watch"]["message"]
    assert daemon.job(1)["outcome"] == outcome
    # What cannot be tried here is not said to hold.
    assert found["proof: framework, devices"]["state"] == "warning"


def test_a_user_with_a_table_of_their_own_is_told_by_it(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    tables = f'[users.{tmp_path.owner()}]\noveruse_tolerance = "2G"\n'
    daemon = make_daemon(settings={"grace": "2s"}, tables=tables).start()
    told = json.loads(daemon.run("doctor", "--json", check=False).stdout)["overuse"]
    assert told == {"stops": True, "tolerance": 2 << 30, "grace": 30.0, "elastic": False}


def test_nobody_runs_out_of_memory_for_a_proof(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(simulate="1x4G").start()
    daemon.submit("--mem", "3500M", "sleep", "600")
    watch = proofs(daemon)["proof: watch"]
    assert (watch["state"], "1G" in watch["message"]) == ("warning", True)
    assert len(daemon.status()["jobs"]) == 1
