"""What a real ONNX Runtime hands to its C++ in a lease, with the build for CUDA and without a GPU.

The CUDA provider cannot be loaded here. ONNX Runtime reads its options before it tries.
"""

import json
import os
import subprocess
from typing import Any

import pytest

from frameworks.environments import python_of
from goldens import mentions
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead

LEASES = (8192 * MIB, 4096 * MIB)
POOLS = [str(lease - default_overhead("onnxruntime", 2)) for lease in LEASES]

START = """
import glob, importlib.util, json, os, sys, sysconfig

# Before the package, whose import the hook follows.
name = "onnxruntime.capi.onnxruntime_pybind11_state"
(path,) = glob.glob(sysconfig.get_path("platlib") + "/" + name.replace(".", "/") + ".*.so")
spec = importlib.util.spec_from_file_location(name, path)
native = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
handed = []

def recorded(owner, name):
    plain = getattr(owner, name)
    def record(this, *arguments):
        handed.append(arguments[:2])
        return plain(this, [], [], *arguments[2:]) if name == "initialize_session" else None
    setattr(owner, name, record)

for owner, name in [
    (native.InferenceSession, "initialize_session"),
    (native.SessionOptions, "add_provider"),
    (native.SessionOptions, "add_provider_for_devices"),
]:
    recorded(owner, name)
"""
"""Records what reaches C++, below the hook."""

MODEL = """
import onnxruntime
model = os.path.join(onnxruntime.__path__[0], "datasets", "mul_1.onnx")
"""


def run(
    source: str, leases: tuple[int, int] = LEASES, **options: Any
) -> subprocess.CompletedProcess[str]:
    variables = worker_environment(
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        job="j1",
        marker="m",
        gpus=[LeasedGpu(f"GPU-{n}", n, "H100", size, 80 << 30) for n, size in enumerate(leases)],
        simulated=options.get("simulated", False),
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(),
    )
    return subprocess.run(
        [python_of("onnxruntime"), "-c", f"{START}{MODEL}\n{source}"],
        env=variables, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def handed(source: str, **options: Any) -> Any:
    child = run(f"{source}\nprint(json.dumps(handed))", **options)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


CPU = ["CPUExecutionProvider", {}]


@pytest.mark.parametrize(
    ("providers", "options"),
    [
        ("['CUDAExecutionProvider']", {"gpu_mem_limit": POOLS[0]}),
        ("[('CUDAExecutionProvider', {'gpu_mem_limit': 80 << 30})]", {"gpu_mem_limit": POOLS[0]}),
        ("[('CUDAExecutionProvider', {'gpu_mem_limit': 1 << 20})]", {"gpu_mem_limit": str(MIB)}),
        (
            "[('CUDAExecutionProvider', {'device_id': 1})]",
            {"device_id": "1", "gpu_mem_limit": POOLS[1]},
        ),
        (
            "[('CUDAExecutionProvider', {'device_id': 7})]",
            {"device_id": "7", "gpu_mem_limit": POOLS[1]},
        ),
    ],
)
def test_a_session_gets_the_pool_of_its_gpu(providers: str, options: dict[str, str]) -> None:
    source = f"onnxruntime.InferenceSession(model, providers={providers})"

    assert handed(source) == [[["CUDAExecutionProvider"], [options]]]


def test_the_other_providers_keep_their_options_and_a_second_choice_is_limited_too() -> None:
    source = """
names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
trt = {"trt_max_workspace_size": 1}
state = onnxruntime.capi._pybind_state
state.register_tensorrt_plugins_as_custom_ops = lambda *arguments: None
session = onnxruntime.InferenceSession(model, providers=names, provider_options=[trt, {}, {}])
session.set_providers(["CUDAExecutionProvider"])
"""
    limited = {"gpu_mem_limit": POOLS[0]}

    assert handed(source) == [
        [
            ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
            [{"trt_max_workspace_size": "1"}, limited, {}],
        ],
        [["CUDAExecutionProvider"], [limited]],
    ]


def test_a_small_session_leaves_the_next_one_the_pool_of_the_lease() -> None:
    source = """
for size in ({"gpu_mem_limit": 1 << 30}, {}):
    onnxruntime.InferenceSession(model, providers=[("CUDAExecutionProvider", size)])
"""
    found = [options["gpu_mem_limit"] for _, (options,) in handed(source)]

    assert found == [str(1024 * MIB), POOLS[0]]


def test_a_provider_that_is_added_to_the_options_of_a_session_is_limited() -> None:
    source = """
options = onnxruntime.SessionOptions()
options.add_provider("CUDAExecutionProvider", {"device_id": "1"})
options.add_provider("CPUExecutionProvider", {})
class Device:
    ep_name = "CUDAExecutionProvider"
options.add_provider_for_devices([Device()], {})
handed[2] = handed[2][1]
"""
    assert handed(source) == [
        ["CUDAExecutionProvider", {"device_id": "1", "gpu_mem_limit": POOLS[1]}],
        CPU,
        {"gpu_mem_limit": POOLS[0]},
    ]


def test_a_session_on_the_cpu_is_left_alone() -> None:
    source = "onnxruntime.InferenceSession(model, providers=['CPUExecutionProvider'])"

    assert handed(source) == [[["CPUExecutionProvider"], [{}]]]
    assert handed(source, leases=(512 * MIB, 512 * MIB)) == [[["CPUExecutionProvider"], [{}]]]


def test_a_lease_too_small_ends_the_script_and_does_not_compute_on_the_cpu() -> None:
    source = "onnxruntime.InferenceSession(model, providers=['CUDAExecutionProvider'])"
    child = run(source, leases=(512 * MIB, 512 * MIB))

    assert child.returncode == 1
    assert "Falling back" not in child.stdout
    assert mentions(child.stderr, "MemoryError", "ONNX Runtime", "512M", "hint: ", "--mem 2G")


def test_on_simulated_gpus_nothing_of_onnx_runtime_is_touched() -> None:
    source = "onnxruntime.InferenceSession(model, providers=['CUDAExecutionProvider'])"

    assert handed(source, simulated=True) == [[["CUDAExecutionProvider"], [{}]]]
