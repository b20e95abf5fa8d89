"""Turn a lease into the environment of its job. Pure: the same arguments, the same variables.

Runs in the daemon, on the caller's variables; knows nothing of processes or of the daemon. What
the variables mean to a user is in docs/frameworks.md. The variable that carries the lease to the
hooks is read by hooks/_gpulease_hooks/lease.py.

How much of a lease is left for a framework's memory pool.

A lease counts all that nvidia-smi shows; a framework's own limit counts its pool alone. The
difference is the CUDA context, the loaded kernels, the workspaces of cuDNN and cuBLAS, and NCCL's
buffers. The table below is where gpulease starts from, before anything was observed on the
machine at hand; what is observed then takes its place (domain/memory_estimate.py). It rests on
these published figures:

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

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from gpulease.units import format_size, round_up_size

MIB = 2**20

FRAMEWORKS: Final = ("tensorflow", "torch", "jax", "cupy")


class OverheadDefault(NamedTuple):
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
    OverheadDefault("tensorflow", 1900 * MIB, driver_below=515),
    OverheadDefault("torch", 1000 * MIB, driver_below=515),
    OverheadDefault("jax", 1000 * MIB, driver_below=515),
    OverheadDefault("cupy", 1000 * MIB, driver_below=515),
    OverheadDefault("tensorflow", 700 * MIB),
    OverheadDefault("torch", 600 * MIB),
    OverheadDefault("jax", 600 * MIB),
    OverheadDefault("cupy", 600 * MIB),
)

COLLECTIVES = 700 * MIB
"""Bytes that NCCL adds on each GPU once a process works on two or more."""

SMALLEST_POOL = 256 * MIB
"""A pool below this holds no useful network; a lease that leaves less is refused."""


def default_overhead(framework: str, gpus: int, model: str = "", driver: str | None = None) -> int:
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
    "PYTORCH_NO_CUDA_MEMORY_CACHING": frozenset(),  # whatever it holds (forceUncachedAllocator)
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
    """All that CUDA shows a program of it: its capacity, or what the driver limits the job to."""


OverheadOf = Callable[[str, LeasedGpu], int]
"""Tells how many bytes a framework takes beside its pool on a GPU of the lease."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the user asked of the frameworks, so that no script need be edited for it."""

    visible: Literal["uuid", "index"] = "uuid"
    growth: bool = False
    split: int = 1
    inter_op: int | None = None
    intra_op: int | None = None
    log_placement: bool = False
    soft_placement: bool = False
    strict: bool = False
    """End the job with status 97 rather than run it with a hook missing."""


def worker_environment(  # noqa: PLR0913  a lease, and all that is known around it
    base: Mapping[str, str],
    *,
    job: str,
    marker: str,
    gpus: Sequence[LeasedGpu],
    simulated: bool,
    driver: str | None,
    hooks: Path,
    options: WorkerOptions,
    beside: OverheadOf | None = None,
    daemon: str = "",
    alone: bool = False,
) -> dict[str, str]:
    """Return the caller's variables `base` as the job shall find them.

    `marker` is what its processes are recognised by; `hooks` is the folder that goes first on
    PYTHONPATH; `driver` is the version of the GPUs' driver, None where it is unknown; `beside` is
    what was learnt here of frameworks, None: what the table says; `daemon` is the socket on which
    the hooks may tell what they see; `alone` says that no other GPU can be opened.

    Raises:
        ValueError: if there is no GPU, or a size or a number of devices makes no sense.
    """
    _check(gpus, options)
    taken = _taken(gpus, driver, beside)
    pools = {
        framework: [max(0, gpu.memory - each) for gpu, each in zip(gpus, sizes, strict=True)]
        for framework, sizes in taken.items()
    }
    visible = _visible_devices(gpus, simulated, options, alone)
    environment = _without_ways_out(base)
    environment |= {
        "CUDA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GPULEASE_JOB": job,
        "GPULEASE_WORKER": marker,
        "GPULEASE_MEMORY": str(min(gpu.memory for gpu in gpus)),
        "GPULEASE_MEMORY_FRACTION": _decimal(_share([(gpu.memory, gpu.total) for gpu in gpus])),
        HOOK_VARIABLE: _for_the_hooks(
            job, visible, gpus, taken, pools, simulated, driver, options, daemon
        ),
        "PYTHONPATH": _python_path(base.get("PYTHONPATH", ""), hooks),
    }
    # The default since CUDA 12.2, worth hundreds of MiB before; a caller who wants EAGER has it.
    environment.setdefault("CUDA_MODULE_LOADING", "LAZY")
    environment |= _jax(base, gpus, pools) | _cupy(base, gpus, pools) | _asked_for(options)
    environment.pop(_JAX_NEW_FRACTION, None)
    return environment


