"""What the hooks tell the daemon of their pools, and that a script notices nothing of it.

The daemon is a socket that keeps what it hears. PyTorch is a stand-in here, a package of a few
lines with the names that its hook uses; TensorFlow is the real one, on simulated GPUs.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead
from process_rig import wait_until

LEASE = 4096 * MIB
IMPORTS_WITHIN_S = 300
"""Of TensorFlow, on a busy machine."""
LIMIT = LEASE - default_overhead("torch", 1)

TORCH = """
__version__ = "2.99.0"
from torch import cuda
"""
CUDA = """
from types import SimpleNamespace
queued, started = [], []
def is_initialized(): return bool(started)
def device_count(): return 1
def current_device(): return 0
def get_device_properties(device): return SimpleNamespace(total_memory=80 << 30)
def set_per_process_memory_fraction(share, device=None): pass
def memory_reserved(device): return 300 << 20
def max_memory_reserved(device): return 500 << 20
def _lazy_call(call): queued.append(call)
def init():
    started.append(1)
    for call in queued: call()
"""


class Hearer:
    """Listens where the daemon would, and answers everyone with one status."""

    def __init__(self, path: Path, status: int = 204) -> None:
        self.heard: list[tuple[str, Any]] = []
        self._answer = f"HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n".encode()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with caller, suppress(OSError):  # it waits for an answer only so long
                head, _, body = caller.recv(1 << 16).partition(b"\r\n\r\n")
                self.heard.append((head.decode().splitlines()[0], json.loads(body)))
                caller.sendall(self._answer)

    def wait(self, count: int) -> None:
        """Wait for so many reports that differ: one that is not answered in time is repeated."""
        wait_until(lambda: len(self.told()) >= count, "reports")

    def told(self) -> list[Any]:
        """Return what was reported, in the order of its first report."""
        texts = dict.fromkeys(json.dumps(told) for _, told in list(self.heard))
        return [json.loads(text) for text in texts]

    def all_told(self) -> list[Any]:
        """Return what was reported, with all that waits to be heard."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(self._listener.getsockname())
            asking.sendall(b"the last\r\n\r\nnull")
            wait_until(lambda: ("the last", None) in list(self.heard), "the last report")
        return [told for told in self.told() if told is not None]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def hearer(tmp_path: Path) -> Iterator[Hearer]:
    found = Hearer(tmp_path / "s")
    yield found
    found.close()


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "cuda.py").write_text(CUDA)
    return lease(tmp_path, simulated=False) | {
        "PYTHONPATH": f"{HOOKS}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"
    }  # fmt: skip


def lease(folder: Path, *, simulated: bool) -> dict[str, str]:
    return worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        job="17",
        marker="m",
        gpus=[LeasedGpu("GPU-0", 0, "H100", LEASE, 80 << 30)],
        simulated=simulated,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(),
        daemon=str(folder / "s"),
    )


def begun(source: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", dedent(source)], env=variables, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_process_that_uses_the_gpu_reports_its_pool(
    variables: dict[str, str], hearer: Hearer
) -> None:
    script = begun("import torch; torch.cuda.init(); input()", variables)
    hearer.wait(2)
    out, err = script.communicate("\n", timeout=60)

    assert (script.returncode, out, err) == (0, "", "")
    assert hearer.heard[0][0] == "POST /v1/jobs/17/usage HTTP/1.1"
    torch = {"framework": "torch", "version": "2.99.0"}
    pool = {"gpu": "GPU-0", "pool": 300 * MIB, "peak": 500 * MIB, "limit": LIMIT}
    assert hearer.told() == [
        torch | {"gpus": [{"gpu": "GPU-0", "limit": LIMIT}], "state": "limited"},
        torch | {"gpus": [pool]},
    ]


def test_one_that_only_imports_a_framework_has_no_thread_of_ours(
    variables: dict[str, str], hearer: Hearer
) -> None:
    source = "import torch, threading; print(threading.active_count())"

    out, err = begun(source, variables).communicate(timeout=60)

    assert (out, err) == ("1\n", "")
    assert hearer.heard == []


