"""Daemons and web servers for the tests of the page."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from daemon_rig import Daemon, open_folder, wait_for
from gpulease.wire.requests import CancelJobsRequest, ClaimRequest, SubmitRequest
from web.rig import Web, web

G = 1 << 30
ROWS = 2000
GPUS = 16


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Yield a running daemon with two simulated GPUs."""
    with open_folder() as folder:
        made = Daemon(folder, settings={"grace": "2s"})
        yield made.start()
        made.end_all()


@pytest.fixture
def served(daemon: Daemon) -> Iterator[Web]:
    """Yield a web server for that daemon."""
    with web(daemon.socket) as started:
        yield started


@pytest.fixture(scope="package")
def busy() -> Iterator[Daemon]:
    """Yield a daemon with 16 GPUs, a job on each but one, a drained GPU, and 2,000 waiting jobs."""
    with open_folder() as folder:
        made = Daemon(folder, simulate=f"{GPUS}x24G:A100", settings={"grace": "2s"})
        made.start()
        made.run("drain", "15", "--why", "new fan")
        for index in range(GPUS - 1):
            made.submit("--mem", "16G", "--time", "2h", "--name", f"net {index}", "sleep", "600")
        wait_for("all run", lambda: len(made.client.status(queue=0).jobs) == GPUS - 1)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: _waiting(made, number), range(ROWS)))
        yield made
        made.client.cancel_all(CancelJobsRequest(grace=0.0))
        made.end_all()


def _waiting(daemon: Daemon, number: int) -> None:
    claim = ClaimRequest(memory=20 * G, time_limit=3600.0)
    request = SubmitRequest(["sleep", "600"], "/", {}, name=f"sweep {number}", claim=claim)
    daemon.client.submit(request)


@pytest.fixture(scope="package")
def busy_web(busy: Daemon) -> Iterator[Web]:
    """Yield a web server for that daemon."""
    with web(busy.socket) as started:
        yield started
