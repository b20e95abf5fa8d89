"""Limits PyTorch to the lease: sets the memory fraction of the caching allocator on each GPU.

torch.cuda._lazy_call queues that until the script first uses CUDA. Setting the fraction at import
would create a CUDA context in every process that imports torch, and break those that fork
afterwards. The public setter is wrapped, so that a script can lower its fraction but not raise it.

Before 2.10, setting a fraction makes its device the thread's current one and opens a CUDA context
there, hundreds of MiB (NativeCachingAllocator::setMemoryFraction calls cudaSetDevice and
cudaMemGetInfo). So the current device is restored. A rank of torchrun works on one GPU beside other
ranks on theirs, so it is limited on the others only when it uses them.
"""

import atexit
import functools
import os
import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator

from . import report, torch_memory
from .lease import Lease, LeaseTooSmall

ReportFailure = Callable[[str], None]
Undo = Callable[[], None]

SETTER = "set_per_process_memory_fraction"
# In either of these a user may ask for less (PyTorch 2.10 and later).
CONFIGURATIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
KEY = "per_process_memory_fraction:"
UNLIMITED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""With any value, memory is allocated outside the pool; read at the first allocation."""
OPENS_NO_CONTEXT = (2, 10)
"""The first version that sets a fraction without opening a context."""
POLL_EVERY = 0.2
"""Seconds until a rank is limited on the GPU of another rank."""


def install(torch: Any, raw: str, report_failure: ReportFailure) -> Undo:
    """Hook the imported PyTorch; `raw` is the lease as JSON.

    The returned function removes the limit, even from a PyTorch that has used the GPU.
    """
    lease = Lease(raw)
    if lease.options.get("deterministic"):  # an older daemon sends none
        _make_deterministic(torch, report_failure)
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
    limits = _Limits(torch, original, lambda device: _allowed(torch, lease, device))
    undo = _hook_setter(torch, original, lease, limits)
    undo_memory = torch_memory.hook(torch, lambda device: _limit(torch, lease, device))
    if not missing:
        cuda._lazy_call(_limiter(torch, limits, lease, report_failure))

    def lift() -> None:
        lease.lift()
        undo()
        undo_memory()
        if cuda.is_initialized():
            limits.lift()

    return lift


def _make_deterministic(torch: Any, report_failure: ReportFailure) -> None:
    try:
        torch.use_deterministic_algorithms(True)  # from 1.8 on
        torch.backends.cudnn.benchmark = False
    except Exception as error:  # noqa: BLE001  (a failed hook must not end the script)
        report_failure("PyTorch is not deterministic: {}: {}".format(type(error).__name__, error))


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
        try:
            limits.begin(report_failure)
            report.begin(lease, "torch", torch.__version__, lambda: _pools(torch.cuda, lease))
        except Exception as error:  # noqa: BLE001  (a failed hook must not end the script)
            report_failure(
                "PyTorch is not limited to the lease: {}: {}".format(type(error).__name__, error)
            )

    return limit


def _hook_setter(torch: Any, original: Any, lease: Lease, limits: "_Limits") -> Undo:
    cuda = torch.cuda

    @functools.wraps(original)
    def set_per_process_memory_fraction(fraction: Any, device: Any = None) -> Any:
        # PyTorch itself refuses a value that is not a fraction.
        if not isinstance(fraction, float) or lease.lifted or not 0 <= fraction <= 1:
            return original(fraction, device)
        number = _device_number(cuda, device)
        found = original(min(fraction, _allowed_at(torch, lease, number)), device)
        if number is not None:
            limits.note(number)
        return found

    owners = [owner for owner in (cuda, getattr(cuda, "memory", None)) if hasattr(owner, SETTER)]
    for owner in owners:
        setattr(owner, SETTER, set_per_process_memory_fraction)

    def undo() -> None:
        for owner in owners:
            if getattr(owner, SETTER) is set_per_process_memory_fraction:
                setattr(owner, SETTER, original)

    return undo


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


def _allowed_at(torch: Any, lease: Lease, number: "int | None") -> float:
    try:
        if number is not None:
            return _allowed(torch, lease, number)
    except Exception:  # noqa: BLE001  (as above)
        pass
    return min(_fraction(gpu, gpu["total"]) for gpu in lease.gpus)


def _allowed(torch: Any, lease: Lease, device: int) -> float:
    """Return the fraction that the pool may have of the total that PyTorch sees."""
    total = _total(torch, device)
    gpus = lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if torch.cuda.device_count() == len(gpus):
        return _fraction(gpus[device], total)
    # The variable was changed after CUDA had read it. Which GPU is which is unknown.
    return min(_fraction(gpu, total) for gpu in lease.gpus)


def _limit(torch: Any, lease: Lease, device: int) -> "int | None":
    """Return the bytes that the pool on a device may have; None if the lease is released."""
    return None if lease.lifted else int(_allowed(torch, lease, device) * _total(torch, device))


def _fraction(gpu: "dict[str, Any]", total: int) -> float:
    # PyTorch multiplies and truncates. Subtracting a little keeps the result within the limit.
    fraction = gpu["pools"]["torch"] / total - 1e-9
    return max(1e-9, min([fraction, 1.0] + _requested_fractions()))


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
    gpus = lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if not cuda.is_initialized() or cuda.device_count() != len(gpus):
        return []
    return [
        {
            "gpu": gpu["uuid"],
            "pool": cuda.memory_reserved(device),
            "peak": cuda.max_memory_reserved(device),
            "limit": gpu["pools"]["torch"],
        }
        for device, gpu in enumerate(gpus)
    ]


def _is_old(torch: Any) -> bool:
    """Tell whether setting a fraction makes its device current and opens a context there."""
    parts = str(getattr(torch, "__version__", "")).split(".")[:2]
    return all(part.isdigit() for part in parts) and tuple(map(int, parts)) < OPENS_NO_CONTEXT


def _total(torch: Any, device: int) -> int:
    """Return the bytes that this PyTorch multiplies a fraction with.

    Where the driver limits a job, only some calls of CUDA return the limit as the total.
    """
    if _is_old(torch) and hasattr(torch.cuda, "mem_get_info"):
        return int(torch_memory.unhooked(torch.cuda.mem_get_info)(device)[1])
    return int(torch.cuda.get_device_properties(device).total_memory)


class _Limits:
    """Sets the memory fraction on the devices of this process, and removes it again."""

    def __init__(
        self,
        torch: Any,
        set_fraction: Callable[[float, int], Any],
        fraction_of: Callable[[int], float],
    ) -> None:
        self._torch = torch
        self._set_fraction = set_fraction
        self._fraction_of = fraction_of
        self._limited: set[int] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def begin(self, report_failure: ReportFailure) -> None:
        """Limit this process; called once CUDA is ready."""
        devices = range(self._torch.cuda.device_count())
        own = self._own(len(devices))
        rest = [device for device in devices if own not in (None, device)]
        with self._same_current_device():
            for device in devices:
                if device not in rest:
                    self._limit(device)
        if rest:
            # The thread must not be inside PyTorch when the interpreter shuts down.
            atexit.register(self._over.set)
            threading.Thread(
                target=self._watch, args=(rest, report_failure), name="gpulease-limit", daemon=True
            ).start()

    def note(self, device: int) -> None:
        """Note that the script has set the fraction of a device, within the lease."""
        self._limited.add(device)

    def lift(self) -> None:
        """Remove the limit from each device."""
        self._over.set()
        with self._lock, self._same_current_device():
            for device in sorted(self._limited):
                self._set_fraction(1.0, device)

    def _limit(self, device: int) -> None:
        with self._lock:
            if device not in self._limited and not self._over.is_set():
                self._set_fraction(self._fraction_of(device), device)
                self._limited.add(device)

    def _own(self, devices: int) -> "int | None":
        """Return the device of this process if it is one of several ranks, each with a device."""
        rank, ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        is_rank = rank.isdigit() and int(rank) < devices and ranks != "1"
        can_look = hasattr(getattr(self._torch, "_C", None), "_cuda_hasPrimaryContext")
        return int(rank) if is_rank and can_look and _is_old(self._torch) else None

    def _watch(self, devices: "list[int]", report_failure: ReportFailure) -> None:
        """Limit a rank on the GPUs of other ranks once it has a context there.

        In a thread, since C++ creates most contexts without calling a hook. A thread has its own
        current device.
        """
        try:
            while devices and not self._over.wait(POLL_EVERY):
                if self._torch.cuda.is_initialized():
                    for device in list(devices):
                        if self._torch._C._cuda_hasPrimaryContext(device):
                            self._limit(device)
                            devices.remove(device)
        except Exception as error:  # noqa: BLE001  (a failed hook must not end the script)
            report_failure(
                "PyTorch is not limited to the lease on every GPU: {}: {}".format(
                    type(error).__name__, error
                )
            )

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
