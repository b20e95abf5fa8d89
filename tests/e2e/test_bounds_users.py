"""What one user may have at once, over the real socket, from a daemon of root's."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for
from e2e.users import (
    OTHER,
    STRANGER,
    as_user,
    call,
    daemon_for_all,
    job,
    needs_root,
    told,
)

pytestmark = needs_root

Make = Callable[..., Daemon]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(daemon_for_all(**settings))


def fill(daemon: Daemon) -> None:
    """Lease both GPUs, so that whatever is submitted waits."""
    for _ in range(2):
        daemon.wait_until(daemon.submit("--mem", "8G", "--", "sleep", "600"), "active")


def error(answer: list[object]) -> tuple[object, dict[str, str]]:
    status, content = answer
    assert isinstance(content, dict)
    return status, content["error"]


def test_a_queue_has_room_for_so_many_jobs_of_one_user_and_for_any_of_others_and_root(
    make: Make,
) -> None:
    daemon = make(most_waiting="3")
    fill(daemon)
    ids = [call(daemon, STRANGER, "POST", "/v1/jobs", job())[1]["id"] for _ in range(3)]
    status, why = error(call(daemon, STRANGER, "POST", "/v1/jobs", job()))
    assert (status, why["code"]) == (429, "too_many")
    assert "3 queued jobs" in why["message"]
    assert why["hint"]
    assert call(daemon, OTHER, "POST", "/v1/jobs", job())[0] == 201
    for _ in range(4):
        daemon.submit("--mem", "8G", "true")
    assert call(daemon, STRANGER, "POST", f"/v1/jobs/{ids[0]}/cancel")[0] == 200
    assert call(daemon, STRANGER, "POST", "/v1/jobs", job())[0] == 201


def test_of_submissions_at_once_none_slips_past_the_bound(make: Make) -> None:
    daemon = make(most_waiting="5")
    fill(daemon)
    wanted = json.dumps(job())
    program = f"""
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    tell([status for status, _ in
          pool.map(lambda _: call("POST", "/v1/jobs", json.loads({wanted!r})), range(40))])
"""
    with as_user(daemon, STRANGER, program) as process:
        statuses = told(process)
    assert sorted(set(statuses)) == [201, 429]
    assert statuses.count(201) == 5


def test_what_waiting_jobs_keep_in_the_database_is_bounded_for_each_user(make: Make) -> None:
    daemon = make(most_waiting_bytes="1M")
    fill(daemon)
    noise = {f"A{n}": os.urandom(25_000).hex() for n in range(20)}
    large = job(environment=noise)
    assert call(daemon, STRANGER, "POST", "/v1/jobs", large)[0] == 201
    status, why = error(call(daemon, STRANGER, "POST", "/v1/jobs", large))
    assert (status, why["code"]) == (429, "too_many")
    assert "1M" in why["message"]
    assert call(daemon, STRANGER, "POST", "/v1/jobs", job())[0] == 201, "there is some room left"
    assert call(daemon, OTHER, "POST", "/v1/jobs", large)[0] == 201
    assert len(daemon.status()["jobs"]) == 5, "what was refused left nothing behind"


def test_leases_without_a_job_are_bounded_and_share_a_descriptor_for_one_process(
    make: Make,
) -> None:
    daemon = make(most_holds="20")
    wanted = {"environment": {}, "claim": {"memory": 300 << 20}}
    program = f"""
wanted = json.loads({json.dumps(wanted)!r})
wanted["pid"] = os.getpid()
tell([call("POST", "/v1/holds", wanted) for _ in range(21)])
sys.stdin.read()
"""
    with as_user(daemon, STRANGER, program) as process:
        answers = told(process)
        assert [status for status, _ in answers] == [201] * 20 + [429]
        why = answers[-1][1]["error"]
        assert why["code"] == "too_many"
        assert "gpulease cancel" in why["hint"]
        wait_for(
            "all are held", lambda: {j["state"] for j in daemon.status()["jobs"]} == {"active"}
        )
        assert daemon.process is not None
        pidfds = 0
        for each in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                pidfds += "pidfd" in each.readlink().name
        assert pidfds == 1
        assert call(daemon, STRANGER, "POST", "/v1/jobs", job("true", memory=1 << 30))[0] == 201
    wait_for("the end of the one process ends all", lambda: not daemon.status()["jobs"])


def test_a_grace_past_the_longest_is_refused_and_a_cancel_may_shorten_one(make: Make) -> None:
    daemon = make(longest_grace="10m")
    status, why = error(call(daemon, STRANGER, "POST", "/v1/jobs", job(grace=601)))
    assert (status, why["code"]) == (400, "bad_value")
    assert "10m" in why["message"] + why["hint"]
    deaf = "trap '' TERM; while :; do sleep 1; done"
    number = call(daemon, STRANGER, "POST", "/v1/jobs", job("sh", "-c", deaf, grace=600))[1]["id"]
    daemon.wait_until(number, "active")
    assert call(daemon, STRANGER, "POST", f"/v1/jobs/{number}/cancel")[1]["state"] == "releasing"
    status, why = error(call(daemon, 0, "POST", f"/v1/jobs/{number}/cancel", {"grace": -1}))
    assert (status, why["code"]) == (400, "bad_value")
    daemon.run("cancel", "--grace", "1s", str(number))
    assert daemon.wait_until(number, "ended")["outcome"] == "cancelled"
