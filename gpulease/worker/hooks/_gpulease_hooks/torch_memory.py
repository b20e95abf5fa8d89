"""Shows a script the memory that PyTorch may take, where it asks how much the GPU has.

Programs plan with these figures: Accelerate and Transformers place the layers of a model with
device_map="auto", vLLM sizes its cache as a share of the total, DeepSpeed decides what to offload.
With the figures of the whole GPU they would plan for more than the lease, and fail later. The total
becomes the limit of the pool, and the free memory what is left of it; neither is ever raised.
"""

import functools
import importlib
from typing import Any, Callable

from .replacement import Undo, replace

# Newer names are those of PyTorch 2.10 and later.
FUNCTIONS = (
    ("torch.cuda.memory", "mem_get_info"),
    ("torch.cuda", "mem_get_info"),
    ("torch.accelerator.memory", "get_memory_info"),
    ("torch.accelerator", "get_memory_info"),
)


def hook(torch: Any, limit_of: Callable[[int], "int | None"]) -> Undo:
    """Wrap the functions that tell the memory of a GPU.

    `limit_of` returns the bytes that the pool may have on a device; None for no limit.
    """
    undos = [_hook(torch, module, name, limit_of) for module, name in FUNCTIONS]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def unhooked(function: Any) -> Any:
    """Return PyTorch's own function."""
    return getattr(function, "__wrapped__", function)


def _hook(torch: Any, module: str, name: str, limit_of: Callable[[int], "int | None"]) -> Undo:
    try:
        owner = importlib.import_module(module)
        original = unhooked(getattr(owner, name))
    except (ImportError, AttributeError):
        return lambda: None  # an older PyTorch

    @functools.wraps(original)
    def memory(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        try:
            return _within(torch, found, limit_of, *args, **kwargs)
        except Exception:  # noqa: BLE001  (a failed hook must not end the script)
            return found

    return replace([owner], name, original, memory)


def _within(
    torch: Any,
    found: "tuple[int, int]",
    limit_of: Callable[[int], "int | None"],
    device: Any = None,
    **others: Any,
) -> "tuple[int, int]":
    """Return (free, total) of a device, reduced to its pool."""
    cuda = torch.cuda
    if device is None:
        number = cuda.current_device()
    else:
        number = cuda.memory._get_device_index(device, optional=True)
    limit = limit_of(number)
    if limit is None:
        return found
    free, total = found
    return min(free, max(0, limit - cuda.memory_reserved(number))), min(total, limit)
