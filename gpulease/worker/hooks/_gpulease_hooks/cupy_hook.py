"""Reports the size of CuPy's default pool. A variable of the environment limits the pool.

CuPy gives no notice of its first use of a GPU, so the hook replaces its allocator until the first
allocation, and then restores it. A pool reports only the thread's current GPU, and making another
one current would open a context there. So a process that sees several GPUs reports nothing.
"""

import os
from typing import Any, Callable

from . import report
from .lease import Lease

ReportFailure = Callable[[str], None]
Undo = Callable[[], None]

IMPLAUSIBLE = 1 << 50
"""Bytes that no GPU has: CuPy's counter can drop below zero (cupy issue 4881)."""


def install(cupy: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported CuPy; `raw` is the lease as JSON."""
    lease = Lease(raw)
    try:
        if not lease.simulated and _is_used(cupy):
            cupy.cuda.set_allocator(_reporting_allocator(cupy, cupy.cuda.get_allocator(), lease))
    except Exception:  # noqa: BLE001  (an unknown CuPy is limited but not reported)
        pass
    return lease.lift


def _is_used(cupy: Any) -> bool:
    """Tell whether the default pool is the allocator; another one has other counters."""
    return getattr(cupy.cuda.get_allocator(), "__self__", None) is cupy.get_default_memory_pool()


def _reporting_allocator(cupy: Any, original: Any, lease: Lease) -> Callable[[int], Any]:
    """Return an allocator that restores `original` and starts the reports at its first call."""

    def allocate(size: int) -> Any:
        found = original(size)
        # Now a GPU is in use, and reading its pool opens no context.
        try:
            if cupy.cuda.get_allocator() is allocate:
                cupy.cuda.set_allocator(original)
            version = getattr(cupy, "__version__", "unknown")
            report.begin(lease, "cupy", version, _Pool(cupy, lease).held)
        except Exception:  # noqa: BLE001  (a failed hook must not end the script)
            pass
        return found

    return allocate


class _Pool:
    """CuPy's default pool and its peak, which CuPy does not record."""

    def __init__(self, cupy: Any, lease: Lease) -> None:
        self._cupy = cupy
        self._lease = lease
        self._peak = 0

    def held(self) -> "list[dict[str, Any]]":
        """Return the report about the pool on the one GPU."""
        gpus = self._lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if len(gpus) != 1 or self._cupy.cuda.runtime.getDeviceCount() != 1:
            return []
        pool = int(self._cupy.get_default_memory_pool().total_bytes())
        if pool > IMPLAUSIBLE or not _is_used(self._cupy):
            return []
        self._peak = max(self._peak, pool)
        limit = gpus[0]["pools"]["cupy"]
        return [{"gpu": gpus[0]["uuid"], "pool": pool, "peak": self._peak, "limit": limit}]
