"""Rewrite a TensorFlow ConfigProto so that it stays inside the lease. Changes it in place.

The limit is given as virtual devices, the one form that TensorFlow's C++ takes together with
allow_growth; it then refuses a memory fraction beside them, and wants exactly one entry for each
visible GPU (gpu_device.cc, VerifyVirtualDeviceSettings).
"""

from __future__ import annotations

from typing import Any

from .lease import Lease
from .partition import partition


def clamp(config: Any, lease: Lease, pools: list[tuple[int, int]], cpus_are_a_wish: bool) -> None:
    """Apply the options of the job to `config`, and its limits.

    `pools` are (limit, capacity) in MiB of the GPUs that TensorFlow sees, in its order.
    `cpus_are_a_wish` tells whether a device_count of one CPU is what the script asked for.

    Raises:
        LeaseTooSmall: if a GPU would be used and nothing is left for its pool.
    """
    _apply_options(config, lease.options)
    if lease.simulated:
        _simulate(config, len(lease.gpus) * lease.options["split"], cpus_are_a_wish)
    elif pools:
        _limit(config, lease, pools)


def _apply_options(config: Any, options: dict[str, Any]) -> None:
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


def _simulate(config: Any, devices: int, cpus_are_a_wish: bool) -> None:
    """Stand in logical CPU devices for the GPUs; a script's own number of them comes first."""
    given = config.device_count["CPU"] if "CPU" in config.device_count else None
    if given is None or (given == 1 and not cpus_are_a_wish):
        config.device_count["CPU"] = devices


def _limit(config: Any, lease: Lease, pools: list[tuple[int, int]]) -> None:
    options = config.gpu_options
    fraction = options.per_process_gpu_memory_fraction
    logical = _logical_gpus(options, lease.options["split"])
    _close_ways_out(options)
    virtual = options.experimental.virtual_devices
    visible = _visible(config, len(pools))
    if not visible:
        del virtual[:]
        return
    lease.check("tensorflow", "TensorFlow")
    if not len(virtual):
        for _ in visible:
            virtual.add()
    for place, device in enumerate(virtual):
        limit, capacity = _pool(visible, place, pools)
        if 0 < fraction <= 1:  # more than 1 asks for unified memory, that is for no limit
            limit = max(1, min(limit, int(fraction * capacity)))
        device.memory_limit_mb[:] = partition(list(device.memory_limit_mb), limit, logical)
    options.visible_device_list = ",".join(visible)


def _visible(config: Any, gpus: int) -> list[str]:
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
    # With virtual devices the count is that of logical GPUs, and says nothing of visibility.
    return visible if options.visible_device_list else visible[: len(virtual)]


def _pool(visible: list[str], place: int, pools: list[tuple[int, int]]) -> tuple[int, int]:
    name = visible[place] if place < len(visible) else ""
    if name.isdigit() and int(name) < len(pools):
        return pools[int(name)]
    return min(pools)  # no such GPU: TensorFlow says so itself


def _logical_gpus(options: Any, split: int) -> int:
    """Return into how many logical GPUs each one is divided that the script does not divide."""
    experimental = options.experimental
    asked = getattr(experimental, "num_virtual_devices_per_gpu", 0)
    if asked:
        experimental.num_virtual_devices_per_gpu = 0
    return asked if asked > 1 else split


def _close_ways_out(options: Any) -> None:
    options.per_process_gpu_memory_fraction = 0
    options.allocator_type = ""
    options.experimental.use_unified_memory = False
    if hasattr(options.experimental, "use_cuda_malloc_async"):  # TensorFlow 2.5 and later
        options.experimental.use_cuda_malloc_async = False
