"""The scripts in examples/idioms/pytorch, unedited: what they hand to PyTorch, and a run.

With faked GPUs, torch_stand_in.py reads what PyTorch hands to C++, and keeps tensors on the CPU. On
simulated GPUs each script runs in a real job, as on a machine without a GPU.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from daemon_rig import Daemon, daemons
from frameworks.environments import TORCHES, python_of
from frameworks.test_torch_limits import LEASES, variables
from gpulease.worker.overhead import default_overhead

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
IDIOMS = HERE.parents[1] / "examples" / "idioms" / "pytorch"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
POOLS = [lease - default_overhead("torch", 2) for lease in LEASES]


class Idiom(NamedTuple):
    """What a script does."""

    devices: tuple[int, ...]
    """The GPUs on which it asks for memory, in the stand-in."""
    prints: str | None
    """On simulated GPUs; None if it does without a look what fails on a machine without a GPU."""
    error: str | None = None
    """Part of the message with which it ends in the stand-in, where tensors are on the CPU."""


SCRIPTS = {
    "all_gpus": Idiom((0, 1), "0 GPUs, sum: 131072"),
    "allocator_settings": Idiom((1,), "sum: 4096"),
    "data_parallel": Idiom((0,), "outputs: 32", "found one of them on device: cpu"),
    "device": Idiom((0,), "loss: ", "CUDA"),  # the threads of its backward pass begin in C++
    "loader": Idiom((0,), "sum: 2016"),
    "memory_fraction": Idiom((0,), "sum: 4096"),
    "second_gpu": Idiom((1,), None),
    "set_device": Idiom((1,), None),
}


@pytest.fixture(scope="module", params=TORCHES)
def python(request: pytest.FixtureRequest) -> str:
    return python_of(request.param)


def handed(python: str, folder: Path, *command: str) -> list[dict[str, Any]]:
    """Return what each process of a command hands to C++ in a lease of two GPUs."""
    done = subprocess.run(
        [python, "-W", "ignore", *command], env=variables() | {"GPULEASE_HANDED": str(folder)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = [json.loads(each.read_text()) for each in sorted(folder.iterdir())]
    assert found, done.stderr
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_limited_where_it_first_uses_a_gpu(
    python: str, name: str, tmp_path: Path
) -> None:
    expected = SCRIPTS[name]
    script = str(IDIOMS / f"{name}.py")
    (found,) = handed(python, tmp_path, str(HERE / "torch_stand_in.py"), script)

    assert set(found["devices"]) == set(expected.devices), found
    limits = dict(found["fractions"])
    assert set(limits) == ({1} if name == "allocator_settings" else {0, 1})
    for gpu, limit in found["fractions"]:
        assert 0 < limit <= POOLS[gpu], "never more, also not for a moment"
    if name == "memory_fraction":
        assert limits[0] == pytest.approx(POOLS[0], abs=1 << 20), "half of the GPU is more"
        assert limits[1] == pytest.approx(0.01 * (24000 << 20), abs=1 << 20)
    assert (found["error"] is None) == (expected.error is None), found
    assert (expected.error or "") in (found["error"] or "")


def test_each_rank_of_torchrun_uses_its_gpu_and_is_limited_there(
    python: str, tmp_path: Path
) -> None:
    script = str(IDIOMS / "distributed.py")
    ranks = handed(python, tmp_path, *TORCHRUN, str(HERE / "torch_stand_in.py"), script)

    assert sorted(sorted({*rank["devices"]}) for rank in ranks) == [[0], [1]]
    for rank in ranks:
        assert {*rank["devices"]} <= {gpu for gpu, _ in rank["fractions"]}
        assert all(0 < limit <= POOLS[gpu] for gpu, limit in rank["fractions"])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemons(tmp_path_factory.mktemp("d")) as make:
        yield make().start()


def job(daemon: Daemon, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = ("--mem", "2G", "--gpus", "2", "--")
    return daemon.run("run", *options, *command, check=False, env=environment, timeout=120)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_on_simulated_gpus(daemon: Daemon, name: str) -> None:
    done = job(daemon, python_of("torch"), str(IDIOMS / f"{name}.py"))

    if (expected := SCRIPTS[name].prints) is not None:
        assert (done.returncode, done.stdout.startswith(expected)) == (0, True), done
        return
    assert done.returncode == 1
    assert "NVIDIA" in done.stderr.splitlines()[-1], "PyTorch finds no driver, as outside of a job"


def test_torchrun_runs_on_simulated_gpus(daemon: Daemon) -> None:
    python = python_of("torch")
    # Gloo's threads sometimes abort a rank at its exit, in a job or not.
    for _ in range(3):
        done = job(daemon, python, *TORCHRUN, str(IDIOMS / "distributed.py"))
        if done.returncode == 0 or "terminate called" not in done.stderr:
            break

    assert done.returncode == 0, done.stderr
    # Both ranks may write to one line.
    weights = dict(re.findall(r"rank (\d) of 2: weights (-?\d+\.\d{4})", done.stdout))
    assert weights.keys() == {"0", "1"}
    assert weights["0"] == weights["1"]