def test_a_forked_child_that_uses_the_gpu_reports_by_itself(
    variables: dict[str, str], hearer: Hearer
) -> None:
    script = begun(
        """
        import os, torch
        children = []
        for _ in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                torch.cuda.init()
                os.read(0, 1)
                os._exit(0)
        for child in children:
            os.waitpid(child, 0)
        """,
        variables,
    )
    wait_until(lambda: len(hearer.heard) >= 4, "two reports of each")
    out, err = script.communicate("\n\n", timeout=60)

    assert (script.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("trouble", ["nobody listens", "nobody answers", "it is refused"])
def test_a_daemon_that_does_not_listen_changes_nothing(
    trouble: str, variables: dict[str, str], tmp_path: Path
) -> None:
    if trouble == "nobody answers":
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(str(tmp_path / "s"))
        silent.listen()
    elif trouble == "it is refused":
        silent = Hearer(tmp_path / "s", 403)  # type: ignore[assignment]
    source = "import torch, time; torch.cuda.init(); time.sleep(0.6); print('done')"

    out, err = begun(source, variables).communicate(timeout=60)

    assert (out, err) == ("done\n", "")
    if trouble != "nobody listens":
        silent.close()


def test_ctrl_c_reaches_the_script_and_not_the_reporter(
    variables: dict[str, str], hearer: Hearer
) -> None:
    script = begun(
        """
        import torch, time
        torch.cuda.init()
        try:
            print("ready", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("interrupted")
        """,
        variables,
    )
    hearer.wait(1)
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    script.send_signal(signal.SIGINT)
    out, err = script.communicate(timeout=60)

    assert (script.returncode, out, err) == (0, "interrupted\n", "")


def test_reports_can_be_turned_off(variables: dict[str, str], hearer: Hearer) -> None:
    source = "import torch, threading; torch.cuda.init(); print(threading.active_count())"

    out, _ = begun(source, variables | {"GPULEASE_REPORT": "0"}).communicate(timeout=60)

    assert out == "1\n"


@pytest.mark.tensorflow
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_real_tensorflow_reports_what_its_pool_held(tmp_path: Path, hearer: Hearer) -> None:
    script = begun(
        """
        import tensorflow as tf
        held = tf.random.normal([2048, 2048])
        input()
        """,
        # Without oneDNN, which depends on the processor, TensorFlow does not count memory on CPUs.
        lease(tmp_path, simulated=True)
        | {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1"},
    )
    hearer.wait(2)
    script.communicate("\n", timeout=IMPORTS_WITHIN_S)

    assert script.returncode == 0
    told = hearer.all_told()[-1]
    assert told["framework"] == "tensorflow"
    assert [pool["gpu"] for pool in told["gpus"]] == ["GPU-0"]
    assert told["gpus"][0]["pool"] >= 2048 * 2048 * 4
    assert told["gpus"][0]["peak"] >= told["gpus"][0]["pool"]


@pytest.mark.tensorflow
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
@pytest.mark.parametrize(("at_once", "steps"), [(1, 12), (4, 12)])
def test_the_steps_of_keras_are_counted_and_its_training_is_the_same(
    at_once: int, steps: int, tmp_path: Path, hearer: Hearer
) -> None:
    source = f"""
        import keras, sys
        import numpy as np
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution={at_once})
        x, y = np.arange(48.0).reshape(24, 2) / 48, np.ones((24, 1))
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        model.evaluate(x, y, verbose=0)
        print(history.history["loss"])
        """
    plain = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}

    hooked, err = begun(source, lease(tmp_path, simulated=True) | quiet).communicate(
        timeout=IMPORTS_WITHIN_S
    )
    unhooked, _ = begun(source, plain | quiet).communicate(timeout=IMPORTS_WITHIN_S)

    assert hooked == unhooked
    assert "gpulease" not in err
    (told,) = [told for told in hearer.all_told() if told["framework"] == "keras"][-1:]
    assert told["steps"] == steps
    assert 0 < told["seconds"] < 60


def test_a_keras_that_is_not_known_is_left_alone(tmp_path: Path, hearer: Hearer) -> None:
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text("callbacks = None\n")
    path = {"PYTHONPATH": f"{HOOKS}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"}
    strict = path | {"GPULEASE_STRICT": "1"}

    script = begun("import keras; print('on')", lease(tmp_path, simulated=False) | strict)

    assert script.communicate(timeout=IMPORTS_WITHIN_S) == ("on\n", "")
    assert (script.returncode, hearer.heard) == (0, [])