def _check(gpus: Sequence[LeasedGpu], options: WorkerOptions) -> None:
    if not gpus:
        raise ValueError("a lease has at least one GPU")
    if any(not 0 < gpu.memory <= gpu.total for gpu in gpus):
        raise ValueError("a lease is larger than nothing, and no larger than its GPU")
    counts = (options.split, options.inter_op, options.intra_op)
    if any(count is not None and count < 1 for count in counts):
        raise ValueError("there is at least one logical GPU for each GPU, and one thread")


def _visible_devices(
    gpus: Sequence[LeasedGpu], simulated: bool, options: WorkerOptions, alone: bool
) -> str:
    # The index of a simulated GPU may be that of a real one, which nobody leased; its UUID is
    # unknown to every driver, and so shows the job no GPU at all.
    by_index = options.visible == "index" and not simulated
    # CUDA counts the GPUs that it can open, from 0: where device rules close the others, the
    # number that NVML knows a GPU by is that of none, or of another (deepops#1102).
    indices = sorted({gpu.index for gpu in gpus})
    numbers = {index: indices.index(index) if alone else index for index in indices}
    # A MIG device has no index that CUDA would take: that is of the GPU that it is a part of.
    return ",".join(
        str(numbers[gpu.index]) if by_index and not gpu.uuid.startswith("MIG-") else gpu.uuid
        for gpu in gpus
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


_Sizes = dict[str, list[int]]
"""By framework, bytes on each GPU of the lease, in its order."""


def _taken(gpus: Sequence[LeasedGpu], driver: str | None, beside: OverheadOf | None) -> _Sizes:
    """Return what each framework takes beside its pool."""

    def start(framework: str, gpu: LeasedGpu) -> int:
        return default_overhead(framework, len(gpus), gpu.name, driver)

    tell = beside or start
    return {framework: [tell(framework, gpu) for gpu in gpus] for framework in FRAMEWORKS}


def _share(parts: Sequence[tuple[int, int]]) -> int:
    """Return the smallest of parts, each of its whole, in millionths."""
    return min(part * _MILLION // whole for part, whole in parts)


def _decimal(millionths: int) -> str:
    return f"{millionths // _MILLION}.{millionths % _MILLION:06d}"


def _jax(base: Mapping[str, str], gpus: Sequence[LeasedGpu], pools: _Sizes) -> dict[str, str]:
    # 0 would not be a limit of nothing, so a lease too small for JAX gets the smallest share.
    totals = [gpu.total for gpu in gpus]
    shares = [max(1, _share(list(zip(pools["jax"], totals, strict=True))))]
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


def _cupy(base: Mapping[str, str], gpus: Sequence[LeasedGpu], pools: _Sizes) -> dict[str, str]:
    """Return CuPy's limit, one number for every device; 0 would mean none, so 1 is the least."""
    limits = [max(1, min(pools["cupy"]))]
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
    for name, count in (
        ("TF_NUM_INTEROP_THREADS", options.inter_op),
        ("TF_NUM_INTRAOP_THREADS", options.intra_op),
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
    taken: _Sizes,
    pools: _Sizes,
    simulated: bool,
    driver: str | None,
    options: WorkerOptions,
    daemon: str,
) -> str:
    smallest = {name: max(sizes) + SMALLEST_POOL for name, sizes in taken.items()}
    lease = {
        "job": job,
        "daemon": daemon,
        "driver": driver,
        "simulated": simulated,
        "visible": visible,
        "gpus": [
            asdict(gpu) | {"pools": {name: limits[place] for name, limits in pools.items()}}
            for place, gpu in enumerate(gpus)
        ],
        "outside": {name: max(sizes) for name, sizes in taken.items()},
        "smallest": smallest,
        "advised": {name: format_size(round_up_size(size)) for name, size in smallest.items()},
        "options": {
            "growth": options.growth,
            "split": options.split,
            "inter_op": options.inter_op,
            "intra_op": options.intra_op,
            "log_placement": options.log_placement,
            "soft_placement": options.soft_placement,
        },
    }
    # Compact on purpose: sitecustomize looks for `"visible":"..."` without parsing.
    return json.dumps(lease, separators=(",", ":"), sort_keys=True)
