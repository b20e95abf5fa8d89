"""Limits the RAPIDS Memory Manager to the lease: puts a limit around the resource of each GPU.

cuDF, cuML and other libraries of RAPIDS allocate through RMM; CuPy, Numba and PyTorch do if they
are set up so. RMM keeps one memory resource for each GPU. A LimitingResourceAdaptor around it fails
an allocation beyond the limit; creating one does not start CUDA, so this is done at the import. A
resource that the script sets gets a limit too. Pools take memory when they are created, before they
are set, so their sizes are limited there.
"""

import functools
import os
from typing import Any, Callable

from . import report
from .lease import Lease

ReportFailure = Callable[[str], None]
Undo = Callable[[], None]

ALIGNED = 256
"""Sizes of pools are multiples of this."""
UNITS = {"": 1, "b": 1}
for power, letter in enumerate("kmgtp", 1):
    UNITS[letter + "b"] = UNITS[letter] = 1000**power
    UNITS[letter + "ib"] = 1024**power


def install(rmm: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported RMM; `raw` is the lease as JSON."""
    lease = Lease(raw)
    gpus = lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if lease.simulated or not gpus:
        return lease.lift
    limits = _Limits(rmm.mr, lease, gpus)
    undos = [
        _replace([rmm.mr], "set_per_device_resource", limits.setter),
        _replace([rmm.mr], "set_current_device_resource", limits.current_setter),
        _replace([rmm, rmm.rmm], "reinitialize", limits.reinitialize),
        _replace([rmm.mr], "PoolMemoryResource", limits.pool),
        _replace([rmm.mr], "ArenaMemoryResource", limits.arena),
    ]
    limits.apply()
    report.begin(lease, "rmm", getattr(rmm, "__version__", "unknown"), list, limits.reported())

    def lift() -> None:
        lease.lift()
        for undo in undos:
            undo()
        limits.lift()

    return lift


def _replace(owners: "list[Any]", name: str, wrap: Callable[[Any], Any]) -> Undo:
    """Replace a name in modules by what `wrap` makes of it; the returned function restores it."""
    original = getattr(owners[0], name)
    new = wrap(original)
    for owner in owners:
        setattr(owner, name, new)

    def undo() -> None:
        for owner in owners:
            if getattr(owner, name) is new:
                setattr(owner, name, original)

    return undo


def size_of(value: Any) -> int:
    """Return the bytes of a size in a form that RMM accepts: 1024, "2GiB", "1.5 MB"."""
    text = str(value).strip().lower().replace(" ", "")
    number = text.rstrip("bikmgtp")
    return int(float(number) * UNITS[text[len(number) :]]) if number else UNITS[text]


class _Limits:
    """The limit of each GPU, and the replacements of RMM's functions that keep it."""

    def __init__(self, resources: Any, lease: Lease, gpus: "list[dict[str, Any]]") -> None:
        self._resources = resources
        self._lease = lease
        self._gpus = gpus
        self._set = resources.set_per_device_resource
        self._get = resources.get_per_device_resource
        self._adaptor = resources.LimitingResourceAdaptor

    def reported(self) -> "list[dict[str, Any]]":
        """Return the limit of each GPU as the daemon reads it."""
        return [
            {"gpu": gpu["uuid"], "limit": self._limit(device)}
            for device, gpu in enumerate(self._gpus)
        ]

    def apply(self) -> None:
        """Put a limit around the resource of each GPU that has none yet."""
        for device in range(len(self._gpus)):
            self._set(device, self._limited(device, self._get(device)))

    def lift(self) -> None:
        """Remove the limits."""
        for device in range(len(self._gpus)):
            found = self._get(device)
            if type(found) is self._adaptor:
                self._set(device, found.get_upstream())

    def setter(self, original: Any) -> Any:
        @functools.wraps(original)
        def set_per_device_resource(device: int, mr: Any) -> Any:
            return original(device, self._limited(device, mr))

        return set_per_device_resource

    def current_setter(self, original: Any) -> Any:
        @functools.wraps(original)
        def set_current_device_resource(mr: Any) -> Any:
            found = original(mr)  # finds out which GPU is the current one
            self.apply()
            return found

        return set_current_device_resource

    def reinitialize(self, original: Any) -> Any:
        @functools.wraps(original)
        def reinitialize(
            pool_allocator: bool = False,
            managed_memory: bool = False,
            initial_pool_size: Any = None,
            maximum_pool_size: Any = None,
            **others: Any,
        ) -> Any:
            if pool_allocator:
                initial_pool_size, maximum_pool_size = self._pool_sizes(
                    initial_pool_size, maximum_pool_size
                )
            found = original(
                pool_allocator, managed_memory, initial_pool_size, maximum_pool_size, **others
            )
            self.apply()
            return found

        return reinitialize

    def pool(self, original: Any) -> Any:
        def sizes(initial_pool_size: Any = None, maximum_pool_size: Any = None) -> Any:
            return self._pool_sizes(initial_pool_size, maximum_pool_size)

        return _subclass(original, sizes)

    def arena(self, original: Any) -> Any:
        def sizes(arena_size: Any = None, *others: Any, **named: Any) -> Any:
            most = self._smallest()
            asked = most if arena_size is None else size_of(arena_size)
            return (min(asked, most), *others, *named.values())

        return _subclass(original, sizes)

    def _pool_sizes(self, initial: Any, maximum: Any) -> "tuple[int, int]":
        """Return the first and the largest size of a pool; without sizes, half and all of it."""
        most = self._smallest()
        largest = most if maximum is None else min(size_of(maximum), most)
        first = most // 2 if initial is None else size_of(initial)
        return min(first, largest) // ALIGNED * ALIGNED, largest // ALIGNED * ALIGNED

    def _limited(self, device: int, mr: Any) -> Any:
        limit = self._limit(device)
        if self._lease.lifted or (type(mr) is self._adaptor and mr.get_allocation_limit() <= limit):
            return mr
        return self._adaptor(mr, limit)

    def _limit(self, device: int) -> int:
        gpus = self._gpus[device : device + 1] or self._lease.gpus
        return max(ALIGNED, min(self._lease.limit("rmm", gpu) for gpu in gpus))

    def _smallest(self) -> int:
        # Which GPU a pool is for shows only when it is set.
        return min(map(self._limit, range(len(self._gpus))))


def _subclass(original: Any, sizes: Callable[..., Any]) -> Any:
    """Return a class of resources that is created with other sizes."""

    class Kind(type(original)):
        # RMM itself creates objects of the original class.
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    def create(cls: Any, upstream_mr: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__new__(cls, upstream_mr, *sizes(*args, **kwargs))

    return Kind(original.__name__, (original,), {"__new__": create, "__doc__": original.__doc__})
