"""The default overhead of each framework: its memory on a GPU outside its pool. Pure.

A lease counts all memory that nvidia-smi shows; a framework's own limit counts its pool only. The
difference is the framework's overhead: the CUDA context, loaded kernels, the workspaces of cuDNN
and cuBLAS, and NCCL's buffers. The table of defaults applies until overheads have been observed on
the machine (domain/memory_estimate.py). It is based on these published figures:

* a context with lazily loaded kernels: 426 MiB under torch 2.10 on an RTX 6000 Ada
  (unsloth-zoo pull request 1053), 274 MiB in 2022 (pytorch pull request 86509), 300 to 400 MiB
  on a V100 (pytorch issue 20532); 320 MiB for a small array in PyCUDA, which has no kernels of its
  own, on a Titan V (pytorch issue 28394);
* with kernels loaded eagerly, as before CUDA 11.7, which came with driver 515: 636 MiB for a small
  tensor in torch (pytorch pull request 86509), 1000 MiB and more (pytorch issues 107667, 28394);
* TensorFlow 2.7 with a pool of 512 MiB on an RTX 3090: 419 MiB at its start and 1869 MiB after
  the first batch, kernels loaded eagerly (tensorflow issue 53822);
* NCCL on four A100s: 544 MB for a group of two GPUs, 688 MB for a larger one (nccl issue 964).

The figure for TensorFlow with lazily loaded kernels is an estimate between the two. No figure was
found for CuPy. It has a context and, outside its pool, library handles and the memory of cuFFT and
Thrust (cupy issue 1295), like the others, and so it has the same default; RMM, ONNX Runtime and
PaddlePaddle likewise.
"""

import math
from typing import Final, NamedTuple

MIB = 2**20

_OTHERS: Final = ("torch", "jax", "cupy", "rmm", "onnxruntime", "paddle")
FRAMEWORKS: Final = ("tensorflow", *_OTHERS)


class OverheadDefault(NamedTuple):
    """One default: the bytes of one process beside its pool."""

    framework: str
    overhead: int
    model: str = ""
    """A prefix of the GPU's name; "" for any."""
    driver_below: int | None = None
    """For drivers older than this major version; None for any."""


OVERHEAD_DEFAULTS: Final = (
    # The first match counts. Published figures for one model vary as much as those for different
    # models, so there are no defaults by model; overheads are observed on each machine.
    OverheadDefault("tensorflow", 1900 * MIB, driver_below=515),
    *(OverheadDefault(each, 1000 * MIB, driver_below=515) for each in _OTHERS),
    OverheadDefault("tensorflow", 700 * MIB),
    *(OverheadDefault(each, 600 * MIB) for each in _OTHERS),
)

COLLECTIVES = 700 * MIB
"""Bytes that NCCL adds on each GPU when a process uses two or more."""

SMALLEST_POOL = 256 * MIB
"""Bytes. A smaller pool holds no useful model; a lease that leaves less is refused."""


def default_overhead(framework: str, gpus: int, model: str = "", driver: str | None = None) -> int:
    """Return the default overhead of `framework` in bytes, on each of `gpus` GPUs.

    `model` is the GPU's name, `driver` the driver's version or None if unknown.

    Raises:
        KeyError: the framework is not in the table.
    """
    major = (driver or "").partition(".")[0]
    version = int(major) if major.isdecimal() else math.inf
    for default in OVERHEAD_DEFAULTS:
        matches = default.framework == framework and model.startswith(default.model)
        if matches and (default.driver_below is None or version < default.driver_below):
            return default.overhead + (COLLECTIVES if gpus > 1 else 0)
    raise KeyError(framework)
