"""Limits PyTorch to the lease: sets the memory fraction of the caching allocator on each GPU.

torch.cuda._lazy_call queues that until the script first uses CUDA. Setting the fraction at import
would create a CUDA context in every process that imports torch, and break those that fork
afterwards. The public setter is wrapped, so that a script can lower its fraction but not raise it.

Before 2.10, setting a fraction makes its device the thread's current one and opens a CUDA context
there, hundreds of MiB (NativeCachingAllocator::setMemoryFraction calls cudaSetDevice and
cudaMemGetInfo). So the current device is restored.

One process of several works on one GPU beside others on theirs. So a process takes memory of a GPU
from the ledger of the job only when it uses that GPU: at once if it sees one GPU or is a rank on
it, and otherwise as soon as it has a context there.
"""

import atexit
import functools
import importlib
import os
import sys
import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator

from . import report
from .hook import ReportFailure, Undo, is_older, lifting, replace, reporting, visible_gpus
from .lease import Lease, LeaseTooSmall
from .shares import UNCHANGED

SETTER = "set_per_process_memory_fraction"
# In either of these a user may ask for less (PyTorch 2.10 and later).
CONFIGURATIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
KEY = "per_process_memory_fraction:"
UNLIMITED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""With any value, memory is allocated outside the pool; read at the first allocation."""
OPENS_NO_CONTEXT = (2, 10)
"""The first version that sets a fraction without opening a context."""
POLL_EVERY = 0.2
"""Seconds until a process is limited on a further GPU that it uses."""


def install(torch: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported PyTorch; `raw` is the lease as JSON.

    The returned function removes the limit, even from a PyTorch that has used the GPU.
    """
    lease = Lease(raw)
    if lease.options["deterministic"]:
        with reporting(report_failure, "PyTorch is not deterministic"):
            torch.use_deterministic_algorithms(True)  # from 1.8 on
            torch.backends.cudnn.benchmark = False
    if lease.simulated:
        return lease.lift
    cuda = getattr(torch, "cuda", None)
    missing = [name for name in ("_lazy_call", SETTER) if not hasattr(cuda, name)]
    if missing:
        version = getattr(torch, "__version__", "of unknown version")
        report_failure(
            "PyTorch {} is not limited to the lease at torch.cuda.{}".format(
                version, ", torch.cuda.".join(missing)
            )
        )
    if SETTER in missing:
        return lease.lift
    original = getattr(cuda, SETTER)
    limits = _Limits(torch, original, lease)
    undo = _hook_setter(torch, original, lease, limits)
    undos = [_hook_memory(torch, module, name, limits.of) for module, name in FUNCTIONS]
    if not missing:
        cuda._lazy_call(_limiter(torch, limits, lease, report_failure))

    def lift() -> None:
        lifting(lease, undo, *undos)()
        if cuda.is_initialized():
            limits.lift()

    return lift


def _limiter(
    torch: Any, limits: "_Limits", lease: Lease, report_failure: ReportFailure
) -> Callable[[], None]:
    """Return the function that PyTorch calls once CUDA is initialised."""

    def limit() -> None:
        if lease.lifted:
            return
        os.environ.pop(UNLIMITED, None)
        if torch.cuda.device_count():
            lease.check("torch", "PyTorch")
        with reporting(report_failure, "PyTorch is not limited to the lease"):
            limits.begin(report_failure)
            report.begin(lease, "torch", torch.__version__, lambda: _pools(torch.cuda, lease))

    return limit


def _hook_setter(torch: Any, original: Any, lease: Lease, limits: "_Limits") -> Undo:
    cuda = torch.cuda

    @functools.wraps(original)
    def set_per_process_memory_fraction(fraction: Any, device: Any = None) -> Any:
        # PyTorch itself refuses a value that is not a fraction.
        if not isinstance(fraction, float) or lease.lifted or not 0 <= fraction <= 1:
            return original(fraction, device)
        number = _device_number(cuda, device)
        if number is None:
            smallest = min(gpu["pools"]["torch"] / gpu["total"] for gpu in lease.gpus)
            return original(min(fraction, smallest), device)
        return limits.set(number, fraction)

    owners = [owner for owner in (cuda, getattr(cuda, "memory", None)) if hasattr(owner, SETTER)]
    return replace(owners, SETTER, original, set_per_process_memory_fraction)


def _device_number(cuda: Any, device: Any) -> "int | None":
    """Return the index of a device in any form that PyTorch accepts; None if it is invalid."""
    try:
        return int(
            cuda.current_device() if device is None else cuda.memory._get_device_index(device)
        )
    except LeaseTooSmall:
        raise
    except Exception:  # noqa: BLE001  (no such device, no CUDA: PyTorch reports it)
        return None


