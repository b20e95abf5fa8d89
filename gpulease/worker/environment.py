"""Turns a lease into the environment of its job, and computes the pool limits of frameworks.

Pure. Runs in the daemon on the caller's variables; knows nothing of processes or the daemon.
docs/frameworks.md explains the variables to users. hooks/_gpulease_hooks/lease.py reads the
variable that carries the lease to the hooks.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gpulease.units import format_size, round_up_size
from gpulease.worker.overhead import FRAMEWORKS, MIB, SMALLEST_POOL, default_overhead

HOOKS: Final = Path(__file__).parent / "hooks"
HOOK_VARIABLE: Final = "GPULEASE_HOOK"

# How launchers tell a process the number of ranks on its machine. A value from before the job is
# that of a launcher that started the job, and does not count its processes.
_RANKS: Final = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)

_MILLION: Final = 10**6  # six decimals: steps of 84 KiB on a card of 80 GiB
# XLA_FLAGS is not among them: a TensorFlow that does not know a flag there aborts (1.15 does), so
# the hook in JAX adds its flag. Nor is PYTHONHASHSEED: frameworks do not depend on it.
_CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS: Final = (":4096:8", ":16:8")
_DETERMINISTIC: Final[Mapping[str, str]] = {
    "TF_DETERMINISTIC_OPS": "1",  # from 2.1 on
    "TF_CUDNN_DETERMINISTIC": "1",  # from 1.14 on
    _CUBLAS: _DETERMINISTIC_CUBLAS[0],
}
_THREADS: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_JAX_FRACTION: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # read by every version of jaxlib
_JAX_NEW_FRACTION: Final = "XLA_CLIENT_MEM_FRACTION"  # read by new ones; both are an error
_CUPY_LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"
_PADDLE_LIMIT: Final = "FLAGS_gpu_memory_limit_mb"

# With these variables a framework allocates outside the pool that is limited, so a value exported
# long ago would exceed the lease by accident. The values listed are harmless and are kept.
_UNLIMITED: Final[Mapping[str, frozenset[str]]] = {
    "TF_FORCE_UNIFIED_MEMORY": frozenset({"", "0", "false"}),
    "TF_GPU_ALLOCATOR": frozenset({""}),
    "XLA_PYTHON_CLIENT_ALLOCATOR": frozenset({"", "default", "bfc"}),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": frozenset(),  # any value counts (forceUncachedAllocator)
}


@dataclass(frozen=True, slots=True)
class LeasedGpu:
    """One GPU of a lease; sizes in bytes."""

    uuid: str
    index: int
    name: str
    memory: int
    """What the job may use on it."""
    total: int
    """The total that CUDA reports to the job: the capacity, or the driver's limit for the job."""
    place: int | None = None
    """Its number among the GPUs of the job; None: as in the list of GPUs."""
    whole: int | None = None
    """What all processes of the job may use on it; None: `memory`, of which it may be more."""
    guaranteed: int | None = None
    """What the job keeps when others need memory; None: all of `memory`."""


OverheadOf = Callable[[str, LeasedGpu], int]
"""Returns the overhead of a framework on a GPU of the lease, in bytes."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The user's options for frameworks, which apply without editing the script."""

    visible: Literal["uuid", "index"] = "uuid"
    growth: bool = False
    split: int = 1
    inter_op_threads: int | None = None
    intra_op_threads: int | None = None
    log_placement: bool = False
    soft_placement: bool = False
    strict: bool = False
    """End the job with status 97 if a hook fails."""
    split_sizes: Sequence[int] = ()
    """Bytes of each logical GPU on every leased GPU; empty: `split` equal ones."""
    deterministic: bool = False
    """Frameworks use deterministic operations."""
    omp_threads: int | None = None
    processes: int | None = None
    """Divide the memory equally between this many processes."""


