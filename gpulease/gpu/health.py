"""Collects the GPUs' health through NVML: XID events, memory errors and driver modes.

Each GPU has an event set and a thread, so that a hanging GPU delays neither the others nor the
readings of memory. `poll` starts a short round on every idle thread and returns the results of the
rounds before. It never blocks.

An event set belongs to a session of NVML. No round begins while NVML is being initialised again,
and the sets are freed before a session ends; see `NvmlProbe`.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from gpulease.call_thread import Call, CallThread
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.health import GpuModes, HealthFigures, HealthReport
from gpulease.gpu import nvml_binding
from gpulease.gpu.devices import Device
from gpulease.gpu.nvml_binding import Handle
from gpulease.gpu.nvml_errors import DriverGone, GpuLost, NvmlFailure

_FIGURES_EVERY = timedelta(seconds=10)
_LONGEST_ROUND = timedelta(seconds=0.5)
"""For which one round takes queued events; the next round takes the rest.

A program can cause thousands of events in a second, with an event of the hardware queued behind
them. So the bound is a time, shorter than the time between two polls, and not a count."""
_EVENT_WAIT_MS = 1
"""Wait for an event when none is queued; with 0, some releases do not check the queue."""


@dataclass(slots=True)
class _Listener:
    """The state of one GPU's rounds; only the thread changes it while a round runs."""

    thread: CallThread[HealthReport]
    events: Any = None
    """The event set; None if there is none yet, or XIDs are not supported."""
    listens: bool | None = None
    """Whether XIDs are reported; None while that is not known."""
    read_at: float | None = None
    """When the figures were last read."""
    figures: HealthFigures = field(default_factory=HealthFigures)
    """The latest that are known."""
    round: Call[HealthReport] | None = field(default=None)


class HealthListener:
    """The threads and event sets of all GPUs; called by one thread at a time."""

    def __init__(self) -> None:
        self._listeners: dict[GpuUuid, _Listener] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no round is running, so that NVML's session may be ended."""
        return not any(each.thread.is_busy for each in self._listeners.values())

    def poll(self, devices: Iterable[Device]) -> tuple[HealthReport, ...]:
        """Return the reports since the last poll, and start new rounds."""
        reports = []
        for device in devices:
            if device.uuid not in self._listeners:
                name = f"nvml-health-{device.uuid}"
                self._listeners[device.uuid] = _Listener(CallThread(name))
            listener = self._listeners[device.uuid]
            if listener.thread.is_busy:
                continue
            if listener.round is not None and listener.round.outcome.exception() is None:
                # The report of a session that has ended counts, but nothing listens now.
                reports.append(replace(listener.round.outcome.result(), listens=listener.listens))
            listener.round = None
            if device.handle is not None:
                listener.round = listener.thread.submit(
                    partial(self._round, device.uuid, device.handle, listener)
                )
        return tuple(reports)

    def free(self) -> None:
        """Free the event sets, before their session ends."""
        for listener in self._listeners.values():
            if listener.events is not None and not listener.thread.is_busy:
                _try("nvmlEventSetFree", listener.events)
                listener.events, listener.listens = None, None

    def forget(self) -> None:
        """Drop the event sets of a session that has ended, and the threads that hang in it."""
        for uuid, listener in list(self._listeners.items()):
            listener.events, listener.listens = None, None
            if listener.thread.is_busy:
                self._listeners.pop(uuid).thread.close()

    def close(self) -> None:
        """Let the threads end."""
        for listener in self._listeners.values():
            listener.thread.close()

    def _round(self, uuid: GpuUuid, handle: Handle, listener: _Listener) -> HealthReport:
        """Take the events of one GPU; read its figures if they are due or there were events."""
        if listener.listens is None:
            listener.events, listener.listens = _listen_to(handle)
        xids = _take_xids(listener.events) if listener.events is not None else ()
        due = listener.read_at is None or (
            time.monotonic() - listener.read_at >= _FIGURES_EVERY.total_seconds()
        )
        if not due and not xids:
            return HealthReport(uuid, listens=listener.listens)
        try:
            figures, modes = read_figures(handle, listener.figures), read_modes(handle)
        except NvmlFailure:
            # The GPU's readings report that it cannot be read. The events still count.
            return HealthReport(uuid, xids, listens=listener.listens)
        listener.read_at, listener.figures = time.monotonic(), figures
        return HealthReport(uuid, xids, figures, listener.listens, modes)


