"""What a real JAX makes of its lease: the options of its GPU client, without a GPU."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from component.test_hook_reports import Hearer
from frameworks.environments import python_of
from goldens import mentions
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead

LEASE, TOTAL = 8192 * MIB, 81920 * MIB
MOST = (LEASE - default_overhead("jax", 1)) / TOTAL
OPTIONS = """
import jax, json, os
from jaxlib import xla_client
{}
found = xla_client.generate_pjrt_gpu_plugin_options()
print(json.dumps([found.get("memory_fraction"), found["allocator"]]))
"""


def environment(lease: int, daemon: str = "") -> dict[str, str]:
    return worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        job="j1",
        marker="m",
        gpus=[LeasedGpu("GPU-0", 0, "H100", lease, TOTAL)],
        simulated=False,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(),
        daemon=daemon,
    )


def options_after(change: str) -> Any:
    child = subprocess.run(
        [python_of("jax"), "-c", OPTIONS.format(change)],
        env=environment(LEASE), capture_output=True, text=True, timeout=180, check=False,
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


REGISTERED = """
import jax._src.xla_bridge as xb

def register_plugin(name, options=None, **rest):
    print(json.dumps([options["memory_fraction"], options["allocator"]]))
    sys.exit()

xb.register_plugin = register_plugin
import jax, json, sys
from jax_plugins import xla_cuda12
xla_cuda12.initialize()
"""


def test_the_plugin_for_cuda_takes_its_options_from_the_function_that_is_hooked() -> None:
    child = subprocess.run(
        [python_of("jax"), "-c", REGISTERED],
        env=environment(LEASE) | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip

    assert child.returncode == 0, child.stderr
    share, allocator = json.loads(child.stdout)
    assert share == pytest.approx(MOST, abs=1e-5)
    assert allocator == "default"


PLUGIN = """
import jax._src.xla_bridge as xb
from functools import partial
from jax._src import hardware_utils
from jaxlib import xla_client

def initialize():
    # As jax_plugins.xla_cuda12 does by xb.register_plugin, but for the library.
    hardware_utils.has_visible_nvidia_gpu = lambda: True
    xla_client.pjrt_plugin_initialized = lambda name: True
    options = xla_client.generate_pjrt_gpu_plugin_options()
    make = partial(xb.make_pjrt_c_api_client, "cuda", options=options)
    xb.register_backend_factory("cuda", make, priority=500, fail_quietly=False)
"""


def with_a_gpu(folder: Path, lease: int, source: str, daemon: str = "", **more: str) -> Any:
    """Run `source` in a lease with real JAX, which finds a plugin for GPUs beside it."""
    (folder / "jax_plugins" / "xla_cuda12").mkdir(parents=True)
    (folder / "jax_plugins" / "xla_cuda12" / "__init__.py").write_text(PLUGIN)
    variables = environment(lease, daemon) | more
    variables["PYTHONPATH"] += f":{folder}"
    return subprocess.run(
        [python_of("jax"), "-c", source],
        env=variables, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def test_a_lease_too_small_for_jax_ends_the_script_with_what_would_do(tmp_path: Path) -> None:
    """JAX swallows what is raised while its plugins begin, and would compute on the CPU."""
    child = with_a_gpu(tmp_path, 512 * MIB, "import jax; print(jax.devices())")

    assert (child.returncode, child.stdout) == (1, "")
    assert mentions(child.stderr, "LeaseTooSmall", "JAX", "512M", "--mem 896M")


def test_a_lease_too_small_for_jax_is_none_of_the_cpus_business(tmp_path: Path) -> None:
    source = "import jax; print(jax.devices()[0].platform)"
    child = with_a_gpu(tmp_path, 512 * MIB, source, JAX_PLATFORMS="cpu")

    assert (child.returncode, child.stdout) == (0, "cpu\n")


def test_a_lease_that_is_large_enough_gets_as_far_as_the_driver(tmp_path: Path) -> None:
    child = with_a_gpu(tmp_path, LEASE, "import jax; jax.devices()")

    assert "Unable to initialize backend 'cuda'" in child.stderr, "there is no library"
    assert "LeaseTooSmall" not in child.stderr


def test_a_script_that_asks_for_less_is_reported_with_that(tmp_path: Path) -> None:
    hearer = Hearer(tmp_path / "s")
    source = "import os; os.environ['XLA_CLIENT_MEM_FRACTION'] = '0.02'; import jax; jax.devices()"
    with_a_gpu(tmp_path, LEASE, source, daemon=str(tmp_path / "s"))
    hearer.wait(1)
    hearer.close()

    ((_, said),) = [each for each in hearer.heard if each[1].get("state") == "limited"]
    assert said["gpus"] == [{"gpu": "GPU-0", "limit": pytest.approx(0.02 * TOTAL, abs=2 * MIB)}]
