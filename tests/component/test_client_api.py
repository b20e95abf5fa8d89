"""The typed client against HTTP on a real Unix socket."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from gpulease import config, locations
from gpulease.client import Client, answers, dial
from gpulease.errors import BY_CODE, GpuleaseError, NoDaemon, NoSuchJob, TooLarge
from gpulease.wire.frames import FrameKind, frame
from gpulease.wire.requests import LARGEST_REQUEST, SubmitRequest


@pytest.fixture
def client(daemon: StandIn) -> Client:
    return Client(daemon.path)


def test_each_method_returns_what_the_daemon_has(daemon: StandIn, client: Client) -> None:
    daemon.put(views.running(12))
    daemon.put(views.over(9))
    assert client.status() == daemon.status
    assert client.job(12) == daemon.jobs[12]
    assert [job.id for job in client.jobs().jobs] == [12]
    assert [job.id for job in client.jobs(everything=True, user="alice").jobs] == [9, 12]
    assert [job.id for job in client.jobs(everything=True, state="ended").jobs] == [9]
    assert client.doctor() == daemon.doctor
    assert client.cancel(12).id == 12
    assert client.submit(SubmitRequest(["a"], "/", {})) == daemon.on_submit


def test_errors_come_back_as_what_they_were(daemon: StandIn, client: Client) -> None:
    with pytest.raises(NoSuchJob, match="99"):
        client.job(99)
    for kind in set(BY_CODE.values()):
        daemon.refusal = kind("cannot do it: because", "do this")
        with pytest.raises(GpuleaseError) as raised:
            client.status()
        assert type(raised.value) is kind
        assert raised.value.text() == "cannot do it: because\n\nhint: do this"


def test_an_answer_that_is_no_error_reply_is_said_to_be_none(
    daemon: StandIn, client: Client
) -> None:
    daemon.raw = b"Internal Server Error"
    with pytest.raises(GpuleaseError, match="HTTP 500"):
        client.status()


def test_a_watch_ends_with_the_job(daemon: StandIn, client: Client) -> None:
    daemon.put(views.job(17))
    watched = client.watch(17)
    assert next(watched).state == "queued"
    daemon.put(views.running(17))
    assert next(view for view in watched if view.state != "queued").state == "active"
    daemon.put(views.over(17))
    assert [view.state for view in watched][-1] == "ended"


def test_a_watch_that_breaks_off_is_no_end(daemon: StandIn, client: Client) -> None:
    daemon.put(views.job(17))
    watched = client.watch(17)
    next(watched)
    daemon.close()
    with pytest.raises(NoDaemon):
        list(watched)


def test_logs_keep_the_streams_apart(daemon: StandIn, client: Client) -> None:
    daemon.put(views.over(17))
    daemon.logs = frame(FrameKind.STDOUT, b"\x00a") + frame(FrameKind.STDERR, b"b" * 100_000)
    assert list(client.logs(17, tail=3)) == [
        (FrameKind.STDOUT, b"\x00a"),
        (FrameKind.STDERR, b"b" * 100_000),
    ]
    path, _, query = daemon.asked[-1].partition("?")
    assert path == "GET /v1/jobs/17/logs"
    assert dict(parse_qsl(query)) == {
        "stdout": "true", "stderr": "true", "tail": "3", "stdout_from": "0", "stderr_from": "0",
    }  # fmt: skip


def test_a_request_over_the_bound_is_not_even_sent(daemon: StandIn, client: Client) -> None:
    with pytest.raises(TooLarge, match="6M"):
        client.submit(SubmitRequest(["x" * LARGEST_REQUEST], "/", {}))
    assert daemon.asked == []


def test_no_socket_and_a_dead_socket_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon, match="/none"):
        Client(tmp_path / "none").status()
    dead = tmp_path / "dead"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    with pytest.raises(NoDaemon, match="/dead"):
        Client(dead).status()


def test_a_daemon_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "mute"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(4)
        with pytest.raises(NoDaemon):
            Client(path, answer_within=0.2).status()
        with pytest.raises(NoDaemon):
            Client(path).within(0.2).status()


def test_a_full_queue_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "full"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(BlockingIOError):
            dial(path, 0.2)


def test_nobody_else_is_believed_to_be_the_daemon(daemon: StandIn) -> None:
    assert Client(daemon.path, trusted=frozenset({os.geteuid()})).status() == daemon.status
    with pytest.raises(NoDaemon):
        Client(daemon.path, trusted=frozenset({os.geteuid() + 1})).status()


def test_paths_may_be_longer_than_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    here = os.open(folder, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/s")
        os.close(here)
        listener.listen(4)
        assert answers(folder / "s")
    assert not answers(folder / "s")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without daemons; return where the user's own would listen."""
    monkeypatch.delenv("GPULEASE_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(config, "SYSTEM_SOCKET", tmp_path / "machine" / "gpuleased.sock")
    monkeypatch.setattr(locations, "SYSTEM_SOCKET", str(config.SYSTEM_SOCKET))
    (tmp_path / "gpulease").mkdir()
    return config.personal_socket()


def listening(path: Path) -> StandIn:
    stand_in = StandIn(path)
    stand_in.open()
    return stand_in


def test_without_a_path_the_one_that_the_environment_names_is_asked(
    daemon: StandIn, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULEASE_SOCKET", str(daemon.path))
    assert Client().path == daemon.path
    assert Client().status() == daemon.status


def test_without_a_path_the_systems_daemon_goes_before_the_users_own(nowhere: Path) -> None:
    own = listening(nowhere)
    assert Client().path == nowhere
    config.SYSTEM_SOCKET.parent.mkdir()
    system = listening(config.SYSTEM_SOCKET)
    assert Client().path == config.SYSTEM_SOCKET
    system.close()
    config.SYSTEM_SOCKET.parent.rmdir()
    assert Client().status() == own.status
    own.close()


def test_without_a_path_and_without_a_daemon_it_is_said_where_none_listens(nowhere: Path) -> None:
    with pytest.raises(NoDaemon) as raised:
        Client()
    assert str(config.SYSTEM_SOCKET) in raised.value.message
    assert str(nowhere) in raised.value.message
    assert raised.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_daemon_that_was_found_is_not_told_anything_if_it_is_a_strangers(nowhere: Path) -> None:
    listens = (
        "import os, socket, sys; os.setuid(4242); s = socket.socket(socket.AF_UNIX);"
        "s.bind(sys.argv[1]); s.listen(); print('up', flush=True); sys.stdin.read()"
    )
    os.chown(nowhere.parent, 4242, 4242)
    with subprocess.Popen(
        [sys.executable, "-c", listens, nowhere.name], cwd=nowhere.parent,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as stranger:  # fmt: skip
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"up\n"
        with pytest.raises(NoDaemon, match="4242"):
            Client().status()
        stranger.communicate()
