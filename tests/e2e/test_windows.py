"""Windows on a real daemon, with a second user, kills in the middle, and a clock that jumps."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from daemon_rig import open_folder, wait_for
from goldens import mentions

from .test_faults_clock import ClockedDaemon
from .users import STRANGER, call, job, needs_root

NOBODY = 65534
HOUR_S = 3600
pytestmark = needs_root


@pytest.fixture
def daemon() -> Iterator[ClockedDaemon]:
    """Yield a daemon that every user can reach, with two GPUs and a clock that can be set."""
    with open_folder() as folder:
        made = ClockedDaemon(folder, settings={"grace": "1s"})
        made.environment = {"CLOCK_AHEAD": str(made.ahead)}
        made.set_clock(0)
        try:
            yield made.start()  # type: ignore[misc]
        finally:
            made.end_all()


def restart(daemon: ClockedDaemon) -> None:
    daemon.kill()
    daemon.start()


def windows(daemon: ClockedDaemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(daemon.run("reserve", "--json").stdout)["windows"]
    return found


def reason_of(daemon: ClockedDaemon, number: int) -> str:
    return " ".join(each["why"] for each in daemon.job(number)["refusals"])


def test_a_window_keeps_its_gpu_for_its_user_over_kills_and_a_clock_that_is_set(
    daemon: ClockedDaemon,
) -> None:
    reserve = ("reserve", "--gpu", "0", "--from", "+2h", "--for", "1h")
    said = daemon.run(*reserve, "--user", "nobody", "--name", "exam").stdout
    assert mentions(said, "exam", "GPU 0", "nobody")
    before = daemon.submit("--mem", "1G", "--time", "90m", "--exclusive", "--", "sleep", "600")
    daemon.wait_until(before, "active")
    elsewhere = daemon.submit("--mem", "8G", "--time", "3h", "--", "sleep", "600")
    daemon.wait_until(elsewhere, "active")
    indexes = {gpu["uuid"]: gpu["index"] for gpu in daemon.status()["gpus"]}
    assert indexes[daemon.job(elsewhere)["leases"][0]["gpu"]] == 1
    daemon.cancel(before)

    long = daemon.submit("--mem", "1G", "--time", "3h", "--", "sleep", "600")
    wait_for("the window is named", lambda: mentions(reason_of(daemon, long), "exam", "--time 1h"))
    restart(daemon)
    assert [each["name"] for each in windows(daemon)] == ["exam"]
    assert mentions(daemon.run("status").stdout, "exam", "nobody")

    short = daemon.submit("--mem", "1G", "--time", "1h", "--", "sleep", "600")
    daemon.wait_until(short, "active")
    daemon.set_clock(2 * HOUR_S + 60)
    wait_for("the window is on", lambda: windows(daemon)[0]["is_on"])
    assert windows(daemon)[0]["other_jobs"] == [short], "it is shown, and not ended"
    assert mentions(daemon.run("reserve").stdout, f"job {short} ")
    later = daemon.submit("--mem", "1G", "--time", "1m", "--", "true")
    status, own = call(daemon, NOBODY, "POST", "/v1/jobs", job("sleep", "600", memory=1 << 30))
    assert status == 201, own
    daemon.wait_until(own["id"], "active")
    restart(daemon)
    assert daemon.job(own["id"])["state"] == "active"
    assert daemon.job(later)["state"] == "queued"
    assert mentions(reason_of(daemon, later), "exam", "nobody")

    daemon.set_clock(3 * HOUR_S + 60)
    daemon.wait_until(later, "ended")
    wait_for("the window is gone", lambda: windows(daemon) == [])
    assert daemon.job(own["id"])["state"] == "active", "its jobs continue after it"


def test_everyone_may_list_windows_and_only_admins_make_and_remove_them(
    daemon: ClockedDaemon,
) -> None:
    begins_at = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    asked = {"gpus": 1, "lasts_for": 3600, "begins_at": begins_at, "users": ["nobody"]}
    assert call(daemon, STRANGER, "POST", "/v1/windows", asked)[0] == 403
    assert call(daemon, 0, "POST", "/v1/windows", asked)[0] == 201
    status, content = call(daemon, STRANGER, "GET", "/v1/windows")
    assert (status, content["windows"][0]["name"]) == (200, "nobody")
    assert call(daemon, STRANGER, "POST", "/v1/windows/nobody/cancel")[0] == 403
    assert call(daemon, 0, "POST", "/v1/windows/1/cancel")[0] == 200
    assert call(daemon, 0, "POST", "/v1/windows/1/cancel")[0] == 404
    assert windows(daemon) == []


def test_what_cannot_be_reserved_is_refused_with_a_reason(daemon: ClockedDaemon) -> None:
    daemon.run(
        "reserve", "--gpus", "1", "--every", "0 22 * * *", "--for", "10h", "--name", "nights"
    )
    refused = {
        "overlap": ["--gpus", "2", "--from", "now", "--for", "25h"],
        "overlap with itself": ["--gpus", "1", "--every", "0 * * * *", "--for", "3h"],
        "same name": ["--gpus", "1", "--from", "now", "--for", "1m", "--name", "nights"],
        "past": ["--gpus", "1", "--from", "2020-01-01", "--for", "1h"],
        "never": ["--gpus", "1", "--every", "0 0 31 2 *", "--for", "1h"],
        "too many": ["--gpus", "3", "--from", "now", "--for", "1h"],
        "no GPU": ["--gpu", "7", "--from", "now", "--for", "1h"],
        "no user": ["--gpus", "1", "--from", "now", "--for", "1h", "--user", "no-such-user"],
        "no group": ["--gpus", "1", "--from", "now", "--for", "1h", "--group", "no-such-group"],
        "no end": ["--gpus", "1", "--from", "now"],
        "no GPUs": ["--from", "now", "--for", "1h"],
        "no number": ["--gpus", "some", "--for", "1h"],
        "too short": ["--gpus", "1", "--for", "5s"],
        "a number as name": ["--gpus", "1", "--for", "1h", "--name", "17"],
        "two subjects": ["--list", "--cancel", "nights"],
        "not there": ["--cancel", "days"],
    }
    said = {}
    for what, line in refused.items():
        done = daemon.run("reserve", *line, check=False)
        assert done.returncode in (2, 125), (what, done)
        assert "\n\nhint: " in done.stderr, what
        said[what] = done.stderr.partition("\n")[0]
    assert mentions(said["overlap"], "nights")
    assert len(set(said.values())) == len(said)
    assert len(windows(daemon)) == 1
    assert mentions(daemon.run("reserve", "--cancel", "nights").stdout, "nights")
