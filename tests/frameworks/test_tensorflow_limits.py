"""What a real TensorFlow is handed inside a lease, by what the script does.

No GPU is needed: tensorflow_zygote.py fakes the list of devices and reads the configuration where
it leaves Python. Each scenario is a test of its own; all of one lease share one import.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from frameworks.tensorflow_scenarios import POOL, ROWS, TOTAL, USE
from goldens import mentions
from gpulease.worker.environment import (
    HOOKS,
    MIB,
    LeasedGpu,
    WorkerOptions,
    default_overhead,
    worker_environment,
)

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow"),
]

Outcome = dict[str, Any]

ZYGOTE = Path(__file__).with_name("tensorflow_zygote.py")
LEASE = POOL * MIB + default_overhead("tensorflow", 2)
SMALL = 512 * MIB


def variables(
    simulated: bool = False, memory: tuple[int, int] = (LEASE, LEASE), **options: Any
) -> dict[str, str]:
    made = worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
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
    return made | {"TF_CPP_MIN_LOG_LEVEL": "2"}


LEASES: dict[str, Callable[[], dict[str, str]]] = {
    "plain": variables,
    "growing": lambda: variables(growth=True),
    "split": lambda: variables(split=2),
    "tuned": lambda: variables(intra_op=3, inter_op=2, log_placement=True, soft_placement=True),
    "unequal": lambda: variables(memory=(LEASE, LEASE - 1024 * MIB)),
    "small": lambda: variables(memory=(SMALL, SMALL)),
    "simulated": lambda: variables(simulated=True),
    "simulated split": lambda: variables(simulated=True, split=2, intra_op=3, inter_op=3),
}


def run(sources: dict[str, str], lease: str) -> dict[str, Outcome]:
    """Run scenarios in one lease, each in a process of its own that believes in its GPUs."""
    child = subprocess.run(
        [sys.executable, ZYGOTE, "0" if "simulated" in lease else "2"],
        input=json.dumps({name: dedent(source) for name, source in sources.items()}),
        env=LEASES[lease](),
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    found: dict[str, Outcome] = json.loads(child.stdout.rpartition("=== results ===")[2])
    return found


@pytest.fixture(scope="module")
def outcome_of() -> Callable[[str], Outcome]:
    """Run all scenarios of a lease when the first of them is asked for."""
    known: dict[str, Outcome] = {}

    def outcome(name: str) -> Outcome:
        if name not in known:
            lease = ROWS[name].lease
            known.update(
                run({each: row.source for each, row in ROWS.items() if row.lease == lease}, lease)
            )
        return known[name]

    return outcome


@pytest.mark.parametrize("name", ROWS, ids=str)
def test_tensorflow_is_handed_the_lease(name: str, outcome_of: Callable[[str], Outcome]) -> None:
    row = ROWS[name]

    outcome = outcome_of(name)

    assert outcome["error"] is None
    last = outcome["sent"][-1]
    assert {part: last[part] for part in row.sent} == row.sent
    assert outcome["seen"] == row.seen


def test_a_lease_too_small_for_tensorflow_says_what_would_do() -> None:
    outcome = run({"it": USE}, "small")["it"]

    message, _, hint = outcome["error"].partition("\n\n")
    assert mentions(message, "LeaseTooSmall: ", "TensorFlow", "512M")
    assert mentions(hint, "hint: ", "--mem 2G")
    assert outcome["sent"] == []
