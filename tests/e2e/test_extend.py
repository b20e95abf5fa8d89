"""More time for a job that runs under a real shim, or less."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for
from e2e.asking import client, submit, when_in


@pytest.fixture
def daemon(shared: Daemon) -> Daemon:
    return shared


# Says so when it is asked to go, and goes on until it is let.
_UNTIL = "trap 'echo asked' TERM; echo up; while ! test -e {gate}; do sleep 0.05; done; exit 7"


def until(gate: Path) -> tuple[str, str, str]:
    return "bash", "-c", _UNTIL.format(gate=gate)


def test_a_waiting_job_starts_with_its_new_limit(daemon: Daemon) -> None:
    first = submit(daemon, "sleep", "600", memory=8 << 30)
    second = submit(daemon, "sleep", "600", memory=8 << 30)
    # The shortest of jobs that wait together would start first.
    when_in(daemon, second, "active")
    waiting = submit(daemon, "sleep", "600", memory=8 << 30, time_limit=3600)
    assert client(daemon).extend(waiting, -3599).state == "queued"
    client(daemon).cancel(first)
    ended = when_in(daemon, waiting, "ended")
    assert (ended.outcome, ended.claim.time_limit) == ("time_limit", 1.0)


def test_a_limit_that_the_shim_never_heard_of_is_told_after_the_restart(daemon: Daemon) -> None:
    """The daemon may die between the commit and the telling."""
    job = submit(daemon, "sleep", "600", time_limit=3600)
    when_in(daemon, job, "active")
    daemon.kill()
    with closing(sqlite3.connect(daemon.state / "gpulease.db")) as connection, connection:
        connection.execute("UPDATE jobs SET time_limit_us = 2000000 WHERE id = ?", (job,))
    daemon.start()
    assert when_in(daemon, job, "ended").outcome == "time_limit"


def test_logs_of_a_waiting_job_wait_for_its_start_and_go_on_to_its_end(
    daemon: Daemon, tmp_path: Path
) -> None:
    blockers = [submit(daemon, "sleep", "600", memory=8 << 30) for _ in range(2)]
    when_in(daemon, blockers[1], "active")
    gate = tmp_path / "gate"
    waiting = submit(daemon, *until(gate), memory=8 << 30)
    assert list(client(daemon).logs(waiting)) == []
    pieces: list[bytes] = []
    follower = threading.Thread(
        target=lambda: pieces.extend(
            piece for _, piece in client(daemon).logs(waiting, follow=True, tail=5)
        )
    )
    follower.start()
    client(daemon).cancel(blockers[0])
    wait_for("its first words", lambda: pieces == [b"up\n"])
    gate.touch()
    follower.join(120)
    assert not follower.is_alive()
