"""How much of a lease is left for a framework's memory pool.

A lease counts all that nvidia-smi shows; a framework's own limit counts its pool alone. The
difference is the CUDA context, the loaded kernels, the workspaces of cuDNN and cuBLAS, and NCCL's
buffers. The table below is where gpulease starts from, before anything was observed on the
machine at hand; what is observed then takes its place (domain/overhead.py). It rests on these
published figures:

* a context with lazily loaded kernels: 426 MiB under torch 2.10 on an RTX 6000 Ada
  (unsloth-zoo pull request 1053), 274 MiB in 2022 (pytorch pull request 86509), 300 to 400 MiB
  on a V100 (pytorch issue 20532); 320 MiB for a small array in PyCUDA, which has no kernels of its
  own, on a Titan V (pytorch issue 28394);
* with kernels loaded eagerly, as before CUDA 11.7, which came with driver 515: 636 MiB for a small
  tensor in torch (pytorch pull request 86509), 1000 MiB and more (pytorch issues 107667, 28394);
* TensorFlow 2.7 with a pool of 512 MiB on an RTX 3090: 419 MiB at its start and 1869 MiB after
  the first batch, kernels loaded eagerly (tensorflow issue 53822);
* NCCL on four A100s: 544 MB for a group of two GPUs, 688 MB for a larger one (nccl issue 964).

Those of TensorFlow lie between the two for lazily loaded kernels: an estimate, not a measurement.
For CuPy no figure was found. It holds a context and, outside its pool, handles of libraries and
what cuFFT and Thrust take (cupy issue 1295), as the others do, and so it starts where they do.
"""

from typing import Final, NamedTuple

MIB = 2**20

FRAMEWORKS: Final = ("tensorflow", "torch", "jax", "cupy")


class Start(NamedTuple):
    """One line of the starting table: bytes that one process holds beside its pool."""

    framework: str
    beside: int
    model: str = ""
    """What the name of the GPU begins with; "" is any."""
    driver_below: int | None = None
    """For drivers older than this major version; None is any."""


STARTS: Final = (
    # The first line that fits counts. No figure by model was found that differs from the others
    # by more than the kind of GPU differs within itself; what a machine has is learnt there.
    Start("tensorflow", 1900 * MIB, driver_below=515),
    Start("torch", 1000 * MIB, driver_below=515),
    Start("jax", 1000 * MIB, driver_below=515),
    Start("cupy", 1000 * MIB, driver_below=515),
    Start("tensorflow", 700 * MIB),
    Start("torch", 600 * MIB),
    Start("jax", 600 * MIB),
    Start("cupy", 600 * MIB),
)

COLLECTIVES = 700 * MIB
"""Bytes that NCCL adds on each GPU once a process works on two or more."""

SMALLEST_POOL = 256 * MIB
"""A pool below this holds no useful network; a lease that leaves less is refused."""


def outside_the_pool(framework: str, gpus: int, model: str = "", driver: str | None = None) -> int:
    """Return the bytes that `framework` holds beside its pool, on each of `gpus` GPUs.

    `model` is the GPU's name and `driver` its version, None where it is unknown.

    Raises:
        KeyError: for a framework that is not in the table.
    """
    for start in STARTS:
        fits = start.framework == framework and model.startswith(start.model)
        if fits and (start.driver_below is None or _is_older(driver, start.driver_below)):
            return start.beside + (COLLECTIVES if gpus > 1 else 0)
    raise KeyError(framework)


def _is_older(driver: str | None, major: int) -> bool:
    first = (driver or "").partition(".")[0]
    return first.isdecimal() and int(first) < major
