"""Limits CuPy's default pool to what is free of the lease, and reports its size.

CuPy reads its first limit from a variable of the environment, and gives no notice of its first use
of a GPU. So the hook replaces its allocator until the first allocation on each GPU, and then
restores it. A pool reports only the thread's current GPU, and making another one current would open
a context there. So a process that sees several GPUs reports nothing.
"""

import threading
from typing import Any, Callable

from . import report
from .hook import ReportFailure, Undo, version_of, visible_gpus
from .lease import Lease, LeaseTooSmall
from .shares import UNCHANGED

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
    """Return an allocator that limits the pool, restores `original` and starts the reports."""
    limited: "set[int]" = set()

    def allocate(size: int) -> Any:
        _take(cupy, lease, limited)
        found = original(size)
        # Now a GPU is in use, and reading its pool opens no context.
        try:
            is_last = len(limited) >= cupy.cuda.runtime.getDeviceCount()
            if (is_last or not limited) and cupy.cuda.get_allocator() is allocate:
                cupy.cuda.set_allocator(original)
            version = version_of(cupy)
            report.begin(lease, "cupy", version, _Pool(cupy, lease).held)
        except Exception:  # noqa: BLE001  (a failed hook must not end the script)
            pass
        return found

    return allocate


def _take(cupy: Any, lease: Lease, limited: "set[int]") -> None:
    """Take a pool on the current GPU, and limit CuPy's to it."""
    try:
        device = int(cupy.cuda.runtime.getDevice())
        gpus = visible_gpus(lease)
        if device in limited or lease.lifted:
            return
        limited.add(device)
        if cupy.cuda.runtime.getDeviceCount() != len(gpus):
            return  # which GPU is which is unknown
        pool, lock = cupy.get_default_memory_pool(), threading.Lock()
        with lock:
            asked = pool.get_limit() or None
            taken = lease.take("cupy", gpus[device], asked, _lower(cupy, pool, device, lock))
            pool.set_limit(size=max(1, taken))  # 0 means no limit
    except LeaseTooSmall:
        raise
    except Exception:  # noqa: BLE001  (no GPU: CuPy reports it)
        return


def _lower(cupy: Any, pool: Any, device: int, lock: Any) -> Callable[[int], int]:
    def lower(size: int) -> int:
        if not lock.acquire(False):
            return UNCHANGED
        try:
            with cupy.cuda.Device(device):
                limit = max(1, size, int(pool.total_bytes()))
                pool.set_limit(size=limit)
            return limit
        finally:
            lock.release()

    return lower


class _Pool:
    """CuPy's default pool and its peak, which CuPy does not record."""

    def __init__(self, cupy: Any, lease: Lease) -> None:
        self._cupy = cupy
        self._lease = lease
        self._peak = 0

    def held(self) -> "list[dict[str, Any]]":
        """Return the report about the pool on the one GPU."""
        gpus = visible_gpus(self._lease)
        if len(gpus) != 1 or self._cupy.cuda.runtime.getDeviceCount() != 1:
            return []
        pool = int(self._cupy.get_default_memory_pool().total_bytes())
        limit = self._lease.limit("cupy", gpus[0])
        change = self._change(limit)
        if change:
            version = version_of(self._cupy)
            text = "CuPy {} is not limited to the lease: {}".format(version, change)
            report.failed(self._lease, "cupy", version, text)
            return []
        if pool > IMPLAUSIBLE:
            return []
        self._peak = max(self._peak, pool)
        return [{"gpu": gpus[0]["uuid"], "pool": pool, "peak": self._peak, "limit": limit}]

    def _change(self, limit: int) -> str:
        """Return what the script has done to the limit; "" if it holds."""
        if not _is_used(self._cupy):
            return "the script replaced its memory pool"
        if not 0 < self._cupy.get_default_memory_pool().get_limit() <= max(1, limit):
            return "the script set a larger limit"
        return ""
