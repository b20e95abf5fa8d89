"""Listens to the GPUs' health through NVML: XID events, and what it says of their memory cells.

Each GPU has an event set and a lane of its own, so that one whose driver hangs keeps nothing from
the others, and nothing at all from those who read memory. A look begins a short round on every lane
that is idle and takes what the rounds before have heard: it never waits.

An event set belongs to a session of NVML. So no round is begun while NVML is being initialised
again, and the sets are freed before a session ends; see `NvmlProbe`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from gpulease.domain.gpu import GpuUuid
from gpulease.domain.health import Figures, Heard, Modes
from gpulease.gpu import nvml_binding
from gpulease.gpu.call_thread import Call, CallThread, Monotonic
from gpulease.gpu.devices import Device
from gpulease.gpu.nvml_binding import DriverGone, GpuLost, Handle, NvmlFailure

_FIGURES_EVERY = timedelta(seconds=10)
_TAKES_FOR = timedelta(seconds=0.5)
"""How long one round takes events that are queued; the next round takes the rest.

A program can cause thousands of events in a second, and an event of the hardware is queued behind
them. So the bound is a time, shorter than the time between two looks, and not a number."""
_AT_LEAST_MS = 1
"""How long a round listens where nothing has happened: the queue in the library is looked at."""


@dataclass(slots=True)
class _Listener:
    """What one GPU's rounds work with; only the lane touches it while a round is under way."""

    lane: CallThread[Heard]
    events: Any = None
    """The event set; None where there is none (yet)."""
    listens: bool | None = None
    read_at: float | None = None
    """When the figures were last read."""
    figures: Figures = field(default_factory=Figures)
    """The latest that are known."""
    round: Call[Heard] | None = field(default=None)


class HealthListener:
    """The lanes and event sets of all GPUs; to be called by one thread at a time."""

    def __init__(self, clock: Monotonic) -> None:
        self._clock = clock
        self._ears: dict[GpuUuid, _Listener] = {}

    @property
    def is_idle(self) -> bool:
        """Say whether no round is under way, so that NVML's session may be ended."""
        return not any(ears.lane.is_busy for ears in self._ears.values())

    def look(self, devices: Iterable[Device]) -> tuple[Heard, ...]:
        """Return what was heard since the last look, and begin new rounds."""
        heard = []
        for device in devices:
            ears = self._ears.get(device.uuid)
            if ears is None:
                lane: CallThread[Heard] = CallThread(f"nvml-health-{device.uuid}", self._clock)
                ears = self._ears[device.uuid] = _Listener(lane)
            if ears.lane.is_busy:
                continue
            if ears.round is not None and ears.round.outcome.exception() is None:
                # What a session heard counts when it has gone; but then nobody listens (yet).
                heard.append(replace(ears.round.outcome.result(), listens=ears.listens))
            ears.round = None
            if device.handle is not None:
                ears.round = ears.lane.ask(partial(self._round, device.uuid, device.handle, ears))
        return tuple(heard)

    def free(self) -> None:
        """Give the event sets back, before the session that they belong to ends."""
        for ears in self._ears.values():
            if ears.events is not None and not ears.lane.is_busy:
                _try("nvmlEventSetFree", ears.events)
                ears.events, ears.listens = None, None

    def forget(self) -> None:
        """Drop event sets of a session that has gone, and the lanes that hang in it."""
        for uuid, ears in list(self._ears.items()):
            ears.events, ears.listens = None, None
            if ears.lane.is_busy:
                self._ears.pop(uuid).lane.close()

    def close(self) -> None:
        """Let the threads end."""
        for ears in self._ears.values():
            ears.lane.close()

    def _round(self, uuid: GpuUuid, handle: Handle, ears: _Listener) -> Heard:
        """Take the events of one GPU; read its figures if they are due, or if there were any."""
        if ears.listens is None:
            ears.events, ears.listens = _listen_to(handle)
        xids = _take_xids(ears.events, self._clock) if ears.events is not None else ()
        due = ears.read_at is None or (
            self._clock() - ears.read_at >= _FIGURES_EVERY.total_seconds()
        )
        if not due and not xids:
            return Heard(uuid, listens=ears.listens)
        try:
            figures, modes = read_figures(handle, ears.figures), read_modes(handle)
        except NvmlFailure:
            # It cannot be read, which its readings say; what was heard of it counts.
            return Heard(uuid, xids, listens=ears.listens)
        ears.read_at, ears.figures = self._clock(), figures
        return Heard(uuid, xids, figures, ears.listens, modes)


def _listen_to(handle: Handle) -> tuple[Any, bool | None]:
    """Return an event set for a GPU's XIDs, and whether they can be heard; None: not just now."""
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
        listens = False if failure.is_no_such_figure else None
    else:
        return events, True
    if events is not None:
        _try("nvmlEventSetFree", events)
    return None, listens


def _take_xids(events: Any, clock: Monotonic) -> tuple[int, ...]:
    xids: list[int] = []
    until = clock() + _TAKES_FOR.total_seconds()
    while clock() < until:
        event = _try(nvml_binding.EVENT_WAIT, events, _AT_LEAST_MS)
        if event is None:
            break
        if int(event.eventType) & nvml_binding.XID_EVENT:
            xids.append(int(event.eventData))
    return tuple(xids)


def read_figures(handle: Handle, before: Figures) -> Figures:
    """Read what the driver tells of a GPU's memory cells; each has its own "not supported".

    A figure that cannot be read now is as it was in `before`: a fault is not over because the
    driver does not answer.

    Raises:
        GpuLost, DriverGone: it tells nothing at all now.
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
    return Figures(
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


def read_modes(handle: Handle) -> Modes:
    """Read how a GPU is set up.

    Raises:
        GpuLost, DriverGone: it tells nothing at all now.
    """
    ecc = nvml_binding.ask_or_none("nvmlDeviceGetEccMode", handle)
    persistence = nvml_binding.ask_or_none("nvmlDeviceGetPersistenceMode", handle)
    compute = nvml_binding.ask_or_none("nvmlDeviceGetComputeMode", handle)
    return Modes(
        _flag(None if ecc is None else ecc[0]),
        _flag(persistence),
        None if compute is None else int(compute),
    )


def _try(name: str, *arguments: object) -> Any:
    """Call `name`; None where it fails, whatever that means."""
    try:
        return nvml_binding.call(name, *arguments)
    except NvmlFailure:
        return None