def _gpu_of(torch: Any, lease: Lease, device: int) -> "dict[str, Any] | None":
    """Return the leased GPU that a device is; None if that is unknown."""
    gpus = visible_gpus(lease)
    # The variable may have been changed after CUDA had read it.
    return gpus[device] if torch.cuda.device_count() == len(gpus) else None


def _requested_fractions() -> "list[float]":
    """Return the fractions that the variables of PyTorch ask for."""
    found = []
    for name in CONFIGURATIONS:
        for part in os.environ.get(name, "").replace(" ", "").split(","):
            if part.startswith(KEY):
                try:
                    found.append(float(part[len(KEY) :]))
                except ValueError:
                    pass  # PyTorch itself refuses it
    return [each for each in found if 0 < each <= 1]


def _pools(cuda: Any, lease: Lease) -> "list[dict[str, Any]]":
    gpus = visible_gpus(lease)
    if not cuda.is_initialized() or cuda.device_count() != len(gpus):
        return []
    return [
        {
            "gpu": gpu["uuid"],
            "pool": cuda.memory_reserved(device),
            "peak": cuda.max_memory_reserved(device),
            "limit": lease.limit("torch", gpu),
        }
        for device, gpu in enumerate(gpus)
    ]


def _total(torch: Any, device: int) -> int:
    """Return the bytes that this PyTorch multiplies a fraction with.

    Where the driver limits a job, only some calls of CUDA return the limit as the total.
    """
    if is_older(torch, OPENS_NO_CONTEXT) and hasattr(torch.cuda, "mem_get_info"):
        return int(_unhooked(torch.cuda.mem_get_info)(device)[1])
    return int(torch.cuda.get_device_properties(device).total_memory)


