"""A real gpuleased on real GPUs, for tests that are skipped where there are none."""

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from gpulease.errors import NoGpus
from gpulease.gpu.nvml import NvmlProbe

from .allocator import GPU_PATIENCE_S, Allocator, CannotAllocate

M = 1 << 20


@pytest.fixture(scope="session")
def nvml() -> Iterator[NvmlProbe]:
    """Return the GPUs of this machine as NVML shows them; skip where there is none."""
    try:
        probe = NvmlProbe.open(start_timeout=timedelta(minutes=2))
    except NoGpus as error:
        pytest.skip(error.message)
    yield probe
    probe.close()


@pytest.fixture(scope="session")
def real_gpus(nvml: NvmlProbe) -> int:
    """Return how many GPUs there are."""
    return sum(reading.parent is None for reading in nvml.read())


@pytest.fixture(scope="session")
def own_pids(nvml: NvmlProbe, pytestconfig: pytest.Config) -> None:
    """Skip where the driver does not list processes under the pids that they have here.

    In a container with pids of its own it may list the host's, or none. What a CUDA context takes
    on this GPU when nothing else is allocated is told on the way.
    """
    try:
        with Allocator(32 * M) as holder:

            def listed() -> int | None:
                for reading in nvml.read():
                    for process in reading.processes or ():
                        if process.pid == holder.pid:
                            return process.memory or 0
                return None

            held = wait_for("the driver lists a process on a GPU", listed, within_s=20.0)
    except CannotAllocate as error:
        pytest.skip(str(error))
    except AssertionError:
        pytest.skip("the driver lists no process under its pid here: a container's own pids?")
    reporter: Any = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    text = f"a context alone takes {(held - 32 * M) // M} MiB ({nvml.read()[0].name})"
    (reporter.write_line if reporter else sys.stdout.write)(text)


@pytest.fixture
def make_gpu_daemon(real_gpus: int, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Return what runs a daemon on the GPUs that are there; its jobs end with the test."""
    assert real_gpus
    made: list[Daemon] = []

    def make(**settings: str) -> Daemon:
        daemon = Daemon(tmp_path, simulate=None, settings=settings)
        made.append(daemon)
        return daemon.start()

    yield make
    for daemon in made:
        for job in daemon.status()["jobs"]:
            daemon.run("cancel", "--grace", "1s", str(job["id"]), check=False)
            daemon.wait_until(job["id"], "ended")
        daemon.kill(15)
        daemon.close_all()


@pytest.fixture
def gpu_daemon(make_gpu_daemon: Callable[..., Daemon]) -> Daemon:
    """Return a daemon with settings as they are."""
    return make_gpu_daemon()


@pytest.fixture
def patiently() -> Callable[[str, Callable[[], Any]], Any]:
    """Return `wait_for` with the patience that a first import on a cold machine needs."""
    return lambda what, condition: wait_for(what, condition, within_s=GPU_PATIENCE_S)
