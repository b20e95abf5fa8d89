"""Real daemons, made by each test as it needs them."""

import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon, daemons
from gpulease.host.cgroups import in_initial_pid_namespace
from nvml_stand_in import Card, StandIn
from process_rig import ephemeral_user


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Yield a maker of daemons, each in a folder of its own; all are ended with the test."""
    with daemons(tmp_path) as make:
        yield make


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Return a running daemon with two simulated GPUs of 8 GiB and a short grace."""
    started: Daemon = make_daemon(settings={"grace": "2s"})
    return started.start()


@pytest.fixture
def short_grace(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Return a running daemon whose jobs have a second to end."""
    made: Daemon = make_daemon(settings={"grace": "1s"})
    return made.start()


OnCards = Callable[..., tuple[Daemon, StandIn]]


@pytest.fixture
def on_cards(make_daemon: Callable[..., Daemon], tmp_path: Path) -> OnCards:
    """Return what starts a daemon on the GPUs of a stand-in for the driver."""

    def start(*cards: Card, **settings: str) -> tuple[Daemon, StandIn]:
        stand_in = StandIn(tmp_path, gpus=cards)
        made: Daemon = make_daemon(
            simulate=None, environment=stand_in.environment(), settings={"grace": "1s"} | settings
        )
        return made.start(), stand_in

    return start


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Yield a daemon as `daemon`, for all tests that do not count its jobs."""
    with daemons(tmp_path_factory.mktemp("e2e")) as make:
        yield make(settings={"grace": "2s"}).start()


@pytest.fixture
def shared(standing: Daemon) -> Iterator[Daemon]:
    """Yield the daemon that stands, and cancel what a test left in it."""
    yield standing
    standing.close_all()
    standing.end_jobs()


@pytest.fixture
def machines_pids() -> None:
    """Skip in a pid namespace of its own, where pids that a driver lists are not taken for ours."""
    if not in_initial_pid_namespace():
        pytest.skip("needs the machine's own pid namespace, and this is another")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def on_small_disk(small_disk: Path, make_daemon: Callable[..., Daemon]) -> Daemon:
    """Return a daemon with its state there; the caller starts it."""
    daemon: Daemon = make_daemon(settings={"grace": "1s"})
    (small_disk / "state").mkdir()
    daemon.state.symlink_to(small_disk / "state")
    return daemon


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that no lease is for."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def user() -> Iterator[pwd.struct_passwd]:
    """Yield a new user of this machine."""
    with ephemeral_user() as made:
        yield made
