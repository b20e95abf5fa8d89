"""What the current PyTorch and one before 2.10 do inside a lease, on a machine without a GPU.

Where two GPUs are wanted, they are faked where PyTorch leaves Python: its own initialisation runs,
and what it would hand to C++ is read there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from frameworks.environments import TORCHES, python_of
from goldens import mentions
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead

LEASES = (8192 * MIB, 4096 * MIB)
TOTALS = (81559 * MIB, 24576 * MIB)
GIB = 1024 * MIB
SEEN_TOTALS = [80000 * MIB, 24000 * MIB]
"""CUDA shows programs a little less than NVML."""


def variables(
    simulated: bool = False, leases: tuple[int, int] = LEASES, **more: str
) -> dict[str, str]:
    return worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | more,
        job="j1",
        marker="m",
        gpus=[
            LeasedGpu(f"GPU-{n}", n, "H100", size, total)
            for n, (size, total) in enumerate(zip(leases, TOTALS, strict=True))
        ],
        simulated=simulated,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(),
    )


class Torch:
    """Runs scripts with one version of PyTorch in a lease of two GPUs."""

    def __init__(self, environment: str) -> None:
        self._python = python_of(environment)

    def run(self, source: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._python, "-W", "ignore", "-c", dedent(source)],
            env=variables(**options), capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip

    def said(self, source: str, **options: Any) -> Any:
        child = self.run(source, **options)
        assert child.returncode == 0, child.stderr
        assert child.stderr == ""
        return json.loads(child.stdout)


@pytest.fixture(params=TORCHES)
def torch(request: pytest.FixtureRequest) -> Torch:
    return Torch(request.param)


@pytest.fixture
def old_torch() -> Torch:
    """Before 2.10, setting a share moves to its device, and opens a context there."""
    return Torch("torch-2.9")


TWO_GPUS = f"""
import json
from types import SimpleNamespace
import torch

# Without a context, since the hook looks for those of 0.2 s later, and limits the GPU once more.
handed, contexts, at = [], set(), [0]

def set_fraction(share, device):
    handed.append([share, device])
    if torch.__version__.startswith("2.9"):  # cudaSetDevice and cudaMemGetInfo, with no guard
        at[0] = device
        contexts.add(device)

def set_device(device):
    at[0] = device

def memory(device):
    contexts.add(device)
    return 0, driver_shows[device]

torch._C._cuda_getDeviceCount = lambda: 2
torch._C._cuda_init = lambda: None
torch._C._cuda_getDevice = lambda: at[0]
torch._C._cuda_setDevice = set_device
torch._C._cuda_hasPrimaryContext = lambda device: device in contexts
torch._C._cuda_setMemoryFraction = set_fraction
torch.cuda.device_count = lambda: 2
torch.cuda._cudart = SimpleNamespace(cudaMemGetInfo=memory)
torch.cuda._queued_calls[:] = [
    each for each in torch.cuda._queued_calls if "_check" not in each[0].__name__
]
totals = {SEEN_TOTALS}
driver_shows = list(totals)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=totals[device])
"""
RANK = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def most(gpu: int, beside: int | None = None) -> float:
    taken = default_overhead("torch", 2) if beside is None else beside
    return (LEASES[gpu] - taken) / SEEN_TOTALS[gpu]


def test_importing_torch_queues_the_limit_and_creates_no_context(torch: Torch) -> None:
    queued, started = torch.said(
        """
        import json, torch
        modules = [call[0].__module__ for call in torch.cuda._queued_calls]
        print(json.dumps([modules[-1], torch.cuda.is_initialized()]))
        """
    )

    assert queued == "_gpulease_hooks.torch_hook"
    assert not started


def test_each_gpu_gets_the_pool_of_its_own_lease_when_cuda_starts(torch: Torch) -> None:
    handed = torch.said(TWO_GPUS + "torch.cuda.init()\nprint(json.dumps(handed))")

    assert [device for _, device in handed] == [0, 1]
    for share, device in handed:
        assert most(device) - 1e-6 < share <= most(device)


def test_a_rank_of_an_old_torch_opens_no_context_on_the_others_gpus(old_torch: Torch) -> None:
    source = """
