"""What TensorFlow's pools hold, by GPU; asks a context that is there, and never makes one."""

from __future__ import annotations

import os
import sys
from typing import Any

from .lease import MIB, Lease


def layout(config: Any, lease: Lease) -> list[dict[str, Any]]:
    """Return which logical devices are on each GPU, and what its pool may have, by a ConfigProto.

    A pool that may not grow is taken as a whole when TensorFlow starts. On simulated GPUs the
    logical CPUs stand in for them, without any limit.
    """
    if lease.simulated:
        return [
            {"gpu": gpu["uuid"], "devices": ["CPU:%d" % place], "limit": None, "grows": True}
            for place, gpu in enumerate(lease.gpus)
        ]
    options = config.gpu_options
    gpus = lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    virtual = options.experimental.virtual_devices
    names = [name for name in options.visible_device_list.split(",") if name.isdigit()]
    grows = bool(options.allow_growth) or os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"
    found, first = [], 0
    for name, device in zip(names, virtual):  # noqa: B905  (Python 3.7)
        count = len(device.memory_limit_mb)
        if int(name) < len(gpus):
            found.append(
                {
                    "gpu": gpus[int(name)]["uuid"],
                    "devices": ["GPU:%d" % (first + each) for each in range(count)],
                    "limit": int(sum(device.memory_limit_mb)) * MIB,
                    "grows": grows,
                }
            )
        first += count
    return found


def held(places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the pools laid out as `places` hold and have held; nothing before a start."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = module.context_safe() if module is not None else None
    if context is None or not getattr(context, "_initialized", False):
        return []
    pools = []
    for place in places:
        known = [found for device in place["devices"] for found in _asked(context, device)]
        if known:
            current = sum(each["current"] for each in known)
            pools.append(
                {
                    "gpu": place["gpu"],
                    "pool": _pool(place, current),
                    "peak": sum(each["peak"] for each in known),
                    "limit": place["limit"],
                }
            )
    return pools


def _pool(place: dict[str, Any], current: int) -> int | None:
    if place["limit"] is None:
        return current
    # One that grows holds more than is in use, and TensorFlow does not say how much.
    return None if place["grows"] else int(place["limit"])


def _asked(context: Any, device: str) -> list[dict[str, int]]:
    try:
        return [context.get_memory_info(device)]
    except Exception:  # noqa: BLE001  (no such device, or one that does not count)
        return []
