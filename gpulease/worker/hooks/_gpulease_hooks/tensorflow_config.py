"""Limits a TensorFlow ConfigProto to the lease, in place.

The limit is set as virtual devices, the only form that TensorFlow's C++ accepts together with
allow_growth. Beside them it refuses a memory fraction, and it requires one entry for each visible
GPU (gpu_device.cc, VerifyVirtualDeviceSettings).
"""

import math
from typing import Any, Callable

from . import devices
from .hook import visible_gpus
from .lease import MIB, Lease, LeaseTooSmall


def limit_config(
    config: Any, lease: Lease, pools: "list[tuple[int, int]]", cpu_count_is_set: bool
) -> None:
    """Apply the job's options and its memory limits to `config`.

    `pools` has (pool limit, total) in MiB of the GPUs that TensorFlow sees, in its order.
    `cpu_count_is_set` tells whether a device_count of one CPU is the script's own choice.

    Raises:
        LeaseTooSmall: a GPU would be used, and nothing is left for its pool.
    """
    _apply_options(config, lease.options)
    if lease.simulated:
        each = len(_split_sizes(lease.options)) or lease.options["split"]
        _simulate(config, len(lease.gpus) * each, cpu_count_is_set)
    elif pools:
        _limit_memory(config, lease, pools)


def _apply_options(config: Any, options: "dict[str, Any]") -> None:
    if options["inter_op"] is not None:
        config.inter_op_parallelism_threads = options["inter_op"]
    if options["intra_op"] is not None:
        config.intra_op_parallelism_threads = options["intra_op"]
    if options["log_placement"]:
        config.log_device_placement = True
    if options["soft_placement"]:
        config.allow_soft_placement = True
    if options["growth"]:
        config.gpu_options.allow_growth = True


def _simulate(config: Any, devices: int, cpu_count_is_set: bool) -> None:
    """Show logical CPU devices in place of the GPUs, unless the script sets their number.

    With soft placement, what a script places on a GPU runs on the CPU.
    """
    config.allow_soft_placement = True
    given = config.device_count["CPU"] if "CPU" in config.device_count else None
    if given is None or (given == 1 and not cpu_count_is_set):
        config.device_count["CPU"] = devices


def _limit_memory(config: Any, lease: Lease, pools: "list[tuple[int, int]]") -> None:
    options = config.gpu_options
    fraction = options.per_process_gpu_memory_fraction
    split, sizes = _split(options, lease.options)
    _disable_unlimited_allocators(options)
    virtual = options.experimental.virtual_devices
    gpus = visible_gpus(lease)
    if len(gpus) == len(pools):  # else it is unknown which is which
        options.visible_device_list = devices.read_list(options.visible_device_list, gpus)
    visible = _visible(config, len(pools))
    if not visible:
        del virtual[:]
        return
    lease.check("tensorflow", "TensorFlow")
    if not len(virtual):
        for _ in visible:
            virtual.add()
    for place, device in enumerate(virtual):
        limit, total = _pool(visible, place, pools)
        if 0 < fraction <= 1:  # more than 1 asks for unified memory, which has no limit
            limit = max(1, min(limit, int(fraction * total)))
        device.memory_limit_mb[:] = partition(list(device.memory_limit_mb) or sizes, limit, split)
    options.visible_device_list = ",".join(visible)


def take_pools(config: Any, take: Callable[[int, int], int]) -> None:
    """Reduce the limits in `config` to what `take` returns for the number of a GPU and bytes."""
    options = config.gpu_options
    numbers = [each for each in options.visible_device_list.split(",") if each.isdigit()]
    for number, device in zip(numbers, options.experimental.virtual_devices):
        sizes = list(device.memory_limit_mb)
        wanted = int(sum(sizes)) * MIB
        taken = take(int(number), wanted)
        if taken < wanted:
            device.memory_limit_mb[:] = partition(sizes, taken // MIB, len(sizes))


def _visible(config: Any, gpus: int) -> "list[str]":
    """Return the GPUs that `config` leaves visible, as it names them."""
    options = config.gpu_options
    count = config.device_count["GPU"] if "GPU" in config.device_count else gpus
    if count == 0:
        return []
    listed = [entry.strip() for entry in options.visible_device_list.split(",")]
    visible = [entry for entry in listed if entry] or [str(number) for number in range(gpus)]
    virtual = options.experimental.virtual_devices
    if not len(virtual):
        return visible[:count]
    # With virtual devices the count is that of logical GPUs and does not restrict visibility.
    return visible if options.visible_device_list else visible[: len(virtual)]


def _pool(visible: "list[str]", place: int, pools: "list[tuple[int, int]]") -> "tuple[int, int]":
    name = visible[place] if place < len(visible) else ""
    if name.isdigit() and int(name) < len(pools):
        return pools[int(name)]
    return min(pools)  # there is no such GPU, which TensorFlow reports


def _split(options: Any, job: "dict[str, Any]") -> "tuple[int, list[float]]":
    """Return the number and the sizes of the logical GPUs on a GPU that the script does not divide.

    Without sizes they are equal.
    """
    asked = getattr(options.experimental, "num_virtual_devices_per_gpu", 0)
    if asked:
        options.experimental.num_virtual_devices_per_gpu = 0
    return (asked, []) if asked > 1 else (job["split"], _split_sizes(job))


def _split_sizes(job: "dict[str, Any]") -> "list[float]":
    """Return the sizes in MiB of --split."""
    return [max(1.0, size / MIB) for size in job["split_sizes"]]


def _disable_unlimited_allocators(options: Any) -> None:
    options.per_process_gpu_memory_fraction = 0
    options.allocator_type = ""
    options.experimental.use_unified_memory = False
    if hasattr(options.experimental, "use_cuda_malloc_async"):  # TensorFlow 2.5 and later
        options.experimental.use_cuda_malloc_async = False


def partition(requests: "list[float]", limit: int, split: int) -> "list[int | float]":
    """Return the sizes in MiB of a GPU's logical GPUs, at most `limit` in total.

    `requests` are the sizes that the script or the job asks for: kept if they fit together, else
    scaled down in proportion. Without any there are `split` equal ones. A request that is not a
    positive number means `limit`.

    Raises:
        LeaseTooSmall: there are more logical GPUs than MiB.
    """
    count = len(requests) or split
    if count > limit:
        raise LeaseTooSmall(
            "cannot make %d logical GPUs of %dM: each needs at least 1M\n\n"
            "hint: ask for fewer, or for more memory with --mem" % (count, limit)
        )
    if not requests:
        return [limit // split] * split
    asked = [each if math.isfinite(each) and each > 0 else float(limit) for each in requests]
    return list(asked) if sum(asked) <= limit else list(_scaled(asked, limit))


def _scaled(requests: "list[float]", limit: int) -> "list[int]":
    largest = max(requests)  # divided out first: the sum of huge requests would be infinite
    total = sum(each / largest for each in requests)
    sizes = [max(1, int(each / largest * limit / total)) for each in requests]
    while sum(sizes) > limit:  # where the smallest were rounded up to 1
        sizes[sizes.index(max(sizes))] -= 1
    return sizes