def worker_environment(  # noqa: PLR0913  a lease and its context
    base: Mapping[str, str],
    *,
    job: str,
    marker: str,
    gpus: Sequence[LeasedGpu],
    simulated: bool,
    driver: str | None,
    hooks: Path,
    options: WorkerOptions,
    overhead_of: OverheadOf | None = None,
    daemon: str = "",
    alone: bool = False,
    ledger: str = "",
    cpus: int | None = None,
) -> dict[str, str]:
    """Return the environment of a job, based on the caller's variables `base`.

    Args:
        marker: identifies the processes of the job.
        driver: the version of the GPUs' driver; None if unknown.
        hooks: the directory that goes first on PYTHONPATH.
        overhead_of: the overheads observed on this machine; None for the defaults.
        daemon: the socket for reports of the hooks; "" for none.
        alone: whether device rules keep the job from opening any other GPU.
        ledger: the file by which the processes of the job share the lease; "" for none.
        cpus: the cores that the job leases; None for none.

    Raises:
        ValueError: there is no GPU, or a size or a number of devices is invalid.
    """
    _check(gpus, options)

    def default(framework: str, gpu: LeasedGpu) -> int:
        return default_overhead(framework, len(gpus), gpu.name, driver)

    overhead = overhead_of or default
    overheads = {each: [overhead(each, gpu) for gpu in gpus] for each in FRAMEWORKS}
    pools = _pools(gpus, overheads, options.processes or 1)
    visible = _visible_devices(gpus, simulated, options, alone)
    kept = {
        name: value
        for name, value in base.items()
        if name not in _UNLIMITED or value.strip().lower() in _UNLIMITED[name]
    }
    path = [each for each in kept.get("PYTHONPATH", "").split(":") if each != str(hooks)]
    # LAZY is the default since CUDA 12.2; it saves hundreds of MiB before. A caller may set EAGER.
    environment = {"CUDA_MODULE_LOADING": "LAZY", **kept}
    environment |= {
        "CUDA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GPULEASE_JOB": job,
        "GPULEASE_WORKER": marker,
        "GPULEASE_MEMORY": str(min(gpu.memory for gpu in gpus)),
        "GPULEASE_MEMORY_GUARANTEED": str(min(gpu.guaranteed or gpu.memory for gpu in gpus)),
        "GPULEASE_MEMORY_FRACTION": _decimal(_fraction([(gpu.memory, gpu.total) for gpu in gpus])),
        HOOK_VARIABLE: _for_the_hooks(
            {
                "job": job,
                "daemon": daemon,
                "driver": driver,
                "simulated": simulated,
                "visible": visible,
                "ledger": ledger,
                "ranks": {name: base.get(name) for name in _RANKS},
            },
            gpus,
            overheads,
            pools,
            options,
        ),
        # An empty entry means the working directory; an empty variable has no meaning.
        "PYTHONPATH": ":".join([str(hooks), *(path if kept.get("PYTHONPATH") else ())]),
    }
    environment |= _jax(base, gpus, pools) | _cupy(base, gpus, pools)
    environment |= _paddle(base, pools) | _for_options(base, options)
    environment |= _for_cores(base, cpus, options)
    environment.pop(_JAX_NEW_FRACTION, None)
    return environment


def _check(gpus: Sequence[LeasedGpu], options: WorkerOptions) -> None:
    if not gpus:
        raise ValueError("a lease has at least one GPU")
    if any(not 0 < gpu.memory <= gpu.total for gpu in gpus):
        raise ValueError("a lease is more than 0 bytes and at most the size of its GPU")
    counts = (options.split, options.inter_op_threads, options.intra_op_threads, options.processes)
    if any(count is not None and count < 1 for count in counts):
        raise ValueError("the numbers of logical GPUs, threads and processes are at least 1")


def _visible_devices(
    gpus: Sequence[LeasedGpu], simulated: bool, options: WorkerOptions, alone: bool
) -> str:
    # The index of a simulated GPU may be that of a real one, which is not leased. Its UUID is
    # unknown to any driver, so the job sees no GPU.
    by_index = options.visible == "index" and not simulated
    # CUDA numbers the GPUs that it can open, from 0. With device rules for the others, these are
    # not NVML's indices (deepops#1102).
    indices = sorted({gpu.index for gpu in gpus})
    numbers = {index: indices.index(index) if alone else index for index in indices}
    # CUDA does not accept an index for a MIG device.
    return ",".join(
        str(numbers[gpu.index]) if by_index and not gpu.uuid.startswith("MIG-") else gpu.uuid
        for gpu in gpus
    )


_Sizes = dict[str, list[int]]
"""By framework, bytes on each GPU of the lease, in its order."""


