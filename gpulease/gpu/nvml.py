"""Reads the GPUs of this machine through NVML, with a deadline for each call of the driver.

Each GPU has a thread, so that a hanging GPU does not delay the others. Another thread lists the
GPUs when NVML is initialised: at the start, with growing pauses while the whole driver is away, and
when a GPU that could not be read answers in a new session. The threads of `HealthListener` use the
same sessions of NVML.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from gpulease.call_thread import Call, CallThread, Retry
from gpulease.domain.gpu import Fault, GpuReading, GpuUuid
from gpulease.domain.health import HealthReport
from gpulease.errors import NoGpus
from gpulease.gpu import nvml_binding
from gpulease.gpu.devices import Device, by_index, list_devices, match
from gpulease.gpu.health import HealthListener
from gpulease.gpu.links import with_links
from gpulease.gpu.new_session import NewSession
from gpulease.gpu.nvml_binding import Handle
from gpulease.gpu.nvml_errors import (
    DriverGone,
    NoAnswer,
    NvmlFailure,
    no_answer,
    no_devices,
    no_gpus,
)
from gpulease.gpu.reading import read_with_mig_devices, unreadable
from gpulease.units import format_span

_LONGEST_PAUSE = timedelta(minutes=1)
"""Between attempts while no GPU can be read: they disturb nothing."""
_DEADLINES_PER_READING = 5
"""A reading, which is many calls, may take this many times the deadline of one call."""
_LONGEST_READING_S = 20.0
"""The scheduler waits for at most two readings; the unit's WatchdogSec is longer."""
_PRESENT = Path("/proc/driver/nvidia/gpus")
"""Has a directory for each GPU that the driver is bound to, also those that came after the session
of NVML, which does not list them."""
START_TIMEOUT = timedelta(minutes=2)
"""For all GPUs of a machine to wake up; the unit's TimeoutStartSec is longer."""

T = TypeVar("T")
_Readings = tuple[GpuReading, ...]


@dataclass(frozen=True, slots=True)
class _Listing:
    driver: str | None
    library: str | None
    devices: tuple[Device, ...]


def _stop(health: HealthListener) -> None:
    health.free()
    nvml_binding.stop()


def _start_and_list(stop_first: HealthListener | None) -> _Listing:
    """Initialise NVML and list the GPUs; runs on a thread, since any call may hang."""
    if stop_first is not None:
        _stop(stop_first)
    nvml_binding.start()
    driver = nvml_binding.ask_or_none("nvmlSystemGetDriverVersion")
    library = nvml_binding.ask_or_none("nvmlSystemGetNVMLVersion")
    return _Listing(
        None if driver is None else str(driver),
        None if library is None else str(library),
        with_links(list_devices()),
    )