class _Limits:
    """Limits the devices of this process, and removes the limits again."""

    def __init__(self, torch: Any, set_fraction: Callable[[float, int], Any], lease: Lease) -> None:
        self._torch = torch
        self._set_fraction = set_fraction
        self._lease = lease
        self._limited: "dict[int, int]" = {}
        self._lock = threading.RLock()
        self._over = threading.Event()

    def begin(self, report_failure: ReportFailure) -> None:
        """Limit this process; called once CUDA is ready."""
        devices = range(self._torch.cuda.device_count())
        own = self._own(len(devices))
        can_look = hasattr(getattr(self._torch, "_C", None), "_cuda_hasPrimaryContext")
        # Until it is used, an old PyTorch must not set a limit there, as that would be a use.
        waits = (
            can_look
            and len(devices) > 1
            and (own is not None or not is_older(self._torch, OPENS_NO_CONTEXT))
        )
        rest = [device for device in devices if waits and device != own]
        with self._same_current_device():
            for device in devices:
                if device not in rest:
                    self._limit(device)
                elif not is_older(self._torch, OPENS_NO_CONTEXT):
                    self._hand(device, self._most(device))
        if rest:
            # The thread must not be inside PyTorch when the interpreter shuts down.
            atexit.register(self._over.set)
            threading.Thread(
                target=self._watch, args=(rest, report_failure), name="gpulease-limit", daemon=True
            ).start()

    def of(self, device: int) -> "int | None":
        """Return the bytes that the pool on a device may have; None if the lease is released."""
        if self._lease.lifted:
            return None
        return self._limited.get(device, self._most(device))

    def set(self, device: int, fraction: float) -> Any:
        """Give the script the fraction of a device that it asks for, or what is free."""
        with self._lock:
            size = min(int(fraction * _total(self._torch, device)), self._most(device))
            gpu = _gpu_of(self._torch, self._lease, device)
            if gpu is not None and device in self._limited:
                size = self._lease.resize("torch", gpu, size)
            elif gpu is not None:
                size = self._take(gpu, device, size)
            self._limited[device] = size
            return self._hand(device, size)

    def lift(self) -> None:
        """Remove the limit from each device."""
        self._over.set()
        with self._lock, self._same_current_device():
            for device in sorted(self._limited):
                self._set_fraction(1.0, device)

    def _limit(self, device: int) -> None:
        with self._lock:
            if device not in self._limited and not self._over.is_set():
                gpu, most = _gpu_of(self._torch, self._lease, device), self._most(device)
                size = most if gpu is None else self._take(gpu, device, None)
                self._limited[device] = min(size, most)
                self._hand(device, min(size, most))

    def _take(self, gpu: "dict[str, Any]", device: int, wanted: "int | None") -> int:
        asked = [each * _total(self._torch, device) for each in _requested_fractions()]
        if wanted is None and asked:
            wanted = int(min(asked))
        return self._lease.take("torch", gpu, wanted, functools.partial(self._lower, device))

    def _lower(self, device: int, size: int) -> int:
        """Lower the limit of a device to `size`, or what the pool holds; for another process."""
        if not self._lock.acquire(blocking=False):
            return UNCHANGED  # the script is about to set a limit
        try:
            reserved = self._torch.cuda.memory_reserved
            size = max(size, reserved(device))
            self._hand(device, size)
            held = int(reserved(device))  # it may have grown meanwhile, and cannot any more
            if held > size:
                self._hand(device, held)
            self._limited[device] = max(size, held)
            return self._limited[device]
        finally:
            self._lock.release()

    def _most(self, device: int) -> int:
        """Return the bytes of the largest pool that the lease and the user allow."""
        total = _total(self._torch, device)
        gpu = _gpu_of(self._torch, self._lease, device)
        gpus = self._lease.gpus if gpu is None else [gpu]
        pool = min(self._lease.most("torch", each) for each in gpus)
        return min([pool] + [int(each * total) for each in _requested_fractions()])

    def _hand(self, device: int, size: int) -> Any:
        # PyTorch multiplies and truncates. Subtracting a little keeps the result within the limit.
        fraction = size / _total(self._torch, device) - 1e-9
        return self._set_fraction(min(1.0, max(1e-9, fraction)), device)

    def _own(self, devices: int) -> "int | None":
        """Return the device of this process if it is one of several ranks, each with a device."""
        rank, ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        is_rank = devices > 1 and rank.isdigit() and ranks != "1"
        return int(rank) % devices if is_rank else None

    def _watch(self, devices: "list[int]", report_failure: ReportFailure) -> None:
        """Limit this process on further GPUs once it has a context there.

        In a thread, since C++ creates most contexts without calling a hook. A thread has its own
        current device.
        """
        with reporting(report_failure, "PyTorch is not limited to the lease on every GPU"):
            while devices and not self._over.wait(POLL_EVERY):
                if self._torch.cuda.is_initialized():
                    for device in list(devices):
                        if self._torch._C._cuda_hasPrimaryContext(device):
                            devices.remove(device)
                            self._limit_late(device)

    def _limit_late(self, device: int) -> None:
        try:
            self._limit(device)
        except LeaseTooSmall as error:
            # The context exists. From now on PyTorch is out of memory there.
            self._limited[device] = 0
            self._hand(device, 0)
            sys.stderr.write("gpulease: {}\n".format(error))

    @contextmanager
    def _same_current_device(self) -> Iterator[None]:
        """Restore the current device of this thread at the end."""
        cuda = self._torch.cuda
        before = cuda.current_device()
        try:
            yield
        finally:
            if cuda.current_device() != before:
                cuda.set_device(before)


# Newer names are those of PyTorch 2.10 and later.
FUNCTIONS = (
    ("torch.cuda.memory", "mem_get_info"),
    ("torch.cuda", "mem_get_info"),
    ("torch.accelerator.memory", "get_memory_info"),
    ("torch.accelerator", "get_memory_info"),
)


def _unhooked(function: Any) -> Any:
    """Return PyTorch's own function."""
    return getattr(function, "__wrapped__", function)


def _hook_memory(
    torch: Any, module: str, name: str, limit_of: Callable[[int], "int | None"]
) -> Undo:
    try:
        owner = importlib.import_module(module)
        original = _unhooked(getattr(owner, name))
    except (ImportError, AttributeError):
        return lambda: None  # an older PyTorch

    @functools.wraps(original)
    def memory(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        try:
            return _within(torch, found, limit_of, *args, **kwargs)
        except Exception:  # noqa: BLE001  (a failed hook must not end the script)
            return found

    return replace([owner], name, original, memory)


def _within(
    torch: Any,
    found: "tuple[int, int]",
    limit_of: Callable[[int], "int | None"],
    device: Any = None,
    **others: Any,
) -> "tuple[int, int]":
    """Return (free, total) of a device, reduced to its pool."""
    cuda = torch.cuda
    if device is None:
        number = cuda.current_device()
    else:
        number = cuda.memory._get_device_index(device, optional=True)
    limit = limit_of(number)
    if limit is None:
        return found
    free, total = found
    return min(free, max(0, limit - cuda.memory_reserved(number))), min(total, limit)
