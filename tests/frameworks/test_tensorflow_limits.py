"""What a real TensorFlow is handed inside a lease, by what the script does and by version.

No GPU is needed: tensorflow_zygote.py fakes the list of devices and reads the configuration where
it leaves Python. Each scenario is a test of its own; all of one version share one import. The
TensorFlow beside the tests is quick, the others have environments of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from frameworks.environments import python_of
from frameworks.tensorflow_scenarios import POOL, ROWS, TOO_SMALL, TOTAL, Row
from goldens import mentions
from gpulease.worker.environment import (
    HOOKS,
    MIB,
    LeasedGpu,
    WorkerOptions,
    default_overhead,
    worker_environment,
)

pytestmark = pytest.mark.tensorflow

HERE = "here"
OTHERS = ("1.13", "1.15", "2.4", "2.12", "2.19", "2.20")
"""TensorFlow 1's first and last, 2's oldest and middle, and those before the tests' own."""

Outcome = dict[str, Any]

ZYGOTE = Path(__file__).with_name("tensorflow_zygote.py")
LEASE = POOL * MIB + default_overhead("tensorflow", 2)
SMALL = 512 * MIB
BASE = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
BASE |= {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONDONTWRITEBYTECODE": "1"}


def variables(
    simulated: bool = False, memory: tuple[int, int] = (LEASE, LEASE), **options: Any
) -> dict[str, str]:
    return worker_environment(
        BASE,
        job="j1",
        marker="m",
        gpus=[
            LeasedGpu(f"GPU-{number}", number, "H100", size, TOTAL * MIB)
            for number, size in enumerate(memory)
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
    "tuned": lambda: variables(intra_op=3, inter_op=2, log_placement=True, soft_placement=True),
    "deterministic": lambda: variables(deterministic=True),
    "unequal": lambda: variables(memory=(LEASE, LEASE - 1024 * MIB)),
    "small": lambda: variables(memory=(SMALL, SMALL)),
    "simulated": lambda: variables(simulated=True),
    "simulated split": lambda: variables(simulated=True, split=2, intra_op=3, inter_op=3),
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


@cache
def outcomes(version: str) -> Outcomes:
    """Run all scenarios, each in a process of its own that believes in its GPUs."""
    scenarios = {
        name: {
            "source": dedent(row.source),
            "variables": LEASES[row.lease](),
            "gpus": 0 if "simulated" in row.lease else 2,
        }
        for name, row in (ROWS | TOO_SMALL).items()
    }
    child = subprocess.run(
        [interpreter(version), "-W", "ignore", ZYGOTE],
        input=json.dumps(scenarios), env=BASE, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    answer = json.loads(child.stdout.rpartition("=== results ===")[2])
    major, minor = answer["version"].split(".")[:2]
    return Outcomes((int(major), int(minor)), answer["results"])


def outcome_of(name: str, row: Row, version: str) -> Outcome:
    every = outcomes(version)
    if misfit := row.misfit(every.release):
        pytest.skip(misfit)
    return every.of[name]


in_each_version = pytest.mark.parametrize(
    "version", [HERE, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)]
)


@in_each_version
@pytest.mark.parametrize("name", ROWS, ids=str)
def test_tensorflow_is_handed_the_lease(name: str, version: str) -> None:
    row = ROWS[name]

    outcome = outcome_of(name, row, version)

    assert outcome["error"] is None
    last = outcome["sent"][-1]
    assert {part: last[part] for part in row.sent} == row.sent
    assert outcome["seen"] == row.seen


@in_each_version
@pytest.mark.parametrize("name", TOO_SMALL, ids=str)
def test_a_lease_too_small_for_tensorflow_says_what_would_do(name: str, version: str) -> None:
    outcome = outcome_of(name, TOO_SMALL[name], version)

    message, _, hint = outcome["error"].partition("\n\n")
    assert mentions(message, "LeaseTooSmall: ", "TensorFlow", "512M")
    assert mentions(hint, "hint: ", "--mem 2G")
    assert outcome["sent"] == []
