"""Hold JAX to the lease where it makes up the options of its GPU client.

The variable XLA_PYTHON_CLIENT_MEM_FRACTION holds it already; what a script does to the environment
behind os.environ, and an allocator without a limit, are put right here. A jaxlib without this
function reads the variable alone.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any, Callable

from . import report
from .lease import Lease

Trouble = Callable[[str], None]
Undo = Callable[[], None]

ENTRANCE = "generate_pjrt_gpu_plugin_options"
LIMITED = ("default", "bfc")


def install(jax: Any, raw: str, trouble: Trouble) -> Undo:
    """Hook the JAX that was just imported; `raw` is the lease as JSON."""
    lease = Lease(raw)
    client = importlib.import_module("jaxlib.xla_client")
    plain = getattr(client, ENTRANCE, None)
    if lease.simulated or plain is None:
        return lease.lift

    @functools.wraps(plain)
    def generate_pjrt_gpu_plugin_options(*args: Any, **kwargs: Any) -> Any:
        options = plain(*args, **kwargs)
        if not lease.lifted:
            lease.check("jax", "JAX")
            try:
                _clamp(options, lease)
                version = getattr(jax, "__version__", "unknown")
                report.begin(lease, "jax", version, lambda: _pools(lease))
            except Exception as error:  # noqa: BLE001  (ours must not end the script)
                trouble("JAX is not held to the lease: {}: {}".format(type(error).__name__, error))
        return options

    setattr(client, ENTRANCE, generate_pjrt_gpu_plugin_options)

    def lift() -> None:
        lease.lift()
        if getattr(client, ENTRANCE) is generate_pjrt_gpu_plugin_options:
            setattr(client, ENTRANCE, plain)

    return lift


def _clamp(options: dict[str, Any], lease: Lease) -> None:
    """Put the smaller of the script's share and the lease's into the options."""
    share = min(gpu["pools"]["jax"] / gpu["total"] for gpu in lease.gpus)
    asked = float(options.get("memory_fraction") or 1.0)
    options["memory_fraction"] = max(1e-6, min(share, asked if asked > 0 else 1.0))
    if options.get("allocator") not in LIMITED:
        options["allocator"] = "default"


def _pools(lease: Lease) -> list[dict[str, Any]]:
    bridge = sys.modules.get("jax._src.xla_bridge")
    # To ask for the devices would make a client, with a CUDA context.
    if bridge is None or not bridge.backends_are_initialized():
        return []
    gpus = lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    pools = []
    for device in sys.modules["jax"].local_devices():
        place = getattr(device, "local_hardware_id", device.id)
        stats = device.memory_stats() if device.platform == "gpu" else None
        if not stats or not 0 <= place < len(gpus):
            continue
        pools.append(
            {
                "gpu": gpus[place]["uuid"],
                "pool": stats.get("pool_bytes"),
                "peak": stats.get("peak_bytes_in_use"),
                "limit": gpus[place]["pools"]["jax"],
            }
        )
    return pools
