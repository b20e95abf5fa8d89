"""What --deterministic does to real frameworks, on a machine that need not have a GPU."""

import json
import os
import subprocess
from textwrap import dedent
from typing import Any

import pytest

from frameworks.environments import TORCHES, python_of
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment

GIB = 2**30


def said(version: str, source: str, *, deterministic: bool = True, **variables: str) -> Any:
    """Return what a script prints last, as JSON."""
    environment = worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | variables,
        job="j1",
        marker="m",
        gpus=[LeasedGpu("GPU-0", 0, "H100", 4 * GIB, 80 * GIB)],
        simulated=False,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(deterministic=deterministic, strict=True),
    )
    child = subprocess.run(
        [python_of(version), "-c", dedent(source)],
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


TORCH = """
    import json, torch
    print(json.dumps([
        torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
        torch.cuda.is_initialized()]))
    """


@pytest.mark.parametrize("version", TORCHES)
def test_torch_uses_deterministic_algorithms_once_it_is_imported(version: str) -> None:
    assert said(version, TORCH) == [True, False, False]


def test_torch_is_left_alone_without_the_option() -> None:
    assert said("torch", TORCH, deterministic=False) == [False, False, False]


def test_the_flag_for_jax_is_added_to_those_of_the_user_and_accepted_by_xla() -> None:
    flags = said(
        "jax",
        """
        import ctypes, json
        import jax
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        assert float(jax.jit(lambda x: x + 1)(2.0)) == 3.0  # XLA aborts if it knows a flag not
        print(json.dumps(getenv(b"XLA_FLAGS").decode()))
        """,
        XLA_FLAGS="--xla_cpu_enable_fast_math=false",
        JAX_PLATFORMS="cpu",
    )

    assert flags == "--xla_cpu_enable_fast_math=false --xla_gpu_deterministic_ops=true"


def test_a_tensorflow_that_does_not_know_that_flag_does_not_see_it() -> None:
    found = said(
        "tensorflow-1.13",
        """
        import json, os
        import tensorflow as tf
        with tf.compat.v1.Session() as session:
            print(json.dumps([float(session.run(tf.constant(2.0) + 1)),
                              os.environ["TF_DETERMINISTIC_OPS"], os.environ.get("XLA_FLAGS")]))
        """,
    )

    assert found == [3.0, "1", None]
