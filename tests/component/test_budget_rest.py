"""What an idle daemon reads and keeps: budgets that do not depend on the machine."""

import subprocess
import sys
from pathlib import Path

from daemon_rig import wait_for
from gpulease.gpu.simulated import SimulatedGpus, parse_simulation


def test_processes_that_name_no_gpu_are_not_read_at_each_reading() -> None:
    gpus = SimulatedGpus(parse_simulation("8G"), "nobody uses it")

    def bytes_of_a_reading() -> int:
        before = _bytes_read()
        gpus.read()
        return _bytes_read() - before

    first = bytes_of_a_reading()
    # At first they are read each time: a process may be about to execute its program.
    wait_for("few are read", lambda: bytes_of_a_reading() < first / 3)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_daemon_keeps_no_package_for_its_start_or_for_another_program() -> None:
    program = "import sys, gpulease.daemon.main; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(ran.stdout.split()) & {"alembic", "mako", "pydantic", "rich", "typer"}
