"""Limits the RAPIDS Memory Manager to the lease: puts a limit around the resource of each GPU.

cuDF, cuML and other libraries of RAPIDS allocate through RMM; CuPy, Numba and PyTorch do if they
are set up so. RMM keeps one memory resource for each GPU. A LimitingResourceAdaptor around it fails
an allocation beyond the limit. RMM gives no notice of its first use of a GPU, so at the import the
hook sets a resource in Python, which takes a pool at the first allocation, and then sets the
limited one. A resource that the script sets gets a limit too. Pools take memory when they are
created, before they are set, so their sizes are limited there.
"""

import functools
import importlib
from typing import Any, Callable

from . import report
from .hook import ReportFailure, Undo, lifting, version_of, visible_gpus, wrap
from .lease import Lease

ALIGNED = 256
"""Sizes of pools are multiples of this."""
UNITS = {"": 1, "b": 1}
for power, letter in enumerate("kmgtp", 1):
    UNITS[letter + "b"] = UNITS[letter] = 1000**power
    UNITS[letter + "ib"] = 1024**power


def install(rmm: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported RMM; `raw` is the lease as JSON."""
    lease = Lease(raw)
    gpus = visible_gpus(lease)
    if lease.simulated or not gpus:
        return lease.lift
    limits = _Limits(rmm, lease, gpus)
    undos = [
        wrap([rmm.mr], "set_per_device_resource", limits.setter),
        wrap([rmm.mr], "set_current_device_resource", limits.current_setter),
        wrap([rmm, rmm.rmm], "reinitialize", limits.reinitialize),
        wrap([rmm.mr], "PoolMemoryResource", limits.pool),
        wrap([rmm.mr], "ArenaMemoryResource", limits.arena),
    ]
    limits.begin()
    return lifting(lease, *undos, limits.lift)


def size_of(value: Any) -> int:
    """Return the bytes of a size in a form that RMM accepts: 1024, "2GiB", "1.5 MB"."""
    text = str(value).strip().lower().replace(" ", "")
    number = text.rstrip("bikmgtp")
    return int(float(number) * UNITS[text[len(number) :]]) if number else UNITS[text]


class _Limits:
    """The limit of each GPU, and the replacements of RMM's functions that keep it."""

    def __init__(self, rmm: Any, lease: Lease, gpus: "list[dict[str, Any]]") -> None:
        self._rmm = rmm
        self._lease = lease
        self._gpus = gpus
        self._set = rmm.mr.set_per_device_resource
        self._get = rmm.mr.get_per_device_resource
        self._adaptor = rmm.mr.LimitingResourceAdaptor
        self._sized = rmm.mr.PoolMemoryResource
        """Its objects get sizes within the limit."""
        self._first: "list[Any]" = []
        """Take a pool at the first allocation. Kept, since C++ may refer to them for long."""

    def begin(self) -> None:
        """Limit each GPU from its first use on."""
        for device in range(len(self._gpus)):
            self._set(device, self._until_first_use(device, self._get(device)))

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
            device = self._current()
            return original(mr if device is None else self._limited(device, mr))

        return set_current_device_resource

    def reinitialize(self, original: Any) -> Any:
        @functools.wraps(original)
        def reinitialize(
            pool_allocator: bool = False,
            managed_memory: bool = False,
            initial_pool_size: Any = None,
            maximum_pool_size: Any = None,
            devices: Any = 0,
            **others: Any,
        ) -> Any:
            numbers = [devices] if isinstance(devices, int) else list(devices or [0])
            sizes = initial_pool_size, maximum_pool_size
            if pool_allocator:
                sizes = self._pool_sizes(min(map(self._limit, numbers)), *sizes)
            found = original(pool_allocator, managed_memory, *sizes, devices=devices, **others)
            for device in numbers:
                self._set(device, self._limited(device, self._get(device)))
            return found

        return reinitialize

    def pool(self, original: Any) -> Any:
        def sizes(initial_pool_size: Any = None, maximum_pool_size: Any = None) -> Any:
            return self._pool_sizes(self._here(), initial_pool_size, maximum_pool_size)

        return _subclass(original, sizes)

    def arena(self, original: Any) -> Any:
        def sizes(arena_size: Any = None, *others: Any, **named: Any) -> Any:
            most = self._here()
            asked = most if arena_size is None else size_of(arena_size)
            return (min(asked, most), *others, *named.values())

        return _subclass(original, sizes)

    def _pool_sizes(self, most: int, initial: Any, maximum: Any) -> "tuple[int, int]":
        """Return the first and the largest size of a pool; without sizes, half and all of it."""
        largest = most if maximum is None else min(size_of(maximum), most)
        first = most // 2 if initial is None else size_of(initial)
        return min(first, largest) // ALIGNED * ALIGNED, largest // ALIGNED * ALIGNED

    def _until_first_use(self, device: int, plain: Any) -> Any:
        """Return a resource that sets the limited one at its first allocation."""
        limited: "list[Any]" = []

        def allocate(size: int, *stream: Any) -> Any:
            if not limited:
                limited.append(self._limited(device, plain))
            if self._get(device) is first:
                self._set(device, limited[0])
            return limited[0].allocate(size, *stream)

        def deallocate(pointer: int, size: int, *stream: Any) -> Any:
            return limited[0].deallocate(pointer, size, *stream)

        first = self._rmm.mr.CallbackMemoryResource(allocate, deallocate)
        self._first.append(first)
        return first

    def _limited(self, device: int, mr: Any) -> Any:
        """Return a memory resource with a limit around it, unless it has one that is low enough."""
        if self._lease.lifted:
            return mr
        limit = self._limit(device)
        return mr if self._is_limited(mr, limit) else self._adaptor(mr, limit)

    def _is_limited(self, mr: Any, limit: int) -> bool:
        """Tell whether a resource, or one that it allocates from, has a limit."""
        while mr is not None:
            if any(mr is each for each in self._first) or isinstance(mr, self._sized):
                return True
            if type(mr) is self._adaptor and mr.get_allocation_limit() <= limit:
                return True
            mr = mr.get_upstream() if hasattr(mr, "get_upstream") else None
        return False

    def _limit(self, device: int) -> int:
        """Take a pool on a GPU, once, and return its size.

        Raises:
            LeaseTooSmall: the lease leaves RMM no usable pool.
        """
        if not 0 <= device < len(self._gpus):
            return self._smallest()  # the variable was changed after CUDA had read it
        self._lease.check("rmm", "RMM")
        limit = self._lease.take("rmm", self._gpus[device])
        gpu = {"gpu": self._gpus[device]["uuid"], "limit": limit}
        version = version_of(self._rmm)
        report.begin(self._lease, "rmm", version, list, [gpu])
        return limit

    def _here(self) -> int:
        device = self._current()
        return self._smallest() if device is None else self._limit(device)

    def _smallest(self) -> int:
        return max(ALIGNED, min(self._lease.most("rmm", gpu) for gpu in self._gpus))

    def _current(self) -> "int | None":
        """Return the number of the current GPU; None if there is none, which RMM reports."""
        try:
            return int(importlib.import_module("rmm._cuda.gpu").getDevice())
        except Exception:  # noqa: BLE001  (no GPU, or an unknown RMM)
            return None


def _subclass(original: Any, sizes: Callable[..., Any]) -> Any:
    """Return a class of resources that is created with other sizes."""

    class Kind(type(original)):
        # RMM itself creates objects of the original class.
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    def create(cls: Any, upstream_mr: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__new__(cls, upstream_mr, *sizes(*args, **kwargs))

    return Kind(original.__name__, (original,), {"__new__": create, "__doc__": original.__doc__})
