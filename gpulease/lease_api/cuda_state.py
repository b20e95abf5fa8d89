"""Whether this process has started to use its GPUs. Looks at loaded modules only.

After that a lease comes too late: CUDA reads CUDA_VISIBLE_DEVICES once, in cuInit, and a framework
sets the size of its pool when it sets up its devices. And the memory stays with the process until
its end: no framework destroys its CUDA context.
"""

import ctypes
import os
import sys
from typing import Any

CUDA = "CUDA"
"""What `claimed_by` returns if the framework is unknown."""
_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: the driver is loaded, and cuInit has not been called."""


def claimed_by() -> str | None:
    """Return what has started to use the GPUs of this process, None if nothing has."""
    # The eager context of the process; a TF1 session has none, and shows in CUDA itself.
    context = _loaded("tensorflow.python.eager.context", "_context")
    if getattr(context, "_initialized", False):
        return "TensorFlow"
    # What torch.cuda.is_initialized() reads, without its check for a fork.
    if _loaded("torch.cuda", "_initialized"):
        return "PyTorch"
    # JAX creates the backends of all platforms at once.
    if _loaded("jax._src.xla_bridge", "_backends"):
        return "JAX"
    return CUDA if _cuda_has_started() else None


def _loaded(module: str, attribute: str) -> Any:
    """Return an attribute of a module that is already imported; None if there is none."""
    return getattr(sys.modules.get(module), attribute, None)


def _cuda_has_started() -> bool:
    """Ask the driver's library, if it is loaded; this starts nothing."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        answer = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):
        return False
    return int(answer) != _NOT_INITIALIZED
