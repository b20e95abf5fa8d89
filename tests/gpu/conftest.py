"""A real gpuleased on real GPUs, for tests that are skipped where there are none."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from e2e.conftest import Daemon
from gpulease.errors import NoGpus
from gpulease.gpu.nvml import NvmlProbe


@pytest.fixture(scope="session")
def real_gpus() -> int:
    """Return how many GPUs there are; skip where there is none."""
    try:
        probe = NvmlProbe.open(start_within=timedelta(minutes=2))
    except NoGpus as error:
        pytest.skip(error.message)
    try:
        return len(probe.read())
    finally:
        probe.close()


@pytest.fixture
def gpu_daemon(real_gpus: int, tmp_path: Path) -> Iterator[Daemon]:
    """Run a daemon on the GPUs that are there, and end its jobs with the test."""
    daemon = Daemon(tmp_path, simulate=None)
    daemon.start()
    yield daemon
    for job in daemon.status()["jobs"]:
        daemon.run("cancel", "--grace", "1s", str(job["id"]), check=False)
    daemon.kill(15)
