"""What an idle daemon reads and keeps: budgets that do not depend on the machine."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from daemon_rig import wait_for
from fakes import NOON, G, order
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim, State
from gpulease.gpu.simulated import SimulatedGpus, parse_simulation
from gpulease.host.hook_coverage import HookCoverage
from gpulease.host.host_memory import HostProbe
from gpulease.host.process_finder import Finder
from gpulease.host.processes import ProcessTable
from gpulease.service.observation import Observation
from gpulease.worker.environment import HOOKS
from process_rig import run

WORKERS = 40


def test_processes_that_name_no_gpu_are_not_read_at_each_reading() -> None:
    gpus = SimulatedGpus(parse_simulation("8G"), "nobody uses it")

    def bytes_of_a_reading() -> int:
        before = _bytes_read()
        gpus.read()
        return _bytes_read() - before

    first = bytes_of_a_reading()
    # At first they are read each time: a process may be about to execute its program.
    wait_for("few are read", lambda: bytes_of_a_reading() < first / 3)


@pytest.fixture
def family() -> Iterator[tuple[Job, list[int]]]:
    """Yield a job, whose shim is a shell, and its processes."""
    script = f"for i in $(seq {WORKERS}); do sleep 600 & echo $!; done; wait"
    pipe = {"stdout": subprocess.PIPE, "process_group": 0}
    shell = subprocess.Popen(["sh", "-c", script], text=True, **pipe)  # type: ignore[call-overload]
    workers = [int(shell.stdout.readline()) for _ in range(WORKERS)]
    queued = order().queued(JobId(1), NOON)
    claim = Claim(G, ram=G)
    yield replace(queued, shim_pid=shell.pid, claim=claim, state=State.ACTIVE), workers
    os.killpg(shell.pid, signal.SIGKILL)
    shell.communicate()


def test_a_process_on_a_gpu_is_read_once_for_each_observation(
    family: tuple[Job, list[int]],
) -> None:
    finder, (job, workers) = Finder(ProcessTable(), "here"), family

    async def note(*_: object) -> None:
        pass

    coverage = HookCoverage(
        lambda: [job], lambda: ("framework",), HOOKS, note, lambda _: True, note
    )

    def reads_of_an_observation() -> int:
        before = _reads()
        listed = finder.listed(workers, [job])
        assert listed is not None and listed.jobs.keys() == set(workers)
        run(coverage.look(Observation((), listed.jobs, NOON, programs=listed.programs)))
        return _reads() - before

    # At first each is checked for the hook.
    wait_for("each is read once", lambda: WORKERS <= reads_of_an_observation() < 1.2 * WORKERS)
    assert len(coverage.of(job.id)) == WORKERS


def test_of_a_process_of_a_job_with_ram_its_place_and_its_memory_are_read(
    family: tuple[Job, list[int]],
) -> None:
    probe, others = HostProbe(lambda job: job.shim_pid, lambda _: False), _processes()
    before = _reads()
    assert probe.read([family[0]]).used[JobId(1)]
    # The memory to its end, which is another read.
    assert _reads() - before < others + 2.4 * WORKERS


def _processes() -> int:
    return sum(each.name.isdigit() for each in Path("/proc").iterdir())


def _reads() -> int:
    return int(Path("/proc/self/io").read_text().split()[5])


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_daemon_keeps_no_package_for_its_start_or_for_another_program() -> None:
    program = "import sys, gpulease.daemon.main; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(ran.stdout.split()) & {"alembic", "mako", "pydantic", "rich", "typer"}
