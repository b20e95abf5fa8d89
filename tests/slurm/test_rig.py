"""A cluster of the tests leaves nothing behind, even if the test that made it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from daemon_rig import wait_for

_KILLED = """
import os, signal
from slurm.cluster import running
from slurm.slurm_files import NodeSpec
with running([NodeSpec("n1")]) as made:
    print(made.directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_cluster_ends_with_a_killed_test() -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED], cwd="/", env={**os.environ, "PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    wait_for("the directory is gone", lambda: not Path(done.stdout.strip()).exists())
