"""What `doctor --prove` runs in a job: it says how far it came, and who kept the rest back.

CUDA is a stand-in whose device has room for so much and no more.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpulease
from daemon_stand_in import views
from gpulease.cli.prove import Trial, refused_check
from nvml_stand_in import Card, StandIn

PROVER = Path(gpulease.__file__).parent / "worker" / "prover.py"
MIB = 1 << 20
CONTEXT = 300 * MIB
"""What the stand-in counts for a process before it has allocated."""


def prove(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROVER), *arguments],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def cuda(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a GPU with 100 MiB of room beside a context."""
    return StandIn(tmp_path, [Card(total=CONTEXT + 100 * MIB)]).with_cuda().environment()


def test_a_driver_that_refuses_is_told_with_what_was_held_by_then(cuda: dict[str, str]) -> None:
    said = prove("device", str(256 * MIB), "0", **cuda)
    assert said[-1] == {"refused": 96 * MIB, "by": "driver", "why": "CUDA_ERROR_OUT_OF_MEMORY"}
    assert [line["held"] for line in said[:-1]] == [32 * MIB, 64 * MIB, 96 * MIB]


def test_what_nobody_keeps_back_is_told_step_by_step(cuda: dict[str, str]) -> None:
    said = prove("device", str(64 * MIB), "0", **cuda)
    assert said == [{"held": 32 * MIB}, {"held": 64 * MIB}]


def test_what_could_not_be_tried_says_why(cuda: dict[str, str], tmp_path: Path) -> None:
    no_device = {"LD_LIBRARY_PATH": cuda["LD_LIBRARY_PATH"]}
    assert prove("device", str(64 * MIB), "0", **no_device) == [
        {"cannot": "CUDA returned error 100"}
    ]
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing\\nas said')")
    assert prove("torch", str(64 * MIB), "0", PYTHONPATH=str(tmp_path)) == [
        {"cannot": "ImportError: libcudart is missing"}
    ]


def test_memory_of_a_simulated_gpu_is_really_taken() -> None:
    held = prove("host", str(64 * MIB), "0")
    assert held == [{"held": 32 * MIB}, {"held": 64 * MIB}]


def test_each_device_node_is_tried(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    os.mkfifo(tmp_path / "nvidia1")
    (tmp_path / "nvidia2").symlink_to("/nonexistent")
    said = prove("open", str(tmp_path / "nvidia*"))
    assert said == [
        {"opened": str(tmp_path / "nvidia0")},
        {"opened": str(tmp_path / "nvidia1")},
        {"closed": str(tmp_path / "nvidia2"), "why": "ENOENT"},
    ]


@pytest.mark.parametrize(
    ("by", "held", "peak", "state"),
    [
        ("framework", 1400, 2000, "ok"),
        ("framework", 1400, None, "ok"),
        ("framework", 1400, 2200, "warning"),
        ("framework", 2100, 2200, "failure"),
        ("driver", 1900, 2048, "ok"),
        ("driver", 1900, 2049, "failure"),
    ],
)
def test_what_the_gpu_held_counts_as_well_as_what_was_allocated(
    by: str, held: int, peak: int | None, state: str
) -> None:
    (lease,) = views.running().leases
    kept = replace(lease, peak=None if peak is None else peak * MIB)
    refusal = {"refused": held * MIB, "by": by, "why": "no more"}

    check = refused_check("proof", Trial(views.running(leases=[kept]), [refusal]), 2048 * MIB)

    assert check.state == state
    assert ("2.1G" in check.message) == (peak == 2200 and held == 1400)
    assert ("again" in (check.mend or "")) == (state == "warning")
