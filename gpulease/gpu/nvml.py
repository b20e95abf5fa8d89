"""Reads the GPUs of this machine through NVML, with a deadline for each call of the driver.

One lane for each GPU keeps a hanging one from holding up the others. One more lists the GPUs when
NVML is initialised: at the start, with growing pauses while the whole driver is away, and once a
GPU that could not be read is seen to answer in a new session. Their health is listened to on lanes
of its own, within the same sessions of NVML.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid
from gpulease.domain.health import Heard
from gpulease.errors import NoGpus
from gpulease.gpu import nvml_binding
from gpulease.gpu.call_thread import Call, CallThread, Monotonic, Retry
from gpulease.gpu.devices import Device, in_order, list_devices, match
from gpulease.gpu.health import HealthListener
from gpulease.gpu.mig import read_with_parts, unread
from gpulease.gpu.new_session import NewSession
from gpulease.gpu.nvml_binding import DriverGone, Handle, NvmlFailure
from gpulease.gpu.nvml_errors import no_answer, no_devices, refusal
from gpulease.units import format_span

_LONGEST_PAUSE = timedelta(minutes=1)
"""Between attempts while no GPU can be read: nothing is disturbed by them."""
_DEADLINES_OF_A_READING = 5
"""How many times the deadline of one call a reading may take, which is many calls."""
_LONGEST_READING_S = 20.0
"""The loop that grants waits for two readings at most; the unit's WatchdogSec is longer."""
START_WITHIN = timedelta(minutes=2)
"""For all GPUs of a machine to wake up; the unit's TimeoutStartSec is longer."""

T = TypeVar("T")
_Readings = tuple[GpuReading, ...]


class NoAnswer(Exception):
    """The driver did not answer within the deadline, or has no such GPU at this moment."""


@dataclass(frozen=True, slots=True)
class _Listing:
    driver: str | None
    library: str | None
    devices: tuple[Device, ...]


def _stop(ears: HealthListener) -> None:
    ears.free()
    nvml_binding.stop()


def _list_anew(stop_first: HealthListener | None) -> _Listing:
    """Initialise NVML and list the GPUs; runs on a lane, since any of this may hang."""
    if stop_first is not None:
        _stop(stop_first)
    nvml_binding.start()
    driver = nvml_binding.ask_or_none("nvmlSystemGetDriverVersion")
    library = nvml_binding.ask_or_none("nvmlSystemGetNVMLVersion")
    return _Listing(
        None if driver is None else str(driver),
        None if library is None else str(library),
        list_devices(),
    )


