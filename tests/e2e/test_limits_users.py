"""The limits of a second Unix user, over the real socket, and the order of the queue."""

import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from daemon_rig import Daemon, wait_for
from e2e.users import OTHER, STRANGER, call, daemon_for_all, job, needs_root

pytestmark = needs_root

Make = Callable[..., Daemon]
G = 1 << 30
SLEEP = ("sleep", "600")


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(daemon_for_all(**settings))


def submit(daemon: Daemon, uid: int, *argv: str, **claim: object) -> int:
    status, content = attempt(daemon, uid, *argv, **claim)
    assert status == 201, content
    return int(content["id"])


def attempt(daemon: Daemon, uid: int, *argv: str, **claim: object) -> tuple[int, dict[str, object]]:
    body = {**job(*argv), "claim": {"memory": G, **claim}}
    status, content = call(daemon, uid, "POST", "/v1/jobs", body)
    return status, content


def why(daemon: Daemon, number: int) -> str:
    return str(wait_for("a reason", lambda: daemon.job(number)["reason"]))


def test_time_that_a_user_may_not_add_an_admin_may(make: Make) -> None:
    daemon = make(longest_time="1h", default_time="30m")
    number = submit(daemon, STRANGER, *SLEEP)
    daemon.wait_until(number, "active")
    assert daemon.job(number)["claim"]["time_limit"] == 1800
    path = f"/v1/jobs/{number}/extend"
    assert call(daemon, STRANGER, "POST", path, {"by": 1800})[0] == 200
    status, content = call(daemon, STRANGER, "POST", path, {"by": 1800})
    assert (status, content["error"]["code"]) == (400, "bad_value")
    assert call(daemon, 0, "POST", path, {"by": 1800})[0] == 200
    assert daemon.job(number)["claim"]["time_limit"] == 5400


def test_a_reload_changes_a_limit_under_waiting_jobs(make: Make) -> None:
    daemon = make(most_running="1")
    first, second = (submit(daemon, STRANGER, *SLEEP) for _ in range(2))
    daemon.wait_until(first, "active")
    assert "most_running" in why(daemon, second)
    (daemon.folder / "config.toml").write_text('most_running = "none"\ngrace = "2s"\n')
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_until(second, "active")


def test_ages_history_and_order_outlive_the_daemon(make: Make) -> None:
    daemon = make(most_running="8")
    for _ in range(3):
        daemon.wait_until(submit(daemon, STRANGER, "true", memory=8 * G), "ended")
    running = [submit(daemon, STRANGER, *SLEEP, memory=8 * G) for _ in range(2)]
    for each in running:
        daemon.wait_until(each, "active")
    waiting = [submit(daemon, uid, *SLEEP, memory=8 * G) for uid in (STRANGER, STRANGER, OTHER)]
    wait_for("all have an age", lambda: None not in ages(daemon, waiting))
    before = ages(daemon, waiting)
    assert 1_000_000 <= column(daemon, "predicted_run_us", running[0]) < 60_000_000, "as the last"

    daemon.kill()
    daemon.start()

    assert ages(daemon, waiting) == before
    daemon.cancel(running[0])
    daemon.wait_until(waiting[2], "active")
    daemon.cancel(running[1])
    daemon.wait_until(waiting[0], "active")


def ages(daemon: Daemon, jobs: list[int]) -> list[object]:
    return [column(daemon, "aging_since_at", each) for each in jobs]


def column(daemon: Daemon, name: str, number: int) -> object:
    """Return what the database has of a job."""
    with closing(sqlite3.connect(daemon.state / "gpulease.db")) as database:
        found = database.execute(f"SELECT {name} FROM jobs WHERE id = ?", (number,)).fetchone()
    return found[0]