torch.cuda.init()
torch.cuda.set_device(1)
print(json.dumps([handed, [*contexts], at]))
"""
    handed, contexts, at = old_torch.said(TWO_GPUS + source, **RANK)

    assert [device for _, device in handed] == [1]
    assert contexts == at == [1]


def test_a_rank_that_uses_anothers_gpu_all_the_same_is_limited_there(old_torch: Torch) -> None:
    source = """
import time
torch.cuda.init()
contexts.add(0)  # as x.to("cuda:0") does, of which no hook hears
deadline = time.monotonic() + 60
while len(handed) < 2 and time.monotonic() < deadline:
    time.sleep(0.02)
print(json.dumps(handed))
"""
    handed = old_torch.said(TWO_GPUS + source, **RANK)

    assert [device for _, device in handed] == [1, 0]
    assert handed[1][0] == pytest.approx(most(0), abs=1e-6)


def test_a_smaller_share_that_a_rank_set_on_anothers_gpu_is_kept(old_torch: Torch) -> None:
    source = """
import threading
torch.cuda.init()
(watcher,) = [each for each in threading.enumerate() if each.name == "gpulease-limit"]
torch.cuda.set_per_process_memory_fraction(0.01, 0)
watcher.join(120)
print(json.dumps(handed))
"""
    assert old_torch.said(TWO_GPUS + source, **RANK)[1:] == [[pytest.approx(0.01), 0]]


@pytest.mark.parametrize("ranks", [{}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}])
def test_one_process_of_an_old_torch_is_limited_on_all_gpus_at_once(
    old_torch: Torch, ranks: dict[str, str]
) -> None:
    handed = old_torch.said(TWO_GPUS + "torch.cuda.init()\nprint(json.dumps(handed))", **ranks)

    assert [device for _, device in handed] == [0, 1]


def test_an_old_torch_is_limited_by_what_the_driver_shows_it_as_all(old_torch: Torch) -> None:
    """Where the driver limits a job, cudaMemGetInfo is said to show it the limit as the total."""
    limit = LEASES[0]
    then = f"driver_shows[0] = {limit}\ntorch.cuda.init()\nprint(json.dumps(handed))"
    handed = old_torch.said(TWO_GPUS + then)

    pool = LEASES[0] - default_overhead("torch", 2)
    assert handed[0][0] * limit == pytest.approx(pool, abs=MIB)


def test_a_script_may_lower_its_share_and_not_raise_it(torch: Torch) -> None:
    source = """
set_share = torch.cuda.set_per_process_memory_fraction
torch.cuda.init()
del handed[:]
set_share(0.9)
set_share(0.01, 1)
set_share(0.9, "cuda:1")
torch.cuda.memory.set_per_process_memory_fraction(0.02, torch.device("cuda:0"))
print(json.dumps(handed))
"""
    handed = torch.said(TWO_GPUS + source)

    assert [device for _, device in handed] == [0, 1, 1, 0]
    assert handed[0][0] == pytest.approx(most(0), abs=1e-6)
    assert handed[1][0] == pytest.approx(0.01)
    assert handed[2][0] == pytest.approx(most(1), abs=1e-6)
    assert handed[3][0] == pytest.approx(0.02)


def test_a_smaller_share_in_pytorchs_own_variable_is_kept(torch: Torch) -> None:
    handed = torch.said(
        TWO_GPUS + "torch.cuda.init()\nprint(json.dumps(handed))",
        PYTORCH_ALLOC_CONF="per_process_memory_fraction:0.03",
    )

    assert [share for share, _ in handed] == [pytest.approx(0.03)] * 2


def test_a_script_that_turns_the_limited_allocator_off_keeps_it(torch: Torch) -> None:
    source = """
import os
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
torch.cuda.init()
print(json.dumps(os.getenv("PYTORCH_NO_CUDA_MEMORY_CACHING")))
"""
    assert torch.said(TWO_GPUS + source) is None


def test_what_pytorch_refuses_it_refuses_in_its_own_words(torch: Torch) -> None:
    source = """
