"""Runs a script with two faked GPUs: `python torch_stand_in.py script.py`, by any PyTorch.

PyTorch's own initialisation of CUDA runs, and what it would hand to C++ is written to the folder in
GPULEASE_HANDED when the process ends. Tensors for a GPU are created on the CPU instead: a mode
takes the place of C++ below the functions of torch, and begins CUDA where C++ would.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TOTALS = [80000 << 20, 24000 << 20]
at = [0]
handed: dict[str, list[Any]] = {"fractions": [], "devices": []}


def _gpus() -> list[int]:
    """Return the places of the GPUs that CUDA would show, in its order."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(each.removeprefix("GPU-")) for each in named if each.startswith("GPU-")]


def _set_device(device: int) -> None:
    at[0] = device


def _fake_cuda(torch: Any) -> None:
    c = torch._C
    c._cuda_getDeviceCount = lambda: len(_gpus())
    c._cuda_init = lambda: None
    c._cuda_getDevice = lambda: at[0]
    c._cuda_setDevice = _set_device
    c._cuda_hasPrimaryContext = lambda device: True
    c._cuda_emptyCache = lambda: None
    c._cuda_setMemoryFraction = lambda share, device: handed["fractions"].append(
        [_gpus()[device], share * TOTALS[_gpus()[device]]]
    )
    torch.cuda.device_count = lambda: len(_gpus())
    torch.cuda._cudart = SimpleNamespace(cudaMemGetInfo=lambda device: (0, TOTALS[_gpus()[device]]))
    torch.cuda._queued_calls[:] = [
        each for each in torch.cuda._queued_calls if "_check" not in each[0].__name__
    ]
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        total_memory=TOTALS[_gpus()[torch.device("cuda", device).index]], multi_processor_count=1
    )
    torch.cuda.default_generators = (torch.Generator(), torch.Generator())
    c._accelerator_getDeviceIndex = lambda: at[0]
    c._accelerator_setDeviceIndex = _set_device
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend: begin("gloo")
    torch.Tensor.pin_memory = lambda self, device=None: self


def _mode(torch: Any) -> Any:
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        if not isinstance(value, (str, torch.device)) or not str(value).startswith("cuda"):
            return value
        torch.cuda._lazy_init()  # as C++ does at the first use of the GPU
        index = torch.device(value).index
        handed["devices"].append(_gpus()[at[0] if index is None else index])
        return torch.device("cpu")

    class CpuForCuda(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.device:
                return function(*args, **(kwargs or {}))
            if function is torch.Tensor.cuda:
                function, args = torch.Tensor.to, (args[0], "cuda")
            args = tuple(map(on_cpu, args))
            return function(*args, **{name: on_cpu(each) for name, each in (kwargs or {}).items()})

    return CpuForCuda()


def _run(script: str) -> "str | None":
    """Run a script, and return the error that ends it."""
    try:
        runpy.run_path(script, run_name="__main__")
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    import torch
    import torch.distributed

    _fake_cuda(torch)
    with _mode(torch):
        found = {"error": _run(sys.argv.pop(1)), **handed}
    Path(os.environ["GPULEASE_HANDED"], str(os.getpid())).write_text(json.dumps(found))
    os._exit(0)  # what the script left open would look for a GPU
