"""The examples, unmodified, in a lease on simulated GPUs: real TensorFlow, real training."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30


def lease(gpus: int) -> dict[str, str]:
    return worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        job="j1",
        marker="m",
        gpus=[LeasedGpu(f"GPU-{n}", n, "Simulated", 4 * GIB, 24 * GIB) for n in range(gpus)],
        simulated=True,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(strict=True),
    )


def printed(gpus: int, *command: str) -> str:
    child = subprocess.run(
        [sys.executable, *command],
        env=lease(gpus) | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout


@pytest.mark.parametrize(
    ("script", "gpus", "epochs"),
    [("digits.py", 1, 8), ("legacy_session.py", 1, 60), ("two_gpus.py", 2, 8)],
)
def test_an_example_learns_its_digits_in_a_lease(script: str, gpus: int, epochs: int) -> None:
    output = printed(gpus, str(EXAMPLES / script), "--epochs", str(epochs))

    accuracy = re.search(r"^test accuracy: (\S+)$", output, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.93
    if script == "two_gpus.py":
        assert "replicas: 2\n" in output


def test_source_and_loader_of_tensorflow_are_as_in_a_plain_interpreter() -> None:
    source = (
        "import inspect, tensorflow as tf\n"
        "from tensorflow.python.client.session import BaseSession\n"
        "print(type(tf.__spec__.loader).__name__, type(tf.__loader__).__name__)\n"
        "print('__version__' in inspect.getsource(tf))\n"
        "print('target' in inspect.getsource(BaseSession.__init__))\n"
    )

    assert printed(1, "-c", source).split() == ["SourceFileLoader"] * 2 + ["True"] * 2


def test_a_spawned_child_that_imports_tensorflow_is_in_the_lease_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "def devices(_):\n"
        "    import tensorflow as tf\n"
        "    return len(tf.config.list_logical_devices('CPU'))\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print('devices:', *pool.map(devices, [0]))\n"
    )

    assert printed(3, str(tmp_path / "script.py")) == "devices: 3\n"
