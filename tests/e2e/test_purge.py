"""Purging: of what a daemon has left in its state directory nothing stays, and of others' all."""

import signal
from pathlib import Path

from gpulease.daemon.install import remove_state

from .conftest import Daemon


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
