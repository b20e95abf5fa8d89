"""The tests that are for real GPUs can pass: those that need no framework, on the stand-ins.

They are run where there is no GPU to run them on, so that whoever has one finds them in order.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from nvml_stand_in import Card, StandIn

_TESTS = Path(__file__).parents[1] / "gpu" / "test_holding_real.py"


@pytest.mark.usefixtures("machines_pids")
def test_what_holds_on_a_gpu_is_tried_through_cuda_itself(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [Card(total=16 << 30, minor=0)]).with_cuda()
    # Where root proves, its jobs get little of its environment.
    (tmp_path / "nvml" / "device").symlink_to(stand_in.held(0))
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]

    # A path of its own: below `tmp_path`, those of the daemons' sockets would be too long.
    with TemporaryDirectory(prefix="gpu-") as folder:
        done = subprocess.run(
            [*command, "--basetemp", f"{folder}/t", str(_TESTS)],
            env=mine | stand_in.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout
