"""Real frameworks in leases of 4 GiB on a real GPU, held to them as nvidia-smi counts.

Each framework is in this Python, or in the one that GPULEASE_TEST_TORCH, GPULEASE_TEST_JAX,
GPULEASE_TEST_CUPY, GPULEASE_TEST_RMM or GPULEASE_TEST_TENSORFLOW names. A script takes memory in
small pieces until its framework refuses, and then stays, so that it can be looked at.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from textwrap import dedent
from typing import Any

import pytest

from daemon_rig import Daemon

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.usefixtures("own_pids")]

Patiently = Callable[[str, Callable[[], Any]], Any]

G, M = 1 << 30, 1 << 20
LEASE = 4 * G
LEAST = 2 * G
"""A framework that is refused before this has been held too short to be of use."""

END = """
print("full", flush=True)
import time
time.sleep(600)
"""
SCRIPTS = {
    "torch": """
        import torch
        held = []
        try:
            while True:
                ones = torch.ones(2048, 4096, device="cuda")
                held.append(ones @ torch.ones(4096, 4096, device="cuda"))
        except torch.OutOfMemoryError:
            pass
        """,
    "tensorflow": """
        import tensorflow as tf
        held = []
        try:
            while True:
                held.append(tf.matmul(tf.ones([2048, 4096]), tf.ones([4096, 4096])))
        except tf.errors.ResourceExhaustedError:
            pass
        """,
    "jax": """
        import jax.numpy as jnp
        held = []
        try:
            while True:
                held.append((jnp.ones((2048, 4096)) @ jnp.ones((4096, 4096))).block_until_ready())
        except Exception as error:
            assert "RESOURCE_EXHAUSTED" in str(error), error
        """,
    "cupy": """
        import cupy
        try:
            cupy.empty((64, 64), "f") @ cupy.empty((64, 64), "f")
        except (ImportError, RuntimeError) as error:
            print("without cuBLAS:", error)
        held = []
        try:
            while True:
                # Needs no compiler, which CuPy's wheels may come without.
                held.append(cupy.cuda.alloc(32 << 20))
                held[-1].memset(1, 32 << 20)
        except cupy.cuda.memory.OutOfMemoryError:
            pass
        """,
    "rmm": """
        import rmm
        held = []
        try:
            while True:
                held.append(rmm.DeviceBuffer(size=32 << 20))
        except MemoryError:
            pass
        """,
}
REPORTING = sorted({*SCRIPTS} - {"rmm"})
"""Those with a hook that reports the size of the pool."""
GROWING = {"tensorflow": ("--growth",), "jax": ("--growth",)}


def python_with(framework: str) -> str:
    named = os.environ.get(f"GPULEASE_TEST_{framework.upper()}")
    if named is None and find_spec(framework) is None:
        pytest.skip(f"needs {framework}, here or in what GPULEASE_TEST_{framework.upper()} names")
    return named or sys.executable


def start(daemon: Daemon, framework: str, *options: str) -> int:
    script = daemon.folder / f"{framework}.py"
    script.write_text(dedent(SCRIPTS[framework]) + END)
    return daemon.submit("--mem", "4G", *options, python_with(framework), str(script))


def is_full(daemon: Daemon, job: int) -> Callable[[], bool]:
    def found() -> bool:
        said = daemon.run("logs", str(job), check=False)
        assert daemon.job(job)["state"] != "ended", said
        return "full" in said.stdout

    return found


def shown_by_nvidia_smi(daemon: Daemon, job: int) -> int:
    """Return the bytes that nvidia-smi shows for the processes of a job."""
    command = shutil.which("nvidia-smi")
    if command is None:
        pytest.skip("there is no nvidia-smi to count")
    fields = "gpu_uuid,pid,used_memory"
    asked = [command, f"--query-compute-apps={fields}", "--format=csv,noheader,nounits"]
    rows = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=120).stdout
    mine = {
        process["pid"]
        for gpu in daemon.status()["gpus"]
        for process in gpu["processes"]
        if process["job"] == job
    }
    assert mine, "the daemon does not see the job on any GPU"
    held: dict[tuple[str, int], int] = {}
    for gpu, pid, used in (row.split(", ") for row in rows.splitlines()):
        if int(pid) in mine:
            if not used.isdigit():
                pytest.skip(f"nvidia-smi does not tell what processes hold here: {used}")
            # One in several lists is shown several times.
            held[gpu, int(pid)] = max(int(used) * M, held.get((gpu, int(pid)), 0))
    return sum(held.values())


@pytest.mark.parametrize("growing", [False, True], ids=["as-it-is", "growing"])
@pytest.mark.parametrize("framework", sorted(SCRIPTS))
def test_a_framework_in_4_gib_holds_no_more_as_nvidia_smi_counts(
    framework: str, growing: bool, gpu_daemon: Daemon, patiently: Patiently
) -> None:
    if growing and framework not in GROWING:
        pytest.skip(f"{framework} always takes memory as it needs it")
    job = start(gpu_daemon, framework, *(GROWING.get(framework, ()) if growing else ()))

    patiently(f"{framework} is refused more", is_full(gpu_daemon, job))

    assert LEAST <= shown_by_nvidia_smi(gpu_daemon, job) <= LEASE


@pytest.mark.parametrize("framework", REPORTING)
def test_what_is_held_beside_the_pool_is_no_more_than_is_kept_for_it(
    framework: str,
    gpu_daemon: Daemon,
    capsys: pytest.CaptureFixture[str],
    patiently: Patiently,
) -> None:
    job = start(gpu_daemon, framework)

    def seen() -> dict[str, Any] | None:
        pools = gpu_daemon.job(job)["leases"][0]["pools"]
        return next((each for each in pools if each["beside"] is not None), None)

    patiently(f"{framework} is refused more", is_full(gpu_daemon, job))
    pool = patiently("what is beside the pool is known", seen)

    with capsys.disabled():
        kept, beside = pool["charged"] // M, pool["beside"] // M
        sys.stdout.write(f"\n{framework} {pool['version']}: {beside} MiB, {kept} kept for it\n")
    assert pool["beside"] <= pool["charged"]


@pytest.mark.parametrize("framework", sorted(SCRIPTS))
def test_two_jobs_on_one_gpu_each_keep_to_their_own_lease(
    framework: str, gpu_daemon: Daemon, patiently: Patiently
) -> None:
    jobs = [start(gpu_daemon, framework) for _ in range(2)]
    for job in jobs:
        patiently(f"{framework} is refused more", is_full(gpu_daemon, job))

    if len({gpu_daemon.job(job)["leases"][0]["gpu"] for job in jobs}) > 1:
        pytest.skip("the two were placed on different GPUs: somebody uses one of them")
    for job in jobs:
        assert LEAST <= shown_by_nvidia_smi(gpu_daemon, job) <= LEASE


def test_a_script_on_several_gpus_stays_on_its_first_and_has_no_context_on_the_others(
    real_gpus: int, gpu_daemon: Daemon, patiently: Patiently
) -> None:
    if real_gpus < 2:
        pytest.skip("needs two GPUs")
    python = python_with("torch")
    script = gpu_daemon.folder / "first.py"
    script.write_text(
        "import torch\nheld = torch.ones(1024, 1024).cuda()\n"
        "assert held.device.index == 0, held.device\n" + END
    )
    job = gpu_daemon.submit("--gpus", "2", "--mem", "4G", python, str(script))

    patiently("it has allocated", is_full(gpu_daemon, job))

    first, other = gpu_daemon.job(job)["leases"]
    patiently("it is seen", lambda: gpu_daemon.job(job)["leases"][0]["used"])
    assert not gpu_daemon.job(job)["leases"][1]["used"], (first, other)
