"""What `doctor --prove` runs in a job: it says how far it came, and who kept the rest back.

CUDA is a library made here, whose device has room for so much and no more.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpulease

PROVER = Path(gpulease.__file__).parent / "worker" / "prover.py"
MIB = 1 << 20
CUDA = """
#include <stddef.h>
#include <stdlib.h>
static size_t held;
int cuInit(unsigned flags) { (void)flags; return getenv("NO_DEVICE") ? 100 : 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = &held;
    return 0;
}
int cuCtxSetCurrent(void *context) { return context == &held ? 0 : 201; }
int cuMemAlloc_v2(unsigned long long *pointer, size_t size) {
    if (held + size > strtoull(getenv("ROOM"), NULL, 10)) return 2;
    held += size;
    *pointer = held;
    return 0;
}
"""


def prove(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROVER), *arguments],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder with the library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the stand-in for CUDA with")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(CUDA)
    library = folder / "libcuda.so.1"
    build = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "cuda.c")]
    subprocess.run(build, check=True)
    return str(folder)


def test_a_driver_that_refuses_is_told_with_what_was_held_by_then(cuda: str) -> None:
    said = prove("device", str(256 * MIB), "0", LD_LIBRARY_PATH=cuda, ROOM=str(100 * MIB))
    assert said[-1] == {"refused": 96 * MIB, "by": "driver", "why": "CUDA_ERROR_OUT_OF_MEMORY"}
    assert [line["held"] for line in said[:-1]] == [32 * MIB, 64 * MIB, 96 * MIB]


def test_what_nobody_keeps_back_is_told_step_by_step(cuda: str) -> None:
    said = prove("device", str(64 * MIB), "0", LD_LIBRARY_PATH=cuda, ROOM=str(100 * MIB))
    assert said == [{"held": 32 * MIB}, {"held": 64 * MIB}]


def test_what_could_not_be_tried_says_why(cuda: str) -> None:
    no_device = {"LD_LIBRARY_PATH": cuda, "ROOM": "0", "NO_DEVICE": "1"}
    assert prove("device", str(64 * MIB), "0", **no_device) == [
        {"cannot": "CUDA answers with error 100"}
    ]
    (said,) = prove("torch", str(64 * MIB), "0", PYTHONPATH="/nonexistent")
    assert "cannot" in said


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
