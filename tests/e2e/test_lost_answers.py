"""A submission whose answer was lost is repeated under its key, and makes no second job."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon
from gpulease.client import Client
from gpulease.errors import BadValue, NoDaemon
from gpulease.wire.requests import ClaimRequest, HoldRequest, SubmitRequest

REQUEST = SubmitRequest(["sleep", "600"], "/", dict(os.environ), claim=ClaimRequest(1 << 30))


class Lossy:
    """A socket before the daemon's that hands requests on and loses the first answers."""

    def __init__(self, path: Path, daemon: Path, losses: int) -> None:
        self.path, self._daemon, self.losses = path, daemon, losses
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.path.unlink()

    def _serve(self) -> None:
        while True:
            try:
                caller = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(caller,), daemon=True).start()

    def _pass_on(self, caller: socket.socket) -> None:
        with caller, socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect(str(self._daemon))
            asking = threading.Thread(target=self._ask, args=(caller, daemon), daemon=True)
            asking.start()
            while piece := daemon.recv(1 << 16):
                if self.losses > 0:
                    self.losses -= 1
                    caller.shutdown(socket.SHUT_RDWR)
                    return
                caller.sendall(piece)

    def _ask(self, caller: socket.socket, daemon: socket.socket) -> None:
        try:
            while piece := caller.recv(1 << 16):
                daemon.sendall(piece)
        except OSError:
            return


@pytest.fixture
def lossy(daemon: Daemon, tmp_path: Path) -> Iterator[Lossy]:
    made = Lossy(tmp_path / "lossy", daemon.socket, losses=2)
    yield made
    made.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made.start()
    made.end_all()


def numbers(daemon: Daemon) -> list[int]:
    return [job.id for job in Client(daemon.socket).jobs(everything=True).jobs]


def test_a_job_whose_answer_was_lost_is_submitted_once(daemon: Daemon, lossy: Lossy) -> None:
    job = Client(lossy.path).submit(REQUEST)

    assert lossy.losses == 0
    assert numbers(daemon) == [job.id]


def test_a_lease_whose_answer_was_lost_is_asked_for_once(daemon: Daemon, lossy: Lossy) -> None:
    held = Client(lossy.path).hold(HoldRequest({}, os.getpid(), ClaimRequest(1 << 30)))

    assert lossy.losses == 0
    assert numbers(daemon) == [held.id]


def test_the_command_does_so_too(daemon: Daemon, lossy: Lossy) -> None:
    command = [sys.executable, "-m", "gpulease.cli", "--socket", str(lossy.path)]
    done = subprocess.run(
        [*command, "run", "-d", "--mem", "1G", "true"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip

    assert lossy.losses == 0
    assert numbers(daemon) == [int(done.stdout)]


def test_a_daemon_that_stays_away_leaves_a_doubt_that_is_told(daemon: Daemon, lossy: Lossy) -> None:
    lossy.losses = 10_000

    with pytest.raises(NoDaemon):
        Client(lossy.path).submit(REQUEST)


def test_a_key_is_good_for_one_job_of_one_user_also_after_a_restart(daemon: Daemon) -> None:
    REQUEST.key = "k"
    try:
        first = Client(daemon.socket).submit(REQUEST)
        Client(daemon.socket).cancel(first.id)
        daemon.wait_until(first.id, "ended")
        daemon.kill()
        daemon.start()
        again = Client(daemon.socket).submit(REQUEST)
    finally:
        REQUEST.key = None

    assert (again.id, again.state) == (first.id, "ended")
    assert numbers(daemon) == [first.id]


def test_a_key_of_a_job_is_none_for_a_lease_without_one(daemon: Daemon) -> None:
    client = Client(daemon.socket)
    client.submit(SubmitRequest(["true"], "/", {}, key="k"))

    with pytest.raises(BadValue):
        client.hold(HoldRequest({}, os.getpid(), ClaimRequest(1 << 30), key="k"))


@pytest.mark.parametrize("key", ["", "x" * 65, "a\nb", "\u00e9"])
def test_what_is_no_key_is_refused(daemon: Daemon, key: str) -> None:
    with pytest.raises(BadValue, match="key"):
        Client(daemon.socket).submit(SubmitRequest(["true"], "/", {}, key=key))
