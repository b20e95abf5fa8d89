"""CUDA_VISIBLE_DEVICES as people set it, in the unedited scripts of examples/idioms/visible.

What counts is the variable that C finds when the script is at its end: CUDA reads it with getenv.
Jobs have two leased GPUs, 4 and 6 of the machine, or the first of them.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon
from frameworks.environments import TORCHES, python_of
from goldens import mentions
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment

HERE = "here"
"""The TensorFlow beside the tests."""
IDIOMS = Path(__file__).parents[2] / "examples" / "idioms" / "visible"
GIB = 2**30
FIRST, SECOND = "GPU-4", "GPU-6"
BOTH = f"{FIRST},{SECOND}"
AT_THE_END = """
import ctypes, runpy, sys
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print("C:", getenv(b"CUDA_VISIBLE_DEVICES").decode())
"""


def lease(gpus: int, **options: bool) -> dict[str, str]:
    return worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        job="j1",
        marker="m",
        gpus=[LeasedGpu(f"GPU-{n}", n, "H100", 4 * GIB, 80 * GIB) for n in (4, 6)[:gpus]],
        simulated=False,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(**options),
    )


def ran(python: str, script: str, *arguments: str, gpus: int = 2) -> tuple[list[str], list[str]]:
    """Return the lines of a script on stdout, then C's, and what gpulease wrote on stderr."""
    child = subprocess.run(
        [python, "-c", AT_THE_END, str(IDIOMS / script), *arguments],
        env=lease(gpus) | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    lines = child.stderr.splitlines()
    return child.stdout.splitlines(), [line for line in lines if line.startswith("gpulease:")]


@pytest.mark.parametrize("version", ["tensorflow-1.13", HERE])
@pytest.mark.parametrize(("gpus", "found"), [(1, FIRST), (2, "-1")])
def test_a_number_in_a_script_for_tensorflow(version: str, gpus: int, found: str) -> None:
    python = sys.executable if version == HERE else python_of(version)

    output, notices = ran(python, "tensorflow_in_script.py", gpus=gpus)

    assert output[-1] == f"C: {found}"
    assert len(notices) == 1


@pytest.mark.parametrize("version", TORCHES)
@pytest.mark.parametrize(("gpus", "found"), [(1, "-1"), (2, BOTH)])
def test_two_numbers_in_a_script_for_torch(version: str, gpus: int, found: str) -> None:
    output, notices = ran(python_of(version), "torch_in_script.py", gpus=gpus)

    assert output == ["sum: 100.0", f"C: {found}"]
    assert len(notices) == 1


@pytest.mark.parametrize("version", TORCHES)
def test_torch_reads_the_gpus_that_a_number_is_mapped_to(version: str) -> None:
    source = (
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '6'\n"
        "import torch; print(torch.cuda._parse_visible_devices())"
    )
    child = subprocess.run(
        [python_of(version), "-c", source],
        env=lease(2), capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip

    assert child.stdout.strip() == f"['{SECOND}']"


@pytest.mark.parametrize(
    ("given", "found", "notices"),
    [("0", FIRST, 0), ("1", SECOND, 0), ("6", SECOND, 1), ("2,3", BOTH, 1), ("-1", "-1", 0)],
)
def test_a_number_as_an_option(given: str, found: str, notices: int) -> None:
    output, told = ran(sys.executable, "by_option.py", "--gpu", given)

    assert output == [f"visible: {found}", f"C: {found}"]
    assert len(told) == notices


def test_a_child_for_each_gpu_has_one_each() -> None:
    output, told = ran(sys.executable, "child_for_each_gpu.py")

    assert output[:2] == [f"child: {FIRST}", f"child: {SECOND}"]
    assert told == []


def test_a_lease_of_one_gpu_serves_all_the_children() -> None:
    output, told = ran(sys.executable, "child_for_each_gpu.py", gpus=1)

    assert output[:2] == [f"child: {FIRST}"] * 2
    assert len(told) == 1


# In real jobs, on simulated GPUs.


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("d"), simulate="2x8G").start()
    yield made
    made.end_all()


@pytest.fixture
def commands(tmp_path: Path, daemon: Daemon) -> dict[str, str]:
    """Return an environment in which python3 and gpulease are those of the tests."""
    for name, arguments in (("python3", []), ("gpulease", ["-m", "gpulease.cli"])):
        line = shlex.join([sys.executable, *arguments])
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "GPULEASE_SOCKET": str(daemon.socket)}


def uuids(daemon: Daemon) -> list[str]:
    return [gpu.uuid for gpu in daemon.client.status().gpus]


def test_gpus_before_commands_of_a_shell_script(daemon: Daemon, commands: dict[str, str]) -> None:
    script = str(IDIOMS / "before_command.sh")
    options = ("--mem", "1G", "--gpus", "2", "--strict")

    child = daemon.run("run", *options, "sh", script, env=commands)

    first, second = uuids(daemon)
    found = [line.removeprefix("visible: ") for line in child.stdout.splitlines()]
    assert found == [f"{first},{second}", second, first]


def test_a_program_that_is_not_python_gets_its_gpu_of_the_job(
    daemon: Daemon, commands: dict[str, str]
) -> None:
    script = str(IDIOMS / "not_python.sh")

    child = daemon.run("run", "--mem", "1G", "--gpus", "2", "bash", script, env=commands)

    assert child.stdout.splitlines() == [f"program: {uuids(daemon)[1]}"] * 2
    assert mentions(child.stderr, "lease of job")