class NvmlProbe:
    """The GPUs as NVML shows them. May be used from several threads."""

    def __init__(self, deadline: timedelta, first_retry: timedelta, clock: Monotonic) -> None:
        self._deadline = deadline.total_seconds()
        self._clock = clock
        self._reading = threading.Lock()
        """Held by the one read at a time."""
        self._lock = threading.Lock()
        """Held while calls are begun; never while a GPU is waited for."""
        self._lister: CallThread[_Listing] = CallThread("nvml-lister", clock)
        self._listing: Call[_Listing] | None = None
        self._lanes: dict[GpuUuid, CallThread[_Readings]] = {}
        self._parts: dict[GpuUuid, _Readings] = {}
        """The MIG devices of each GPU, as they were last read."""
        self._beside: dict[GpuUuid, CallThread[Any]] = {}
        """For calls that do not read: a reading that is due is not to wait behind them."""
        self._devices: tuple[Device, ...] = ()
        self._driver: str | None = None
        self._library: str | None = None
        self._trouble: str | None = None
        self._retry = Retry(first_retry, clock)
        self._new_session = NewSession(first_retry, clock)
        self._found: frozenset[GpuUuid] = frozenset()
        """The GPUs that a new session could read when one was last tried."""
        self._faulty: frozenset[GpuUuid] = frozenset()
        """The GPUs that this session could not read at the last look; not those that were late."""
        self._ears = HealthListener(clock)

    @classmethod
    def open(
        cls,
        deadline: timedelta = timedelta(seconds=3),
        *,
        start_within: timedelta = START_WITHIN,
        first_retry: timedelta = timedelta(seconds=2),
        clock: Monotonic = time.monotonic,
    ) -> Self:
        """Initialise NVML and list the GPUs.

        `deadline` bounds every call of the driver. A `read` takes at most five times as long, or
        20 s if that is less, or the deadline if that is more. `start_within` bounds this method
        alone, and is longer because a driver without persistence mode wakes its GPUs one after the
        other, seconds each.

        Raises:
            NoGpus: no driver, no GPU, no permission, or no answer; the message says which.
        """
        probe = cls(deadline, first_retry, clock)
        try:
            probe._adopt(probe._first_listing(start_within))
        except NoGpus:
            probe.close()
            raise
        return probe

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of every GPU by index; none is older than this call.

        A GPU whose driver takes longer than the deadline for one call, or too long for all of them
        (see `open`), stands among them with its `fault`. A call that has been under way since an
        earlier read is not waited for.
        """
        with self._reading:
            with self._lock:
                begun_at = self._clock()
                self._list_if_due(begun_at + self._deadline)
                known = [] if self._trouble is not None else self._devices
                calls = [(device, self._begin(device)) for device in known]
                if not calls:
                    return self._all_unreadable(self._trouble or "")
            try:
                collected = self._collect(calls, begun_at)
            except DriverGone as failure:
                with self._lock:
                    self._fail(str(failure))
                    return self._all_unreadable(str(failure))
            self._plan_retry([readings[0] for readings in collected])
            return tuple(reading for readings in collected for reading in readings)

    def on_gpu(self, uuid: GpuUuid, work: Callable[[Handle], T]) -> T:
        """Return what `work` makes of a GPU, beside the readings and within the deadline.

        What is begun for one GPU happens in order. Work that was not finished in time goes on.

        Raises:
            NoAnswer: it took too long, or there is no such GPU now.
            NvmlFailure: the driver refused.
        """
        until = self._clock() + self._deadline
        while True:
            call, is_ours = self._begin_beside(uuid, work, until)
            if not call.wait(until - self._clock()):
                raise NoAnswer(f"the driver has not answered for {self._age(call)}")
            if is_ours:
                answer: T = call.outcome.result()
                return answer

    def driver(self) -> str | None:
        """Return the driver's version, as it was when NVML was last initialised."""
        return self._driver

    def library(self) -> str | None:
        """Return the version of NVML itself, as it was when it was last initialised."""
        return self._library

    def health(self) -> tuple[Heard, ...]:
        """Return what was heard of the GPUs' health since the last call; waits for nothing."""
        with self._lock:
            if self._trouble is not None or self._listing is not None:
                return ()
            return self._ears.look(self._devices)

    def close(self) -> None:
        """End NVML's session, unless a call still hangs in it, and let the threads end."""
        with self._lock:
            idle = self._is_idle() and not self._lister.is_busy
            self._lister.close()
            self._new_session.close()
            self._ears.close()
            for lane in (*self._lanes.values(), *self._beside.values()):
                lane.close()
            if idle:
                last: CallThread[None] = CallThread("nvml-stop", self._clock)
                last.ask(partial(_stop, self._ears)).wait(self._deadline)
                last.close()

    def _first_listing(self, within: timedelta) -> _Listing:
        call = self._lister.ask(partial(_list_anew, stop_first=None))
        if not call.wait(within.total_seconds()):
            raise no_answer(within)
        try:
            listing = call.outcome.result()
        except NvmlFailure as failure:
            raise refusal(failure) from failure
        if not listing.devices:
            raise no_devices()
        return listing

    def _list_if_due(self, until: float) -> None:
        """Initialise NVML again if that is due, or see what became of the last attempt."""
        if self._listing is None:
            self._look_in_new_session()
            if not self._is_listing_due():
                return
            self._retry.begun()
            self._found = frozenset()
            # Never under a call that still hangs in the driver: NVML does not say that it may.
            ended = self._ears if self._is_idle() else None
            self._listing = self._lister.ask(partial(_list_anew, stop_first=ended))
        call = self._listing
        if not call.wait(min(until, call.began_at + self._deadline) - self._clock()):
            self._trouble = f"the driver is being initialised again, {self._age(call)} so far"
            return
        self._listing = None
        try:
            self._adopt(call.outcome.result())
        except NvmlFailure as failure:
            self._fail(str(failure))

    def _look_in_new_session(self) -> None:
        """Take over what a new session shows: which GPUs it reads, and their order.

        The order is that of the programs which start now.
        """
        seen = self._new_session.poll() if self._trouble is None else {}
        if seen:
            self._found = frozenset(seen)
            self._devices = in_order(
                replace(each, index=seen.get(each.uuid, each.index)) for each in self._devices
            )

    def _is_listing_due(self) -> bool:
        """Say whether NVML is to be initialised now, which takes it away from all GPUs.

        While some can be read, that is only for GPUs that a new session reads and this one does
        not, and not while a call hangs: the session could not be ended.
        """
        if self._trouble is not None:
            return self._retry.is_due
        unidentified = any(not device.is_identified for device in self._devices)
        known = {device.uuid for device in self._devices}
        wanted = self._found & self._faulty or (unidentified and self._found - known)
        return bool(wanted) and self._is_idle()

    def _adopt(self, listing: _Listing) -> None:
        if self._trouble is not None:
            # After a failure of the whole driver, calls that hang in it belong to the past.
            for uuid in [uuid for uuid, lane in self._lanes.items() if lane.is_busy]:
                self._lanes.pop(uuid).close()
            self._ears.forget()
        self._trouble = None
        self._driver = listing.driver or self._driver
        self._library = listing.library or self._library
        self._devices = match(self._devices, listing.devices)

    def _fail(self, reason: str) -> None:
        self._trouble = reason
        self._retry.wanted(_LONGEST_PAUSE)

    def _begin(self, device: Device) -> Call[_Readings]:
        if device.uuid not in self._lanes:
            self._lanes[device.uuid] = CallThread(f"nvml-{device.uuid}", self._clock)
        return self._lanes[device.uuid].ask(partial(read_with_parts, device))

    def _begin_beside(
        self, uuid: GpuUuid, work: Callable[[Handle], T], until: float
    ) -> tuple[Call[Any], bool]:
        """Begin `work`, or return the call before it that has not returned, and which of the two.

        Raises:
            NoAnswer: NVML is being initialised, or there is no such GPU now.
        """
        if not self._lock.acquire(timeout=max(0.0, until - self._clock())):
            raise NoAnswer("the driver is being initialised again")
        try:
            found = next((each for each in self._devices if each.uuid == uuid), None)
            if self._trouble is not None or found is None or found.handle is None:
                raise NoAnswer(self._trouble or "the driver does not show this GPU")
            if uuid not in self._beside:
                self._beside[uuid] = CallThread(f"nvml-set-{uuid}", self._clock)
            bound = partial(work, found.handle)
            call = self._beside[uuid].ask(bound)
            return call, call.work is bound
        finally:
            self._lock.release()

    def _collect(
        self, calls: Sequence[tuple[Device, Call[_Readings]]], begun_at: float
    ) -> list[_Readings]:
        """Return the readings of each GPU, and of its MIG devices after it.

        Raises:
            DriverGone: no GPU can be read. What one says alone is taken for its own fault.
        """
        collected, gone = [], None
        for device, call in calls:
            try:
                readings = self._answer(device, call, begun_at)
            except DriverGone as failure:
                gone = failure
                readings = (device.unread(Fault.UNREADABLE, str(failure)),)
            if readings[0].fault is not None:
                readings = tuple(unread(device, self._parts.get(device.uuid, ()), readings[0]))
            else:
                self._parts[device.uuid] = readings[1:]
            collected.append(readings)
        if gone is not None and all(readings[0].fault is not None for readings in collected):
            raise gone
        return collected

    def _answer(self, device: Device, call: Call[_Readings], begun_at: float) -> _Readings:
        """Return what came of a call, unless it is late or was begun before `begun_at`.

        What an earlier read began is older than this one: the next read has fresh figures.
        """
        whole = max(
            self._deadline, min(_DEADLINES_OF_A_READING * self._deadline, _LONGEST_READING_S)
        )
        if call.began_at >= begun_at and call.wait_while_it_goes_on(
            self._deadline, whole, self._clock
        ):
            return call.outcome.result()
        silent_for = self._clock() - call.progress_at
        detail = f"the driver has not answered for {_span(silent_for)}"
        if silent_for < self._deadline:
            detail = f"the driver is slow: it has been read for {self._age(call)}"
        return (device.unread(Fault.UNREADABLE, detail),)

    def _plan_retry(self, readings: Sequence[GpuReading]) -> None:
        faulty = [reading.uuid for reading in readings if reading.fault is not None]
        self._faulty = frozenset(uuid for uuid in faulty if not self._lanes[uuid].is_busy)
        if not faulty:
            self._retry.needless()
            self._new_session.needless()
        elif self._faulty:
            self._new_session.wanted()

    def _is_idle(self) -> bool:
        lanes = (*self._lanes.values(), *self._beside.values())
        return self._ears.is_idle and not any(lane.is_busy for lane in lanes)

    def _all_unreadable(self, reason: str) -> tuple[GpuReading, ...]:
        return tuple(
            reading
            for device in self._devices
            for reading in unread(
                device,
                self._parts.get(device.uuid, ()),
                device.unread(Fault.UNREADABLE, reason),
            )
        )

    def _age(self, call: Call[Any]) -> str:
        ended_at = self._clock() if call.ended_at is None else call.ended_at
        return _span(ended_at - call.began_at)


def _span(seconds: float) -> str:
    return format_span(timedelta(seconds=seconds))
