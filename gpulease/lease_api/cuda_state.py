"""Tell whether this process has begun to use its GPUs. Looks only at what is loaded already.

From that moment on a lease comes too late: which GPUs a process sees is settled when CUDA starts
in it (CUDA_VISIBLE_DEVICES is read once, by cuInit), and how much memory a framework takes, when
the framework sets up its devices. And from that moment on the memory is the process's until its
end: no framework gives a CUDA context back.
"""

import ctypes
import os
import sys
from typing import Any

CUDA = "CUDA"
"""What `claimed_by` says where it is not known which framework it was."""
_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: the driver is loaded, and nobody has called cuInit."""


def claimed_by() -> str | None:
    """Return the name of what has begun to use this process's GPUs, or None if nothing has."""
    for name, has_claimed in _FRAMEWORKS.items():
        if has_claimed():
            return name
    return CUDA if _cuda_has_started() else None


def _loaded(module: str, attribute: str) -> Any:
    """Return an attribute of a module that somebody has imported; None where there is none."""
    return getattr(sys.modules.get(module), attribute, None)


def _tensorflow() -> bool:
    # The one eager context of a process; a TF1 session without it shows in CUDA itself.
    context = _loaded("tensorflow.python.eager.context", "_context")
    return bool(getattr(context, "_initialized", False))


def _torch() -> bool:
    # What torch.cuda.is_initialized() looks at, without its look at whether we were forked.
    return bool(_loaded("torch.cuda", "_initialized"))


def _jax() -> bool:
    # JAX makes the backends of all platforms at once, and never again.
    return bool(_loaded("jax._src.xla_bridge", "_backends"))


_FRAMEWORKS = {"TensorFlow": _tensorflow, "PyTorch": _torch, "JAX": _jax}


def _cuda_has_started() -> bool:
    """Ask the driver's own library, if it is loaded; this starts nothing."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        answer = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):
        return False
    return int(answer) != _NOT_INITIALIZED
