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
MAKER = "make_c_api_client"
PLATFORM = "cuda"
LIMITED = ("default", "bfc")


def install(jax: Any, raw: str, trouble: Trouble) -> Undo:
    """Hook the JAX that was just imported; `raw` is the lease as JSON."""
    lease = Lease(raw)
    client = importlib.import_module("jaxlib.xla_client")
    plain = getattr(client, ENTRANCE, None)
    if lease.simulated or plain is None:
        return lease.lift

    undo_maker = _hook_maker(client, lease)

    @functools.wraps(plain)
    def generate_pjrt_gpu_plugin_options(*args: Any, **kwargs: Any) -> Any:
        options = plain(*args, **kwargs)
        if not lease.lifted:
            if undo_maker is None:
                lease.check("jax", "JAX")
            _hold(jax, options, lease, trouble)
        return options

    undo = _replace(client, ENTRANCE, generate_pjrt_gpu_plugin_options)

    def lift() -> None:
        lease.lift()
        for each in (undo, undo_maker or undo):
            each()

    return lift


def _replace(owner: Any, name: str, new: Any) -> Undo:
    """Put `new` in the place of an attribute; what is returned puts the old one back."""
    plain = getattr(owner, name)
    setattr(owner, name, new)

    def undo() -> None:
        if getattr(owner, name) is new:
            setattr(owner, name, plain)

    return undo


def _hold(jax: Any, options: dict[str, Any], lease: Lease, trouble: Trouble) -> None:
    try:
        _clamp(options, lease)
        version = getattr(jax, "__version__", "unknown")
        report.begin(lease, "jax", version, lambda: _pools(lease))
    except Exception as error:  # noqa: BLE001  (ours must not end the script)
        trouble("JAX is not held to the lease: {}: {}".format(type(error).__name__, error))


def _hook_maker(client: Any, lease: Lease) -> Undo | None:
    """Refuse a lease too small for JAX where the client of the GPU is made; None: it is not there.

    What is raised while options are made up, JAX logs, to go on without the GPU
    (xla_bridge.discover_pjrt_plugins). Who asked for the CPU makes no such client.
    """
    plain = getattr(client, MAKER, None)
    if plain is None:
        return None

    @functools.wraps(plain)
    def make_c_api_client(*args: Any, **kwargs: Any) -> Any:
        name = args[0] if args else kwargs.get("plugin_name")
        if name == PLATFORM and not lease.lifted:
            lease.check("jax", "JAX")
        return plain(*args, **kwargs)

    return _replace(client, MAKER, make_c_api_client)


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