def _listen_to(handle: Handle) -> tuple[Any, bool | None]:
    """Return an event set for a GPU's XIDs, and whether it gets them; None: unknown for now."""
    kinds = _try("nvmlDeviceGetSupportedEventTypes", handle)
    if kinds is not None and not int(kinds) & nvml_binding.XID_EVENT:
        return None, False
    events = None
    try:
        events = nvml_binding.call("nvmlEventSetCreate")
        nvml_binding.call("nvmlDeviceRegisterEvents", handle, nvml_binding.XID_EVENT, events)
    except (GpuLost, DriverGone):
        listens = None
    except NvmlFailure as failure:
        listens = False if failure.is_not_supported else None
    else:
        return events, True
    if events is not None:
        _try("nvmlEventSetFree", events)
    return None, listens


def _take_xids(events: Any) -> tuple[int, ...]:
    xids: list[int] = []
    until = time.monotonic() + _LONGEST_ROUND.total_seconds()
    while time.monotonic() < until:
        event = _try(nvml_binding.EVENT_WAIT, events, _EVENT_WAIT_MS)
        if event is None:
            break
        if int(event.eventType) & nvml_binding.XID_EVENT:
            xids.append(int(event.eventData))
    return tuple(xids)


def read_figures(handle: Handle, before: HealthFigures) -> HealthFigures:
    """Read the memory errors and the recovery action of a GPU; unsupported figures are None.

    A figure that cannot be read now keeps its value of `before`: a fault does not end because the
    driver does not answer.

    Raises:
        GpuLost, DriverGone: the GPU cannot be read.
    """
    errors = _latest(
        partial(
            nvml_binding.ask,
            "nvmlDeviceGetTotalEccErrors",
            handle,
            *nvml_binding.UNCORRECTED_SINCE_LOADED,
        ),
        before.uncorrectable,
    )
    rows = _latest(
        partial(nvml_binding.ask, "nvmlDeviceGetRemappedRows", handle),
        (None, None, before.remap_pending, before.remap_failed),
    )
    pages = _latest(
        partial(nvml_binding.ask, "nvmlDeviceGetRetiredPagesPendingStatus", handle),
        before.pages_pending,
    )
    recovery = partial(nvml_binding.field, handle, nvml_binding.RECOVERY_ACTION)
    return HealthFigures(
        None if errors is None else int(errors),
        _flag(None if rows is None else rows[2]),
        _flag(None if rows is None else rows[3]),
        _flag(pages),
        _latest(recovery, before.recovery),
    )


def _latest(read: Callable[[], Any], before: Any) -> Any:
    try:
        return read()
    except (GpuLost, DriverGone):
        raise
    except NvmlFailure:
        return before


def _flag(answer: Any) -> bool | None:
    return None if answer is None else bool(answer)


def read_modes(handle: Handle) -> GpuModes:
    """Read the modes that an admin has set on a GPU.

    Raises:
        GpuLost, DriverGone: the GPU cannot be read.
    """
    ecc = nvml_binding.ask_or_none("nvmlDeviceGetEccMode", handle)
    persistence = nvml_binding.ask_or_none("nvmlDeviceGetPersistenceMode", handle)
    compute = nvml_binding.ask_or_none("nvmlDeviceGetComputeMode", handle)
    return GpuModes(
        _flag(None if ecc is None else ecc[0]),
        _flag(persistence),
        None if compute is None else int(compute),
    )


def _try(name: str, *arguments: object) -> Any:
    """Call `name`; None if it fails."""
    try:
        return nvml_binding.call(name, *arguments)
    except NvmlFailure:
        return None