torch.cuda.init()
errors = []
for value in (1, "x", -1.0, 2.0):
    try:
        torch.cuda.set_per_process_memory_fraction(value)
    except (TypeError, ValueError) as error:
        errors.append(type(error).__name__)
print(json.dumps(errors))
"""
    assert torch.said(TWO_GPUS + source) == ["TypeError", "TypeError", "ValueError", "ValueError"]


def test_without_cuda_torch_complains_as_it_does_outside_a_job(torch: Torch) -> None:
    child = torch.run("import torch; torch.cuda.set_per_process_memory_fraction(0.5)")

    assert child.returncode == 1
    assert "gpulease" not in child.stderr.splitlines()[-1]
    assert child.stderr.splitlines()[-1].startswith(("AssertionError", "RuntimeError"))


def test_a_lease_too_small_for_pytorch_says_what_would_do(torch: Torch) -> None:
    child = torch.run(TWO_GPUS + "torch.cuda.init()", leases=(512 * MIB, 512 * MIB))

    assert child.returncode == 1
    assert mentions(child.stderr, "LeaseTooSmall", "PyTorch", "512M", "hint: ", "--mem 2G")


def test_on_simulated_gpus_nothing_of_torch_is_touched(torch: Torch) -> None:
    found = torch.said(
        """
        import json, torch
        names = [call[0].__module__ for call in torch.cuda._queued_calls]
        setter = torch.cuda.set_per_process_memory_fraction
        print(json.dumps([names, hasattr(setter, "__wrapped__")]))
        """,
        simulated=True,
    )

    assert "_gpulease_hooks.torch_hook" not in found[0]
    assert found[1] is False


def test_a_child_that_is_forked_after_the_import_is_limited_too(torch: Torch) -> None:
    source = """
import os
sender = os.pipe()
if os.fork() == 0:
    torch.cuda.init()
    os.write(sender[1], json.dumps(handed).encode())
    os._exit(0)
os.wait()
print(os.read(sender[0], 4096).decode())
"""
    assert [device for _, device in torch.said(TWO_GPUS + source)] == [0, 1]


MEMORY = """
reserved = 1 << 30
torch._C._cuda_memoryStats = lambda device: {"reserved_bytes": {"all": {"current": reserved}}}
torch._C._accelerator_getMemoryInfo = memory
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
torch.accelerator.current_device_index = lambda: at[0]
free = [70 << 30, 1 << 30]

def memory(device):
    return free[device], driver_shows[device]

torch.cuda._cudart.cudaMemGetInfo = torch._C._accelerator_getMemoryInfo = memory
"""


def test_free_and_total_memory_are_those_of_the_pool(torch: Torch) -> None:
    ask = """
calls = [(), (0,), ("cuda",), (torch.device("cuda:1"),), (1,)]
print(json.dumps([torch.cuda.mem_get_info(*each) for each in calls]))
"""
    found = torch.said(TWO_GPUS + MEMORY + ask)

    pools = [LEASES[gpu] - default_overhead("torch", 2) for gpu in (0, 1)]
    first = [pools[0] - GIB, pools[0]]
    second = [GIB, pools[1]]
    for (free, total), expected in zip(found, [first, first, first, second, second], strict=True):
        assert free == pytest.approx(expected[0], abs=MIB)
        assert total == pytest.approx(expected[1], abs=MIB)
        assert total <= expected[1]


def test_the_newer_function_shows_the_same() -> None:
    ask = """
found = [torch.accelerator.get_memory_info(*each) for each in [(), ("cuda:0",)]]
print(json.dumps([found, torch.cuda.mem_get_info()]))
"""
    found, known = Torch("torch").said(TWO_GPUS + MEMORY + ask)

    assert found == [known, known]


def test_a_torch_that_renamed_what_the_hook_needs_is_told_of_and_works(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '9.9'\nfrom torch import cuda\n")
    (package / "cuda.py").write_text("def set_per_process_memory_fraction(share, device=None): 1\n")
    environment = variables()
    environment["PYTHONPATH"] += f":{tmp_path}"

    child = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip

    assert child.stdout == "9.9\n"
    assert mentions(child.stderr, "gpulease: ", "PyTorch 9.9", "torch.cuda._lazy_call")
    assert child.stderr.count("\n") == 1
