"""`doctor --prove`: a job that takes more than it leased, and what was done about it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from e2e.conftest import Daemon


def proofs(daemon: Daemon) -> dict[str, dict[str, Any]]:
    done = daemon.run("doctor", "--prove", "--json", check=False, timeout=240.0)
    checks = json.loads(done.stdout)["checks"]
    return {each["name"]: each for each in checks if each["name"].startswith("proof")}


@pytest.mark.parametrize(
    ("overuse", "state", "said", "outcome"),
    [
        ("stop", "ok", "was noticed and ended", "over_lease"),
        ("warn", "warning", "was told to its owner and not ended", "cancelled"),
    ],
)
def test_what_the_watch_does_is_seen_and_told(
    make_daemon: Callable[..., Daemon], overuse: str, state: str, said: str, outcome: str
) -> None:
    settings = {"grace": "2s", "overuse": overuse, "overuse_grace": "1s"}
    daemon = make_daemon(simulate="1x4G", settings=settings).start()
    found = proofs(daemon)
    assert found["proof: watch"]["state"] == state, found
    assert said in found["proof: watch"]["message"]
    assert daemon.job(1)["outcome"] == outcome
    # Nobody asked for too little or too much there.
    assert json.loads(daemon.run("report", "--json").stdout)["users"] == []
    # What cannot be tried here is not said to hold.
    assert found["proof: framework, devices"]["state"] == "warning"


def test_nobody_runs_out_of_memory_for_a_proof(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(simulate="1x4G").start()
    daemon.submit("--mem", "3500M", "sleep", "600")
    watch = proofs(daemon)["proof: watch"]
    assert (watch["state"], "no GPU has 1G free" in watch["message"]) == ("warning", True)
    assert len(daemon.status()["jobs"]) == 1
