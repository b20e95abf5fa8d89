"""Hold PyTorch to the lease: each visible GPU's caching allocator gets the pool's share of it.

The fraction is queued by torch.cuda._lazy_call, and so set when the script first uses CUDA: to set
it at import would create a CUDA context in every process that only imports torch, and break those
that fork afterwards. The public function that sets it is wrapped, so that a script can lower its
share and not raise it.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

from . import report
from .lease import Lease, LeaseTooSmall
from .torch_devices import Limits, total

Trouble = Callable[[str], None]
Undo = Callable[[], None]

SETTER = "set_per_process_memory_fraction"
# In either of these a user may have asked for less (PyTorch 2.10 and later).
CONFIGURATIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
KEY = "per_process_memory_fraction:"
WAY_OUT = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""With it, set to whatever, memory is taken outside the pool; read at the first allocation."""


def install(torch: Any, raw: str, trouble: Trouble) -> Undo:
    """Hook the PyTorch that was just imported; `raw` is the lease as JSON.

    What is returned lifts the limit again, also from a PyTorch that has used the GPU meanwhile.
    """
    lease = Lease(raw)
    if lease.simulated:
        return lease.lift
    cuda = getattr(torch, "cuda", None)
    missing = [name for name in ("_lazy_call", SETTER) if not hasattr(cuda, name)]
    if missing:
        version = getattr(torch, "__version__", "of unknown version")
        trouble(
            "PyTorch {} is not held to the lease at torch.cuda.{}".format(
                version, ", torch.cuda.".join(missing)
            )
        )
    if SETTER in missing:
        return lease.lift
    plain = getattr(cuda, SETTER)
    limits = Limits(torch, plain, lambda device: _allowed(torch, lease, device))
    undo = _hook_setter(torch, plain, lease, limits)
    if not missing:
        cuda._lazy_call(_limiter(torch, limits, lease, trouble))

    def lift() -> None:
        lease.lift()
        undo()
        if cuda.is_initialized():
            limits.lift()

    return lift


def _limiter(torch: Any, limits: Limits, lease: Lease, trouble: Trouble) -> Callable[[], None]:
    """Return what PyTorch calls once CUDA is ready."""

    def limit() -> None:
        if lease.lifted:
            return
        os.environ.pop(WAY_OUT, None)
        if torch.cuda.device_count():
            lease.check("torch", "PyTorch")
        try:
            limits.begin(trouble)
            report.begin(lease, "torch", torch.__version__, lambda: _pools(torch.cuda, lease))
        except Exception as error:  # noqa: BLE001  (a failure of ours must not end the script)
            trouble("PyTorch is not held to the lease: {}: {}".format(type(error).__name__, error))

    return limit


def _hook_setter(torch: Any, plain: Any, lease: Lease, limits: Limits) -> Undo:
    cuda = torch.cuda

    @functools.wraps(plain)
    def set_per_process_memory_fraction(fraction: Any, device: Any = None) -> Any:
        # What is no fraction at all, PyTorch refuses in its own words.
        if not isinstance(fraction, float) or lease.lifted or not 0 <= fraction <= 1:
            return plain(fraction, device)
        place = _place(cuda, device)
        found = plain(min(fraction, _allowed_at(torch, lease, place)), device)
        if place is not None:
            limits.note(place)
        return found

    places = [place for place in (cuda, getattr(cuda, "memory", None)) if hasattr(place, SETTER)]
    for place in places:
        setattr(place, SETTER, set_per_process_memory_fraction)

    def undo() -> None:
        for place in places:
            if getattr(place, SETTER) is set_per_process_memory_fraction:
                setattr(place, SETTER, plain)

    return undo


def _place(cuda: Any, device: Any) -> int | None:
    """Return the device that a caller of PyTorch named, in any of its ways."""
    try:
        return int(
            cuda.current_device() if device is None else cuda.memory._get_device_index(device)
        )
    except LeaseTooSmall:
        raise
    except Exception:  # noqa: BLE001  (no such device, no CUDA: PyTorch is about to say so itself)
        return None


def _allowed_at(torch: Any, lease: Lease, place: int | None) -> float:
    try:
        if place is not None:
            return _allowed(torch, lease, place)
    except Exception:  # noqa: BLE001  (as above)
        pass
    return min(_share(gpu, gpu["total"]) for gpu in lease.gpus)


def _allowed(torch: Any, lease: Lease, device: int) -> float:
    """Return the share that the pool may have of what PyTorch takes for all of a device."""
    whole = total(torch, device)
    gpus = lease.named(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if torch.cuda.device_count() == len(gpus):
        return _share(gpus[device], whole)
    # The variable was changed after CUDA had read it: which is which is unknown.
    return min(_share(gpu, whole) for gpu in lease.gpus)


def _share(gpu: dict[str, Any], total: int) -> float:
    # PyTorch multiplies the two again and cuts off: a little less never makes it more.
    share = gpu["pools"]["torch"] / total - 1e-9
    return max(1e-9, min([share, 1.0] + _asked_for()))


def _asked_for() -> list[float]:
    """Return the shares that the variables of PyTorch ask for."""
    found = []
    for name in CONFIGURATIONS:
        for part in os.environ.get(name, "").replace(" ", "").split(","):
            if part.startswith(KEY):
                try:
                    found.append(float(part[len(KEY) :]))
                except ValueError:
                    pass  # PyTorch refuses it in its own words
    return [share for share in found if 0 < share <= 1]


def _pools(cuda: Any, lease: Lease) -> list[dict[str, Any]]:
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
