"""A machine whose daemon is away: it is waited for, and nobody starts one of their own instead."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpulease
from daemon_stand_in.daemon import StandIn
from goldens import mentions
from gpulease import config, locations, user_daemon
from gpulease.cli.app import call
from gpulease.client import Client, discovery, has_daemon, machine_daemon
from gpulease.errors import NoDaemon


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the daemon of a machine listens, which is not there now."""
    for variable in ("GPULEASE_SOCKET", "GPULEASE_JOB"):
        monkeypatch.delenv(variable, raising=False)
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(config, "SYSTEM_SOCKET", tmp_path / "machine" / "gpuleased.sock")
    monkeypatch.setattr(locations, "SYSTEM_SOCKET", str(config.SYSTEM_SOCKET))
    monkeypatch.setattr(discovery, "BACK_WITHIN_S", 0.0)
    monkeypatch.setattr(user_daemon, "ensure", _must_not_start)
    config.SYSTEM_SOCKET.parent.mkdir()
    return config.SYSTEM_SOCKET


def _must_not_start(*_: object) -> None:
    raise AssertionError("a daemon of the user's own is started")


@pytest.fixture
def own(away: Path) -> Iterator[StandIn]:
    """Yield a daemon of the user's own, which answers."""
    config.personal_socket().parent.mkdir()
    stand_in = StandIn(config.personal_socket())
    stand_in.open()
    yield stand_in
    stand_in.close()


@pytest.mark.parametrize(
    "line", ["run --mem 1G true", "run -d true", "hold --mem 1G", "status", "list", "logs 1"]
)
def test_every_verb_waits_says_so_and_fails_with_a_hint(
    own: StandIn, away: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(line.split()) == NoDaemon.exit_code == 125
    out, said = capsys.readouterr()
    assert out == ""
    assert mentions(said.splitlines()[0], "0s", str(away))
    assert "systemctl status" in said.split("\n\nhint: ")[1]
    assert f"export GPULEASE_SOCKET={own.path}; " in said and "gpuleased --personal" in said
    assert own.asked == [], "that would lease the same GPUs"


def test_doctor_counts_it_as_a_failure(away: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["doctor"]) == 1
    assert re.search(rf"FAILURE daemon: .*{away}", capsys.readouterr().out)


def test_doctor_misses_no_driver_where_gpus_are_simulated(
    away: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    away.parent.rmdir()
    monkeypatch.setenv("GPULEASE_SIMULATE", "2x8G")
    call(["doctor"])
    said = capsys.readouterr().out
    (driver,) = [line for line in said.splitlines() if " driver: " in line]
    assert driver.split()[0] == "ok"
    assert "2x8G" in driver


@pytest.mark.parametrize("ask", [Client, lambda: gpulease.lease("1G")])
def test_so_does_python(ask: object, own: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NoDaemon) as raised:
        ask()  # type: ignore[operator]
    assert "systemctl status gpuleased" in (raised.value.hint or "")
    assert [record.name for record in caplog.records] == ["gpulease"]
    assert own.asked == []


def test_one_that_comes_back_is_used(own: StandIn, away: Path) -> None:
    back, said = StandIn(away), list[str]()

    def comes_back(line: str) -> None:
        said.append(line)
        back.open()

    try:
        assert machine_daemon(comes_back) == away
        assert len(said) == 1
        assert machine_daemon(said.append) == away
        assert len(said) == 1, "nothing to wait for"
    finally:
        back.close()


def test_a_socket_that_nobody_listens_on_is_named(away: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(away))
    with pytest.raises(NoDaemon, match=str(away)):
        machine_daemon(lambda _: None)


def test_one_that_is_removed_meanwhile_is_not_waited_for(away: Path) -> None:
    assert machine_daemon(lambda _: away.parent.rmdir()) is None
    assert not has_daemon()
    assert machine_daemon(pytest.fail) is None


def test_a_daemon_that_is_named_is_used_all_the_same(
    own: StandIn, away: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPULEASE_SOCKET", str(own.path))
    assert call(["status"]) == 0
    assert capsys.readouterr().err == ""
