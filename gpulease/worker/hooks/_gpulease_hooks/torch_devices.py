"""On which devices a PyTorch is limited, and when; and of what its shares are.

Before 2.10 setting a share makes its device the current one of the thread, and opens a CUDA context
there, hundreds of MiB (NativeCachingAllocator::setMemoryFraction calls cudaSetDevice and
cudaMemGetInfo). So the current device is put back; and a rank of torchrun, which works on a GPU of
its own beside other ranks on theirs, is limited on the others when it comes to use them.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator

OPENS_NONE = (2, 10)
"""The first version in which a share is set without a context."""
LOOK_EVERY = 0.2
"""Seconds until a rank is limited on a GPU that is not its own."""

Share = Callable[[int], float]
Trouble = Callable[[str], None]


def is_old(torch: Any) -> bool:
    """Tell whether setting a share moves to its device and opens a context there."""
    parts = str(getattr(torch, "__version__", "")).split(".")[:2]
    return all(part.isdigit() for part in parts) and tuple(map(int, parts)) < OPENS_NONE


def total(torch: Any, device: int) -> int:
    """Return the bytes that this PyTorch multiplies a share with.

    Where the driver limits a job, not every call of CUDA shows it the limit as the device's size.
    """
    if is_old(torch) and hasattr(torch.cuda, "mem_get_info"):
        return int(torch.cuda.mem_get_info(device)[1])
    return int(torch.cuda.get_device_properties(device).total_memory)


class Limits:
    """The devices of one process that have a share by now."""

    def __init__(self, torch: Any, plain: Callable[[float, int], Any], share: Share) -> None:
        self._torch = torch
        self._plain = plain
        self._share = share
        self._set: set[int] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def begin(self, trouble: Trouble) -> None:
        """Limit this process; called once CUDA is ready."""
        devices = range(self._torch.cuda.device_count())
        own = self._own(len(devices))
        rest = [device for device in devices if own not in (None, device)]
        with self._staying():
            for device in devices:
                if device not in rest:
                    self._limit(device)
        if rest:
            # An interpreter that is being taken down must not find us inside PyTorch.
            atexit.register(self._over.set)
            threading.Thread(
                target=self._watch, args=(rest, trouble), name="gpulease-limit", daemon=True
            ).start()

    def note(self, device: int) -> None:
        """Leave a device as the script has set it, within the lease."""
        self._set.add(device)

    def lift(self) -> None:
        """Give back all of each device."""
        self._over.set()
        with self._lock, self._staying():
            for device in sorted(self._set):
                self._plain(1.0, device)

    def _limit(self, device: int) -> None:
        with self._lock:
            if device not in self._set and not self._over.is_set():
                self._plain(self._share(device), device)
                self._set.add(device)

    def _own(self, devices: int) -> int | None:
        """Return the device of this process where it is one of several ranks on as many."""
        rank, ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        is_rank = rank.isdigit() and int(rank) < devices and ranks != "1"
        can_look = hasattr(getattr(self._torch, "_C", None), "_cuda_hasPrimaryContext")
        return int(rank) if is_rank and can_look and is_old(self._torch) else None

    def _watch(self, devices: list[int], trouble: Trouble) -> None:
        """Limit a rank on the GPUs of others once it has a context there, by whatever way.

        In a thread, since it is mostly C++ that makes one, and asks no hook. A thread has a current
        device of its own.
        """
        try:
            while devices and not self._over.wait(LOOK_EVERY):
                if self._torch.cuda.is_initialized():
                    for device in list(devices):
                        if self._torch._C._cuda_hasPrimaryContext(device):
                            self._limit(device)
                            devices.remove(device)
        except Exception as error:  # noqa: BLE001  (a failure of ours must not end the script)
            why = "{}: {}".format(type(error).__name__, error)
            trouble("PyTorch is not held to the lease on every GPU: " + why)

    @contextmanager
    def _staying(self) -> Iterator[None]:
        """Put the current device of this thread back at the end."""
        cuda = self._torch.cuda
        before = cuda.current_device()
        try:
            yield
        finally:
            if cuda.current_device() != before:
                cuda.set_device(before)
