"""What a real JAX makes of its lease: the options of its GPU client, without a GPU.

The Python that has JAX is this one, or the one that GPULEASE_TEST_JAX names.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, outside_the_pool

PYTHON = os.environ.get("GPULEASE_TEST_JAX") or (sys.executable if find_spec("jax") else None)
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="needs JAX, here or in the Python that GPULEASE_TEST_JAX names"
)

LEASE, TOTAL = 8192 * MIB, 81920 * MIB
MOST = (LEASE - outside_the_pool("jax", 1)) / TOTAL
OPTIONS = """
import jax, json, os
from jaxlib import xla_client
{}
found = xla_client.generate_pjrt_gpu_plugin_options()
print(json.dumps([found.get("memory_fraction"), found["allocator"]]))
"""


def options_after(change: str, lease: int = LEASE) -> Any:
    assert PYTHON is not None
    environment = worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        job="j1",
        marker="m",
        gpus=[LeasedGpu("GPU-0", 0, "H100", lease, TOTAL)],
        simulated=False,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(),
    )
    child = subprocess.run(
        [PYTHON, "-c", OPTIONS.format(change)],
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    return json.loads(child.stdout) if child.returncode == 0 else child.stderr


@pytest.mark.parametrize(
    "change",
    [
        "",
        "os.putenv('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.9')",
        "dict.__setitem__(os.environ._data, b'XLA_PYTHON_CLIENT_MEM_FRACTION', b'0.9')",
        "dict.pop(os.environ._data, b'XLA_PYTHON_CLIENT_MEM_FRACTION')",
        "os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] = 'platform'",
        "os.environ['XLA_CLIENT_MEM_FRACTION'] = '0.9'",
    ],
)
def test_jax_gets_no_more_than_the_lease_whatever_a_script_does(change: str) -> None:
    share, allocator = options_after(change)

    assert share == pytest.approx(MOST, abs=1e-5)
    assert allocator == "default"


def test_a_smaller_share_that_a_script_asks_for_is_kept() -> None:
    assert options_after("os.environ['XLA_CLIENT_MEM_FRACTION'] = '0.02'")[0] == 0.02


def test_a_lease_too_small_for_jax_says_what_would_do() -> None:
    assert "cannot run JAX in a lease of 512M" in options_after("", lease=512 * MIB)
