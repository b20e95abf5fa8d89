"""What a real CuPy makes of its lease, without a GPU."""

import json
import os
import subprocess
from typing import Any

import pytest

from frameworks.environments import python_of
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead

LEASE = 4096 * MIB
POOL = LEASE - default_overhead("cupy", 1)


def cupy(source: str, **more: str) -> Any:
    """Return what a script with CuPy prints as JSON in a lease of one GPU."""
    variables = worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | more,
        job="j1",
        marker="m",
        gpus=[LeasedGpu("GPU-0", 0, "H100", LEASE, 80 << 30)],
        simulated=False,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(),
    )
    child = subprocess.run(
        [python_of("cupy"), "-W", "ignore", "-c", f"import cupy, json\n{source}"],
        env=variables, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert (child.returncode, child.stderr) == (0, "")
    return json.loads(child.stdout)


@pytest.mark.parametrize(
    ("asked", "limit"), [({}, POOL), ({"CUPY_GPU_MEMORY_LIMIT": "1000"}, 1000)]
)
def test_cupy_reads_the_pool_of_its_lease_as_the_limit_of_every_pool(
    asked: dict[str, str], limit: int
) -> None:
    source = "print(json.dumps(cupy.cuda.memory._parse_limit_string()))"

    assert cupy(source, **asked) == {"size": limit, "fraction": None}


def test_cupy_fails_without_a_gpu_as_it_does_outside_a_job() -> None:
    source = """
allocator = cupy.cuda.get_allocator()
try:
    cupy.ndarray((10,))
except cupy.cuda.runtime.CUDARuntimeError as error:
    print(json.dumps([allocator.__module__, type(error).__name__]))
"""
    assert cupy(source) == ["_gpulease_hooks.cupy_hook", "CUDARuntimeError"]
