"""How much of a lease is left for a framework's memory pool.

A lease counts all that nvidia-smi shows; a framework's own limit counts its pool alone. The
difference is the CUDA context, the loaded kernels, the workspaces of cuDNN and cuBLAS, and NCCL's
buffers. The table below is where gpulease starts from, before anything was observed on the
machine at hand. It rests on these published figures:

* a context with lazily loaded kernels: 426 MiB under torch 2.10 on an RTX 6000 Ada
  (unsloth-zoo pull request 1053), 274 MiB in 2022 (pytorch pull request 86509), 300 to 400 MiB
  on a V100 (pytorch issue 20532);
* TensorFlow 2.7 with a pool of 512 MiB on an RTX 3090: 419 MiB at its start and 1869 MiB after
  the first batch, kernels loaded eagerly (tensorflow issue 53822);
* NCCL on four A100s: 544 MB for a group of two GPUs, 688 MB for a larger one (nccl issue 964).

Those of TensorFlow lie between the two for lazily loaded kernels: an estimate, not a measurement.
"""

from types import MappingProxyType

MIB = 2**20

OUTSIDE_THE_POOL = MappingProxyType(
    {
        "tensorflow": 700 * MIB,
        "torch": 600 * MIB,
        "jax": 600 * MIB,
        "cupy": 300 * MIB,
    }
)
"""Bytes that one process holds on each GPU beside its pool, by framework."""

COLLECTIVES = 700 * MIB
"""Bytes that NCCL adds on each GPU once a process works on two or more."""

SMALLEST_POOL = 256 * MIB
"""A pool below this holds no useful network; a lease that leaves less is refused."""


def outside_the_pool(framework: str, gpus: int) -> int:
    """Return the bytes that `framework` holds beside its pool, on each of `gpus` GPUs."""
    return OUTSIDE_THE_POOL[framework] + (COLLECTIVES if gpus > 1 else 0)


def pool_limit(framework: str, lease: int, gpus: int) -> int:
    """Return the bytes that the pool of `framework` may have on each GPU; 0 if nothing is left.

    `lease` is in bytes on each GPU, and `gpus` is how many the job has.

    Raises:
        KeyError: for a framework that is not in the table.
    """
    return max(0, lease - outside_the_pool(framework, gpus))


def smallest_lease(framework: str, gpus: int) -> int:
    """Return the fewest bytes on each GPU with which `framework` can do something useful."""
    return outside_the_pool(framework, gpus) + SMALLEST_POOL
