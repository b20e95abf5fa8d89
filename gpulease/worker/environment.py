"""Turn a lease into the environment of its job. Pure: the same arguments, the same variables.

Runs in the daemon, on the caller's variables; knows nothing of processes or of the daemon. What
the variables mean to a user is in docs/frameworks.md. The variable that carries the lease to the
hooks is read by hooks/_gpulease_hooks/lease.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from gpulease.worker.overhead import (
    OUTSIDE_THE_POOL,
    outside_the_pool,
    pool_limit,
    smallest_lease,
)

HOOKS: Final = Path(__file__).parent / "hooks"
HOOK_VARIABLE: Final = "GPULEASE_HOOK"

_MILLION: Final = 10**6  # six decimals: steps of 84 KiB on a card of 80 GiB
_JAX_FRACTION: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # read by every version of jaxlib
_JAX_NEW_FRACTION: Final = "XLA_CLIENT_MEM_FRACTION"  # by new ones; both at once are an error
_CUPY_LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"

# With these a framework takes its memory outside the pool that is limited, so a value that the
# caller exported long ago would leave the lease by accident. What follows is the values that
# do no harm, and stay.
_LEAVES_THE_LEASE: Final[Mapping[str, frozenset[str]]] = {
    "TF_FORCE_UNIFIED_MEMORY": frozenset({"", "0", "false"}),
    "TF_GPU_ALLOCATOR": frozenset({""}),
    "XLA_PYTHON_CLIENT_ALLOCATOR": frozenset({"", "default", "bfc"}),
}


@dataclass(frozen=True, slots=True)
class LeasedGpu:
    """One GPU of a lease; sizes in bytes."""

    uuid: str
    index: int
    name: str
    memory: int
    """What the job may hold on it."""
    total: int
    """Its capacity."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the user asked of the frameworks, so that no script need be edited for it."""

    visible: Literal["uuid", "index"] = "uuid"
    growth: bool = False
    split: int = 1
    threads: int | None = None
    """CPU threads of every pool that is not given its own number below."""
    inter_op: int | None = None
    intra_op: int | None = None
    log_placement: bool = False
    soft_placement: bool = False
    strict: bool = False
    """End the job with status 97 rather than run it with a hook missing."""


def worker_environment(
    base: Mapping[str, str],
    *,
    job: str,
    marker: str,
    gpus: Sequence[LeasedGpu],
    simulated: bool,
    driver: str | None,
    hooks: Path,
    options: WorkerOptions,
) -> dict[str, str]:
    """Return the caller's variables `base` as the job shall find them.

    `marker` is what its processes are recognised by; `hooks` is the folder that goes first on
    PYTHONPATH; `driver` is the version of the GPUs' driver, None where it is unknown.

    Raises:
        ValueError: if there is no GPU, or a size or a number of devices makes no sense.
    """
    _check(gpus, options)
    visible = _visible_devices(gpus, simulated, options)
    environment = _without_ways_out(base)
    environment |= {
        "CUDA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GPULEASE_JOB": job,
        "GPULEASE_WORKER": marker,
        "GPULEASE_MEMORY": str(min(gpu.memory for gpu in gpus)),
        "GPULEASE_MEMORY_FRACTION": _decimal(_fraction(gpus)),
        HOOK_VARIABLE: _for_the_hooks(job, visible, gpus, simulated, driver, options),
        "PYTHONPATH": _python_path(base.get("PYTHONPATH", ""), hooks),
    }
    # The default since CUDA 12.2, worth hundreds of MiB before; a caller who wants EAGER has it.
    environment.setdefault("CUDA_MODULE_LOADING", "LAZY")
    environment |= _jax(base, gpus) | _cupy(base, gpus) | _asked_for(options)
    environment.pop(_JAX_NEW_FRACTION, None)
    return environment


def _check(gpus: Sequence[LeasedGpu], options: WorkerOptions) -> None:
    if not gpus:
        raise ValueError("a lease has at least one GPU")
    if any(not 0 < gpu.memory <= gpu.total for gpu in gpus):
        raise ValueError("a lease is larger than nothing, and no larger than its GPU")
    counts = (options.split, options.threads, options.inter_op, options.intra_op)
    if any(count is not None and count < 1 for count in counts):
        raise ValueError("there is at least one logical GPU for each GPU, and one thread")