class NvmlProbe:
    """The GPUs as NVML shows them. May be used from several threads."""

    def __init__(self, deadline: timedelta, first_retry: timedelta, present: Path) -> None:
        self._deadline = deadline.total_seconds()
        self._reading = threading.Lock()
        """Held for a whole `read`."""
        self._lock = threading.Lock()
        """Held while calls are started; never while waiting for a GPU."""
        self._lister: CallThread[_Listing] = CallThread("nvml-lister")
        self._listing: Call[_Listing] | None = None
        self._readers: dict[GpuUuid, CallThread[_Readings]] = {}
        self._mig_devices: dict[GpuUuid, _Readings] = {}
        """The MIG devices of each GPU, as last read."""
        self._others: dict[GpuUuid, CallThread[Any]] = {}
        """Threads for other calls than readings, so that no reading waits behind them."""
        self._devices: tuple[Device, ...] = ()
        self._driver: str | None = None
        self._library: str | None = None
        self._trouble: str | None = None
        self._retry = Retry(first_retry)
        self._new_session = NewSession(first_retry)
        self._found: frozenset[GpuUuid] = frozenset()
        """The GPUs that the latest new session could read."""
        self._faulty: frozenset[GpuUuid] = frozenset()
        """The GPUs that this session last failed to read; not those that were late."""
        self._late: set[GpuUuid] = set()
        """The GPUs whose last reading was not waited for to its end."""
        self._health = HealthListener()
        self._present = present
        self._count = 0
        """The GPUs in `present` when they were listed; NVML may leave some of them out."""

    @classmethod
    def open(
        cls,
        deadline: timedelta = timedelta(seconds=3),
        *,
        start_timeout: timedelta = START_TIMEOUT,
        first_retry: timedelta = timedelta(seconds=2),
        present: Path = _PRESENT,
    ) -> Self:
        """Initialise NVML and list the GPUs.

        Args:
            deadline: for every call of the driver. A `read` takes at most five times as long, but
                not more than 20 s or the deadline, whichever is longer.
            start_timeout: for this method; a driver without persistence mode wakes its GPUs one
                after the other, for some seconds each.
            first_retry: the first pause between attempts while a GPU cannot be read.
            present: where the driver has a directory for each GPU.

        Raises:
            NoGpus: no driver, no GPU, no permission, or no answer; the message says which.
        """
        probe = cls(deadline, first_retry, present)
        try:
            probe._adopt(probe._first_listing(start_timeout))
        except NoGpus:
            probe.close()
            raise
        return probe

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of every GPU by index; none is older than this call.

        A GPU that exceeds the deadline for one call, or the limit for all of them (see `open`), is
        among them with its `fault`. Calls that still run since an earlier read are not waited for.
        """
        with self._reading:
            with self._lock:
                begun_at = time.monotonic()
                self._list_if_due(begun_at + self._deadline)
                known = [] if self._trouble is not None else self._devices
                calls = [(device, self._start_reading(device)) for device in known]
                if not calls:
                    return self.unreadable(self._trouble or "")
            try:
                collected = self._collect(calls, begun_at)
            except DriverGone as failure:
                with self._lock:
                    self._fail(str(failure))
                    return self.unreadable(str(failure))
            self._plan_retry([readings[0] for readings in collected])
            return tuple(reading for readings in collected for reading in readings)

    def unreadable(self, reason: str) -> tuple[GpuReading, ...]:
        """Return every GPU that the driver listed, as unreadable for this reason."""
        return tuple(
            reading
            for device in self._devices
            for reading in self._with_mig_devices(device, device.unread(Fault.UNREADABLE, reason))
        )

    def on_gpu(self, uuid: GpuUuid, work: Callable[[Handle], T]) -> T:
        """Return the result of `work` on a GPU, independently of readings, within the deadline.

        Calls for one GPU run in order. Work that misses the deadline goes on.

        Raises:
            NoAnswer: the work missed the deadline, or the driver does not list the GPU.
            NvmlFailure: the driver refused.
        """
        until = time.monotonic() + self._deadline
        while True:
            call, is_ours = self._start_other(uuid, work, until)
            if not call.wait(until - time.monotonic()):
                raise NoAnswer(f"the driver has not answered for {self._age(call)}")
            if is_ours:
                answer: T = call.outcome.result()
                return answer

    def driver(self) -> str | None:
        """Return the driver's version when NVML was last initialised."""
        return self._driver

    def library(self) -> str | None:
        """Return the version of NVML when it was last initialised."""
        return self._library

    def health(self) -> tuple[HealthReport, ...]:
        """Return the reports about the GPUs' health since the last call; does not block."""
        with self._lock:
            if self._trouble is not None or self._listing is not None:
                return ()
            return self._health.poll(self._devices)

    def close(self) -> None:
        """End NVML's session, unless a call hangs in it, and let the threads end."""
        with self._lock:
            idle = self._is_idle() and not self._lister.is_busy
            self._lister.close()
            self._new_session.close()
            self._health.close()
            for thread in (*self._readers.values(), *self._others.values()):
                thread.close()
            if idle:
                last: CallThread[None] = CallThread("nvml-stop")
                last.submit(partial(_stop, self._health)).wait(self._deadline)
                last.close()

    def _first_listing(self, within: timedelta) -> _Listing:
        call = self._lister.submit(partial(_start_and_list, stop_first=None))
        if not call.wait(within.total_seconds()):
            raise no_answer(within)
        try:
            listing = call.outcome.result()
        except NvmlFailure as failure:
            raise no_gpus(failure) from failure
        if not listing.devices:
            raise no_devices()
        return listing

    def _list_if_due(self, until: float) -> None:
        """Initialise NVML again if that is due, or collect the result of the last attempt."""
        if self._listing is None:
            self._adopt_new_session()
            if not self._is_listing_due():
                return
            self._retry.start()
            self._found = frozenset()
            # Not while a call hangs in the driver: NVML does not document that as safe.
            ended = self._health if self._is_idle() else None
            self._listing = self._lister.submit(partial(_start_and_list, stop_first=ended))
        call = self._listing
        if not call.wait(min(until, call.began_at + self._deadline) - time.monotonic()):
            self._trouble = f"the driver is being initialised again, {self._age(call)} so far"
            return
        self._listing = None
        try:
            self._adopt(call.outcome.result())
        except NvmlFailure as failure:
            self._fail(str(failure))

    def _adopt_new_session(self) -> None:
        """Take over which GPUs a new session reads, and their indices.

        The indices are those that a program sees which starts now.
        """
        seen = self._new_session.poll() if self._trouble is None else {}
        if seen:
            self._found = frozenset(seen)
            self._devices = by_index(
                replace(each, index=seen.get(each.uuid, each.index)) for each in self._devices
            )

    def _is_listing_due(self) -> bool:
        """Tell whether to initialise NVML now, which interrupts all GPUs.

        While some can be read, only for GPUs that a new session reads and this one does not, such
        as those that came later, and not while a call hangs: the session could not be ended.
        """
        if self._trouble is not None:
            return self._retry.is_due
        known = {device.uuid for device in self._devices}
        recovered = self._found & self._faulty or self._found - known
        return bool(recovered) and self._is_idle()

    def _adopt(self, listing: _Listing) -> None:
        if self._trouble is not None:
            # Calls that hang since before a failure of the whole driver do not matter any more.
            for uuid in [uuid for uuid, thread in self._readers.items() if thread.is_busy]:
                self._readers.pop(uuid).close()
            self._health.forget()
        self._trouble = None
        self._driver = listing.driver or self._driver
        self._library = listing.library or self._library
        self._devices = match(self._devices, listing.devices)
        self._count = self._count_present()

    def _fail(self, reason: str) -> None:
        self._trouble = reason
        self._retry.schedule(_LONGEST_PAUSE)

    def _start_reading(self, device: Device) -> Call[_Readings]:
        if device.uuid not in self._readers:
            self._readers[device.uuid] = CallThread(f"nvml-{device.uuid}")
        return self._readers[device.uuid].submit(partial(read_with_mig_devices, device))

    def _start_other(
        self, uuid: GpuUuid, work: Callable[[Handle], T], until: float
    ) -> tuple[Call[Any], bool]:
        """Start `work`, or return the running call before it; and whether it is this work's.

        Raises:
            NoAnswer: NVML is being initialised, or the driver does not list the GPU.
        """
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise NoAnswer("the driver is being initialised again")
        try:
            found = next((each for each in self._devices if each.uuid == uuid), None)
            if self._trouble is not None or found is None or found.handle is None:
                raise NoAnswer(self._trouble or "the driver does not list this GPU")
            if uuid not in self._others:
                self._others[uuid] = CallThread(f"nvml-set-{uuid}")
            bound = partial(work, found.handle)
            call = self._others[uuid].submit(bound)
            return call, call.work is bound
        finally:
            self._lock.release()

    def _collect(
        self, calls: Sequence[tuple[Device, Call[_Readings]]], begun_at: float
    ) -> list[_Readings]:
        """Return the readings of each GPU and its MIG devices.

        Raises:
            DriverGone: no GPU can be read. From some GPUs only, it counts as their fault.
        """
        collected, gone = [], None
        for device, call in calls:
            try:
                readings = self._answer(device, call, begun_at)
            except DriverGone as failure:
                gone = failure
                readings = (device.unread(Fault.UNREADABLE, str(failure)),)
            if readings[0].fault is not None:
                readings = self._with_mig_devices(device, readings[0])
            else:
                self._mig_devices[device.uuid] = readings[1:]
            collected.append(readings)
        if gone is not None and all(readings[0].fault is not None for readings in collected):
            raise gone
        return collected

    def _answer(self, device: Device, call: Call[_Readings], begun_at: float) -> _Readings:
        """Return the result of a call, unless it is late or began before `begun_at`.

        A call of an earlier read is older than this one; the next read has fresh figures.
        """
        total = max(
            self._deadline, min(_DEADLINES_PER_READING * self._deadline, _LONGEST_READING_S)
        )
        if call.began_at >= begun_at and call.wait_while_progressing(self._deadline, total):
            self._late.discard(device.uuid)
            return call.outcome.result()
        self._late.add(device.uuid)
        silent_for = time.monotonic() - call.progress_at
        detail = f"the driver has not answered for {_span(silent_for)}"
        if silent_for < self._deadline:
            detail = f"the driver is slow: the reading has taken {self._age(call)} so far"
        return (device.unread(Fault.UNREADABLE, detail),)

    def _plan_retry(self, readings: Sequence[GpuReading]) -> None:
        faulty = [reading.uuid for reading in readings if reading.fault is not None]
        self._faulty = frozenset(faulty) - self._late
        has_more = self._count_present() > self._count
        if not faulty:
            self._retry.reset()
        if self._faulty or has_more:
            self._new_session.schedule()
        elif not faulty:
            self._new_session.cancel()

    def _count_present(self) -> int:
        try:
            return sum(1 for _ in self._present.iterdir())
        except OSError:
            return 0

    def _is_idle(self) -> bool:
        threads = (*self._readers.values(), *self._others.values())
        return self._health.is_idle and not any(thread.is_busy for thread in threads)

    def _with_mig_devices(self, device: Device, reading: GpuReading) -> _Readings:
        return tuple(unreadable(device, self._mig_devices.get(device.uuid, ()), reading))

    def _age(self, call: Call[Any]) -> str:
        ended_at = time.monotonic() if call.ended_at is None else call.ended_at
        return _span(ended_at - call.began_at)


def _span(seconds: float) -> str:
    return format_span(timedelta(seconds=seconds))
