"""Limits JAX to the lease at the function that builds the options of its GPU client.

The variable XLA_PYTHON_CLIENT_MEM_FRACTION already limits it. This hook also covers an environment
that was changed behind os.environ, and allocators without a limit. A jaxlib without this function
reads the variable only.
"""

import functools
import importlib
import os
import sys
from typing import Any

from . import report
from .hook import ReportFailure, Undo, lifting, replace, reporting, version_of, visible_gpus
from .lease import Lease

OPTIONS = "generate_pjrt_gpu_plugin_options"
MAKER = "make_c_api_client"
PLATFORM = "cuda"
DETERMINISTIC = "xla_gpu_deterministic_ops"
LIMITED = ("default", "bfc")


def install(jax: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported JAX; `raw` is the lease as JSON."""
    lease = Lease(raw)
    if lease.options["deterministic"] and DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        # XLA reads them when it creates its first client.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = "{} --{}=true".format(flags, DETERMINISTIC).strip()
    client = importlib.import_module("jaxlib.xla_client")
    original = getattr(client, OPTIONS, None)
    if lease.simulated or original is None:
        return lease.lift

    undo_maker = _hook_maker(jax, client, lease, report_failure)

    @functools.wraps(original)
    def generate_pjrt_gpu_plugin_options(*args: Any, **kwargs: Any) -> Any:
        options = original(*args, **kwargs)
        if not lease.lifted:
            with reporting(report_failure, "JAX is not limited to the lease"):
                _limit(options, lease)
            if undo_maker is None:
                lease.check("jax", "JAX")
                _take(jax, options, lease, report_failure)
        return options

    undo = replace([client], OPTIONS, original, generate_pjrt_gpu_plugin_options)
    return lifting(lease, undo, undo_maker or undo)


def _hook_maker(
    jax: Any, client: Any, lease: Lease, report_failure: ReportFailure
) -> "Undo | None":
    """Take a pool, or refuse to, where the GPU client is created; None: no such function.

    JAX only logs what is raised while it builds the options, and goes on without the GPU
    (xla_bridge.discover_pjrt_plugins). A program that asks for the CPU creates no such client.
    """
    original = getattr(client, MAKER, None)
    if original is None:
        return None

    @functools.wraps(original)
    def make_c_api_client(
        plugin_name: str, options: "dict[str, Any] | None" = None, *args: Any, **kwargs: Any
    ) -> Any:
        if plugin_name == PLATFORM and not lease.lifted:
            lease.check("jax", "JAX")
            options = dict(options or {})
            _take(jax, options, lease, report_failure)
        return original(plugin_name, options, *args, **kwargs)

    return replace([client], MAKER, original, make_c_api_client)


def _limit(options: "dict[str, Any]", lease: Lease) -> None:
    """Set the smaller of the script's memory fraction and the lease's."""
    fraction = min(gpu["pools"]["jax"] / gpu["total"] for gpu in lease.gpus)
    asked = float(options.get("memory_fraction") or 1.0)
    options["memory_fraction"] = max(1e-6, min(fraction, asked if asked > 0 else 1.0))
    if options.get("allocator") not in LIMITED:
        options["allocator"] = "default"


def _take(jax: Any, options: "dict[str, Any]", lease: Lease, report_failure: ReportFailure) -> None:
    """Take a pool on each GPU that the client will use, and limit the client to the smallest.

    Only now the sizes are known that are reported: a script may ask for less than the lease.
    """
    with reporting(report_failure, "JAX is not limited to what other processes leave"):
        fraction = float(options.get("memory_fraction") or 1.0)
        gpus = visible_gpus(lease) or lease.gpus
        chosen = options.get("visible_devices")
        if chosen is not None:
            gpus = [gpus[each] for each in chosen if each < len(gpus)]
        taken = [lease.take("jax", gpu, int(fraction * gpu["total"])) for gpu in gpus]
        shares = [size / gpu["total"] for size, gpu in zip(taken, gpus)]
        options["memory_fraction"] = max(1e-6, min(shares + [fraction]))
        for gpu in gpus:
            lease.resize("jax", gpu, int(options["memory_fraction"] * gpu["total"]))
        report.begin(lease, "jax", version_of(jax), lambda: _pools(lease))


def _pools(lease: Lease) -> "list[dict[str, Any]]":
    bridge = sys.modules.get("jax._src.xla_bridge")
    # Listing the devices would create a client, with a CUDA context.
    if bridge is None or not bridge.backends_are_initialized():
        return []
    gpus = visible_gpus(lease)
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
                "limit": lease.limit("jax", gpus[place]),
            }
        )
    return pools
