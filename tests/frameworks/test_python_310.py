"""`gpulease.lease` in an environment with Python 3.10, and what the programs say there."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon, daemons
from goldens import mentions

from .environments import python_of

pytestmark = pytest.mark.slow

_REPOSITORY = Path(__file__).parents[2]
_LEASE = """
import logging, operator
import gpulease

logging.basicConfig(level=logging.INFO)
if __name__ == "__main__":
    with gpulease.lease("1G", time_limit="1h") as lease:
        print(lease.memory, flush=True)
        print(gpulease.Client().status().jobs[0].state)
    try:
        gpulease.lease("100G")
    except gpulease.errors.GpuleaseError as error:
        print(error.text())
    with gpulease.Executor("1G") as pool:
        print(pool.submit(operator.add, 2, 3).result())
"""


@pytest.fixture(scope="module")
def python() -> str:
    return python_of("client")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with daemons(tmp_path) as make:
        started: Daemon = make().start()
        yield started
        started.end_jobs()


def test_a_lease_waits_says_why_and_is_taken(python: str, daemon: Daemon, tmp_path: Path) -> None:
    taken = daemon.submit("--gpus", "2", "--exclusive", "--time", "1h", "sleep", "600")
    daemon.wait_until(taken, "active")
    script = tmp_path / "train.py"
    script.write_text(_LEASE)
    with subprocess.Popen(
        [python, str(script)],
        env={**os.environ, "GPULEASE_SOCKET": str(daemon.socket), "PYTHONPATH": str(_REPOSITORY)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        # The first line may come before the start is predicted: then a second one has it.
        assert next((line for line in process.stderr if "; probably " in line), None)
        daemon.client.cancel(taken)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.splitlines()[:2] == [str(2**30), "active"]
    assert mentions(out, "cannot lease 100G", "hint: ")
    assert out.splitlines()[-1] == "5"


@pytest.mark.parametrize("program", ["cli", "daemon", "setup", "web"])
def test_a_program_says_which_python_it_needs(python: str, program: str) -> None:
    done = subprocess.run(
        [python, "-m", f"gpulease.{program}", "--version"], cwd=_REPOSITORY, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert mentions(done.stderr, "needs Python 3.11 or later", "Python 3.10", "hint: ")
    assert "Traceback" not in done.stderr
