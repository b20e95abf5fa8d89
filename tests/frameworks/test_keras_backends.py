"""Keras 3 on PyTorch and JAX, and what the backend is handed in a lease, without a GPU.

Keras on TensorFlow is among the scenarios of test_tensorflow_limits.py.
"""

import json
import subprocess

import pytest

from frameworks.environments import python_of
from frameworks.test_jax_limits import LEASE as JAX_LEASE
from frameworks.test_jax_limits import MOST, REGISTERED, environment
from frameworks.test_torch_limits import TWO_GPUS, Torch, most


def test_keras_on_pytorch_is_limited_before_it_allocates() -> None:
    """Keras asks for memory on a GPU. There is none, and PyTorch's own initialisation has run."""
    source = f"""{TWO_GPUS}
import os
os.environ["KERAS_BACKEND"] = "torch"
torch.cuda.is_available = lambda: True
import keras
try:
    keras.ops.ones((2, 2))
except RuntimeError:
    print(json.dumps([keras.backend.backend(), handed]))
"""
    backend, handed = Torch("torch").said(source)

    assert backend == "torch"
    assert [device for _, device in handed] == [0, 1]
    for share, device in handed:
        assert share == pytest.approx(most(device), abs=1e-6)


def test_keras_on_jax_takes_its_options_from_the_function_that_is_hooked() -> None:
    source = REGISTERED.partition("from jax_plugins")[0] + "import keras; keras.ops.ones((2, 2))"
    variables = environment(JAX_LEASE) | {
        "KERAS_BACKEND": "jax",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    child = subprocess.run(
        [python_of("jax"), "-c", source], env=variables,
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip

    share, allocator = json.loads(child.stdout.splitlines()[0])
    assert share == pytest.approx(MOST, abs=1e-5), child.stderr
    assert allocator == "default"