def _pools(gpus: Sequence[LeasedGpu], overheads: _Sizes, processes: int) -> _Sizes:
    """Return the pool limit of each framework: its part of the lease less the overhead.

    With several GPUs, each is shared by some of the processes.
    """
    on_each = -(-processes // len(gpus))
    return {
        framework: [
            max(0, min(gpu.memory, (gpu.whole or gpu.memory) // on_each) - each)
            for gpu, each in zip(gpus, sizes, strict=True)
        ]
        for framework, sizes in overheads.items()
    }


def _fraction(parts: Sequence[tuple[int, int]]) -> int:
    """Return the smallest ratio of the pairs (part, whole), in millionths."""
    return min(part * _MILLION // whole for part, whole in parts)


def _decimal(millionths: int) -> str:
    return f"{millionths // _MILLION}.{millionths % _MILLION:06d}"


def _jax(base: Mapping[str, str], gpus: Sequence[LeasedGpu], pools: _Sizes) -> dict[str, str]:
    # 0 would mean no limit, so a lease too small for JAX gets the smallest fraction.
    totals = [gpu.total for gpu in gpus]
    fractions = [max(1, _fraction(list(zip(pools["jax"], totals, strict=True))))]
    for name in (_JAX_FRACTION, _JAX_NEW_FRACTION):
        fractions.extend(_millionths(base.get(name, "")))
    return {_JAX_FRACTION: _decimal(min(fractions))}


def _millionths(text: str) -> list[int]:
    """Return the fraction in `text` in millionths; nothing if it is not a positive number."""
    try:
        fraction = int(float(text) * _MILLION)
    except (ValueError, OverflowError):
        return []
    return [fraction] if fraction > 0 else []


def _cupy(base: Mapping[str, str], gpus: Sequence[LeasedGpu], pools: _Sizes) -> dict[str, str]:
    """Return CuPy's limit in bytes for every device; at least 1, since 0 means no limit."""
    limits = [max(1, min(pools["cupy"]))]
    asked = base.get(_CUPY_LIMIT, "").strip()
    if asked.endswith("%"):
        smallest = min(gpu.total for gpu in gpus)
        limits.extend(
            fraction * smallest // (100 * _MILLION) for fraction in _millionths(asked[:-1])
        )
    elif asked.isdecimal():
        limits.append(int(asked))
    return {_CUPY_LIMIT: str(min(limit for limit in limits if limit > 0))}


def _paddle(base: Mapping[str, str], pools: _Sizes) -> dict[str, str]:
    """Return PaddlePaddle's limit in MiB for every device; at least 1, since 0 means no limit."""
    limit = max(1, min(pools["paddle"]) // MIB)
    asked = base.get(_PADDLE_LIMIT, "").strip()
    if asked.isdecimal() and int(asked) > 0:
        limit = min(limit, int(asked))
    return {_PADDLE_LIMIT: str(limit)}


def _for_options(base: Mapping[str, str], options: WorkerOptions) -> dict[str, str]:
    """Return the variables of the options, for processes without hooks."""
    variables: dict[str, str] = {}
    if options.omp_threads is not None:
        variables |= dict.fromkeys(_THREADS, str(options.omp_threads))
    if options.deterministic:
        variables |= _DETERMINISTIC
        if base.get(_CUBLAS) in _DETERMINISTIC_CUBLAS:
            variables[_CUBLAS] = base[_CUBLAS]
    for name, count in (
        ("TF_NUM_INTEROP_THREADS", options.inter_op_threads),
        ("TF_NUM_INTRAOP_THREADS", options.intra_op_threads),
    ):
        if count is not None:
            variables[name] = str(count)
    if options.growth:
        variables["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.strict:
        variables["GPULEASE_STRICT"] = "1"
    return variables


def _for_cores(base: Mapping[str, str], cpus: int | None, options: WorkerOptions) -> dict[str, str]:
    """Return how many threads each process starts on leased cores, unless the user said that.

    TensorFlow, PyTorch, JAX, OpenBLAS and MKL count the CPUs that they may run on, and need none of
    this. numexpr counts those of the machine; several processes of a job would each start threads
    for all of its cores.
    """
    if cpus is None or options.omp_threads is not None:
        return {}
    each = str(max(1, cpus // (options.processes or 1)))
    return {name: each for name in ("OMP_NUM_THREADS", "NUMEXPR_NUM_THREADS") if name not in base}


def _for_the_hooks(
    fields: Mapping[str, object],
    gpus: Sequence[LeasedGpu],
    overheads: _Sizes,
    pools: _Sizes,
    options: WorkerOptions,
) -> str:
    smallest = {name: max(sizes) + SMALLEST_POOL for name, sizes in overheads.items()}
    lease = {
        **fields,
        "gpus": [
            {
                "uuid": gpu.uuid,
                "index": gpu.index,
                "name": gpu.name,
                "memory": gpu.memory,
                "total": gpu.total,
                "place": place if gpu.place is None else gpu.place,
                "whole": gpu.memory if gpu.whole is None else gpu.whole,
                "pools": {name: limits[place] for name, limits in pools.items()},
                "outside": {name: sizes[place] for name, sizes in overheads.items()},
            }
            for place, gpu in enumerate(gpus)
        ],
        "outside": {name: max(sizes) for name, sizes in overheads.items()},
        "smallest": smallest,
        "advised": {name: format_size(round_up_size(size)) for name, size in smallest.items()},
        "options": {
            "growth": options.growth,
            "split": options.split,
            "inter_op": options.inter_op_threads,
            "intra_op": options.intra_op_threads,
            "log_placement": options.log_placement,
            "soft_placement": options.soft_placement,
            "split_sizes": list(options.split_sizes),
            "deterministic": options.deterministic,
            "processes": options.processes,
        },
    }
    # Compact, since sitecustomize searches for `"visible":"..."` without parsing.
    return json.dumps(lease, separators=(",", ":"), sort_keys=True)
