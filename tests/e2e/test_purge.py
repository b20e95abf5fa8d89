"""Purging: of what a daemon has left in its state directory nothing stays, and of others' all."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon_rig import Daemon
from daemon_stand_in.terminal import Terminal
from goldens import mentions
from gpulease.setup.install import purge_notice, remove_state

from .asking import hold, submit, when_in


def used(daemon: Daemon) -> Path:
    """Return the state directory of a daemon that has run a job, and has left."""
    daemon.run("run", "--mem", "1G", "--", "echo", "ran")
    daemon.kill(signal.SIGTERM)
    daemon.process = None
    (daemon.state / "gpulease.db.0001.backup").touch()
    return daemon.state


def test_nothing_of_a_daemon_is_left(daemon: Daemon) -> None:
    state, said = used(daemon), list[str]()
    there = {path.name for path in state.iterdir()}
    remove_state(state, said.append)
    assert not state.exists()
    assert {Path(line.removeprefix("removed ")).name for line in said} == there


def test_what_is_not_a_daemons_stays(daemon: Daemon) -> None:
    state = used(daemon)
    (state / "notes").touch()
    remove_state(state, lambda _: None)
    assert [path.name for path in state.iterdir()] == ["notes"]


def test_who_purges_is_told_how_many_jobs_wait_hold_and_run(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon().start()
    for _ in range(2):
        when_in(daemon, submit(daemon, "true"), "ended")
    when_in(daemon, hold(daemon, None, time_limit=3600), "active")
    when_in(daemon, submit(daemon, "sleep", "1000"), "active")
    exclusive = ("--exclusive", "--gpus", "2", "--mem", "1G", "--", "true")
    for _ in range(3):
        daemon.submit(*exclusive)
    notice = purge_notice(daemon.state)
    assert mentions(notice, str(daemon.state), "3 queued", "1 hold", "1 running", "2 ended")


def test_a_record_that_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "gpulease.db").write_bytes(b"no database" * 1000)
    assert "queued" not in purge_notice(tmp_path).replace("Queued", "")
    assert "0 queued" in purge_notice(tmp_path / "nothing")


@pytest.mark.parametrize(("answer", "agreed"), [("yes", True), ("", False)])
def test_a_purge_is_confirmed_on_the_terminal(answer: str, agreed: bool) -> None:
    ask = "from gpulease.setup.__main__ import _ask; raise SystemExit(not _ask('this deletes it'))"
    terminal = Terminal([sys.executable, "-c", ask])
    terminal.read_until("this deletes it")
    terminal.read_until("[y/N]")
    terminal.type(f"{answer}\n".encode())
    assert (terminal.finish() == 0) == agreed


def test_without_a_terminal_a_purge_is_refused_with_a_hint() -> None:
    ask = "from gpulease.setup.__main__ import _ask; _ask('this deletes it')"
    asked = subprocess.run(
        [sys.executable, "-c", ask], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert asked.returncode != 0
    assert "this deletes it" in asked.stderr
    assert "--purge --yes" in asked.stderr