def _visible_devices(gpus: Sequence[LeasedGpu], simulated: bool, options: WorkerOptions) -> str:
    # The index of a simulated GPU may be that of a real one, which nobody leased; its UUID is
    # unknown to every driver, and so shows the job no GPU at all.
    by_index = options.visible == "index" and not simulated
    # A MIG device has no index that CUDA would take: that is of the GPU that it is a part of.
    return ",".join(
        str(gpu.index) if by_index and not gpu.uuid.startswith("MIG-") else gpu.uuid for gpu in gpus
    )


def _without_ways_out(base: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in base.items()
        if value.strip().lower() in _LEAVES_THE_LEASE.get(name, (value.strip().lower(),))
    }


def _python_path(callers: str, hooks: Path) -> str:
    # An empty entry means the working directory, so it is kept where it stands; but a variable
    # that is empty as a whole means nothing at all, and must not become such an entry.
    entries = callers.split(":") if callers else []
    return ":".join([str(hooks), *(entry for entry in entries if entry != str(hooks))])


def _fraction(gpus: Sequence[LeasedGpu], framework: str | None = None) -> int:
    """Return the smallest share over `gpus` in millionths, of the lease or of a pool in it."""
    shares = (
        (gpu.memory if framework is None else pool_limit(framework, gpu.memory, len(gpus)))
        * _MILLION
        // gpu.total
        for gpu in gpus
    )
    return min(shares)


def _decimal(millionths: int) -> str:
    return f"{millionths // _MILLION}.{millionths % _MILLION:06d}"


def _jax(base: Mapping[str, str], gpus: Sequence[LeasedGpu]) -> dict[str, str]:
    # 0 would not be a limit of nothing, so a lease too small for JAX gets the smallest share.
    shares = [max(1, _fraction(gpus, "jax"))]
    for name in (_JAX_FRACTION, _JAX_NEW_FRACTION):
        shares.extend(_millionths(base.get(name, "")))
    return {_JAX_FRACTION: _decimal(min(shares))}


def _millionths(text: str) -> list[int]:
    """Return the share that `text` asks for, or nothing if it asks for none that makes sense."""
    try:
        share = int(float(text) * _MILLION)
    except (ValueError, OverflowError):
        return []
    return [share] if share > 0 else []


def _cupy(base: Mapping[str, str], gpus: Sequence[LeasedGpu]) -> dict[str, str]:
    """Return CuPy's limit, one number for every device; 0 would mean none, so 1 is the least."""
    limits = [max(1, min(pool_limit("cupy", gpu.memory, len(gpus)) for gpu in gpus))]
    asked = base.get(_CUPY_LIMIT, "").strip()
    if asked.endswith("%"):
        smallest = min(gpu.total for gpu in gpus)
        limits.extend(share * smallest // (100 * _MILLION) for share in _millionths(asked[:-1]))
    elif asked.isdecimal():
        limits.append(int(asked))
    return {_CUPY_LIMIT: str(min(limit for limit in limits if limit > 0))}


def _asked_for(options: WorkerOptions) -> dict[str, str]:
    """Return what the options mean to processes that the hooks do not reach."""
    variables: dict[str, str] = {}
    if options.threads is not None:
        variables["OMP_NUM_THREADS"] = str(options.threads)
    for name, count in (
        ("TF_NUM_INTEROP_THREADS", options.inter_op or options.threads),
        ("TF_NUM_INTRAOP_THREADS", options.intra_op or options.threads),
    ):
        if count is not None:
            variables[name] = str(count)
    if options.growth:
        variables["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.strict:
        variables["GPULEASE_STRICT"] = "1"
    return variables


def _for_the_hooks(
    job: str,
    visible: str,
    gpus: Sequence[LeasedGpu],
    simulated: bool,
    driver: str | None,
    options: WorkerOptions,
) -> str:
    lease = {
        "job": job,
        "driver": driver,
        "simulated": simulated,
        "visible": visible,
        "gpus": [
            asdict(gpu)
            | {
                "pools": {
                    name: pool_limit(name, gpu.memory, len(gpus)) for name in OUTSIDE_THE_POOL
                }
            }
            for gpu in gpus
        ],
        "outside": {name: outside_the_pool(name, len(gpus)) for name in OUTSIDE_THE_POOL},
        "smallest": {name: smallest_lease(name, len(gpus)) for name in OUTSIDE_THE_POOL},
        "options": {
            "growth": options.growth,
            "split": options.split,
            "inter_op": options.inter_op or options.threads,
            "intra_op": options.intra_op or options.threads,
            "log_placement": options.log_placement,
            "soft_placement": options.soft_placement,
        },
    }
    # Compact on purpose: sitecustomize looks for `"visible":"..."` without parsing.
    return json.dumps(lease, separators=(",", ":"), sort_keys=True)
