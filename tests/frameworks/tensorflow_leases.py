"""Leases, versions of TensorFlow, and what scenarios are handed there: for tests that share these.

tensorflow_zygote.py runs the scenarios.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from frameworks.environments import python_of
from frameworks.tensorflow_scenarios import POOL, TOTAL
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import COLLECTIVES, MIB, default_overhead

HERE = "here"
"""The TensorFlow beside the tests; others have environments of their own."""

Outcome = dict[str, Any]

ZYGOTE = Path(__file__).with_name("tensorflow_zygote.py")
LEASE = POOL * MIB + default_overhead("tensorflow", 2)
SMALL = 512 * MIB
BASE = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
BASE |= {"TF_CPP_MIN_LOG_LEVEL": "2"}


def variables(
    simulated: bool = False,
    memory: tuple[int, ...] = (LEASE, LEASE),
    first: int = 0,
    **options: Any,
) -> dict[str, str]:
    return worker_environment(
        BASE,
        job="j1",
        marker="m",
        gpus=[
            LeasedGpu(f"GPU-{number}", number, "H100", size, TOTAL * MIB)
            for number, size in enumerate(memory, first)
        ],
        simulated=simulated,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(**options),
    )


DIVIDED = {"split_sizes": (1024 * MIB, 2048 * MIB)}
LEASES: dict[str, Callable[[], dict[str, str]]] = {
    "plain": variables,
    "growing": lambda: variables(growth=True),
    "split": lambda: variables(split=2),
    "sized": lambda: variables(**DIVIDED),
    "sized too large": lambda: variables(split_sizes=(2048 * MIB, 6144 * MIB)),
    "tuned": lambda: variables(
        intra_op_threads=3, inter_op_threads=2, log_placement=True, soft_placement=True
    ),
    "deterministic": lambda: variables(deterministic=True),
    "unequal": lambda: variables(memory=(LEASE, LEASE - 1024 * MIB)),
    "one": lambda: variables(memory=(LEASE - COLLECTIVES,), first=1),
    "small": lambda: variables(memory=(SMALL, SMALL)),
    "simulated": lambda: variables(simulated=True),
    "simulated split": lambda: variables(
        simulated=True, split=2, intra_op_threads=3, inter_op_threads=3
    ),
    "simulated sized": lambda: variables(simulated=True, **DIVIDED),
}


def interpreter(version: str) -> str:
    if version != HERE:
        return python_of(f"tensorflow-{version}")
    if find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow")
    return sys.executable


class Outcomes(NamedTuple):
    """What came of all scenarios in one TensorFlow."""

    release: tuple[int, int]
    of: dict[str, Outcome]


def handed(version: str, scenarios: Mapping[str, tuple[str, str]]) -> Outcomes:
    """Run scenarios, (source, lease) by name, each in a process that believes in its GPUs."""
    given = {
        name: {
            "source": dedent(source),
            "variables": LEASES[lease](),
            "gpus": {"simulated": 0, "one": 1}.get(lease.partition(" ")[0], 2),
        }
        for name, (source, lease) in scenarios.items()
    }
    child = subprocess.run(
        [interpreter(version), "-W", "ignore", ZYGOTE],
        input=json.dumps(given), env=BASE, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    answer = json.loads(child.stdout.rpartition("=== results ===")[2])
    major, minor = answer["version"].split(".")[:2]
    return Outcomes((int(major), int(minor)), answer["results"])
