"""Report what CuPy's default pool holds. It is limited by its variable, and not here.

CuPy says nothing when it first uses a GPU, so the hook stands in the place of its allocator until
the first allocation, and then puts that back. Of several GPUs a pool tells of the thread's current
one alone, and to make another current would open a context there: in a process that sees more than
one nothing is reported.
"""

from __future__ import annotations

import os
from typing import Any, Callable

from . import report
from .lease import Lease

Trouble = Callable[[str], None]
Undo = Callable[[], None]

NONSENSE = 1 << 50
"""Bytes that no GPU has: CuPy's count was seen to pass below zero (cupy issue 4881)."""


def install(cupy: Any, raw: str, trouble: Trouble) -> Undo:
    """Hook the CuPy that was just imported; `raw` is the lease as JSON."""
    lease = Lease(raw)
    try:
        if not lease.simulated and _is_used(cupy):
            cupy.cuda.set_allocator(_first(cupy, cupy.cuda.get_allocator(), lease))
    except Exception:  # noqa: BLE001  (a CuPy that we do not know is limited, and not seen)
        pass
    return lease.lift


def _is_used(cupy: Any) -> bool:
    """Tell whether the default pool is what allocates: another one says other things of itself."""
    return getattr(cupy.cuda.get_allocator(), "__self__", None) is cupy.get_default_memory_pool()


def _first(cupy: Any, plain: Any, lease: Lease) -> Callable[[int], Any]:
    """Return an allocator that steps aside once it has allocated."""

    def allocate(size: int) -> Any:
        found = plain(size)
        # Not before: a GPU is in use by now, and to ask for its pool starts nothing.
        try:
            if cupy.cuda.get_allocator() is allocate:
                cupy.cuda.set_allocator(plain)
            version = getattr(cupy, "__version__", "unknown")
            report.begin(lease, "cupy", version, _Pool(cupy, lease).held)
        except Exception:  # noqa: BLE001  (ours must not end the script)
            pass
        return found

    return allocate


class _Pool:
    """CuPy's default pool, and the most that it was seen to hold, as it does not say so itself."""

    def __init__(self, cupy: Any, lease: Lease) -> None:
        self._cupy = cupy
        self._lease = lease
        self._peak = 0

    def held(self) -> list[dict[str, Any]]:
        """Return what the pool on the one GPU holds, as a report."""
        gpus = self._lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        if len(gpus) != 1 or self._cupy.cuda.runtime.getDeviceCount() != 1:
            return []
        pool = int(self._cupy.get_default_memory_pool().total_bytes())
        if pool > NONSENSE or not _is_used(self._cupy):
            return []
        self._peak = max(self._peak, pool)
        limit = gpus[0]["pools"]["cupy"]
        return [{"gpu": gpus[0]["uuid"], "pool": pool, "peak": self._peak, "limit": limit}]
