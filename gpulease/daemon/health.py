"""The watch over the GPUs' health, as the settings want it, and what `doctor` says of it."""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

from gpulease.config import Settings
from gpulease.domain.health import Act, Figures, GpuEvent, Modes, lasting, needs_an_admin
from gpulease.domain.memory import GpuReading
from gpulease.domain.standing import Standing
from gpulease.errors import RecordUnwritable
from gpulease.service.health import HealthPolicy, HealthWatch
from gpulease.service.keeper import Keeper
from gpulease.service.ports import Clock, InThread
from gpulease.wire import CheckView

_log = logging.getLogger(__name__)


def health_policy(settings: Settings) -> HealthPolicy:
    """Return what the admin wants done about faults."""
    return HealthPolicy(Act(settings.health), settings.health_quiet)


def watch_health(
    settings: Settings, keeper: Keeper, clock: Clock, lanes: tuple[InThread, InThread]
) -> HealthWatch:
    """Return the watch; it works on the lanes of the writer and of the looks."""
    return HealthWatch(
        keeper.store,
        keeper.probe,
        clock,
        health_policy(settings),
        keeper.tell_owner,
        wake=keeper.wake,
        writing=lanes[0],
        looking=lanes[1],
    )


_COMPUTE_MODES = {
    0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process",
}  # fmt: skip
_WHAT_MODES_DO = {
    1: "it takes one lease at a time",
    2: "no lease is granted on it",
    3: "it takes one lease at a time",
}
_RESET = (
    "when nothing runs there, systemctl stop gpuleased (it holds the GPU open; jobs go on), "
    "nvidia-smi --gpu-reset -i {}, systemctl start gpuleased"
)
_A_DAY = timedelta(days=1)
_MOST_EVENTS = 1000
_MOST_TOLD = 3


def health_checks(keeper: Keeper, health: HealthWatch, clock: Clock) -> Iterator[CheckView]:
    """Yield what is to be said about the health of each GPU, and of who drained it."""
    yield from mps_check(keeper)
    act = health.policy.act
    if act is not Act.DRAIN:
        what = {Act.TELL: "faults are told and drain nothing", Act.OFF: "nobody looks at it"}
        yield CheckView(
            "GPU health", "warning", what[act],
            f"the setting health is {act}: see docs/admin.md",
        )  # fmt: skip
    try:
        standings = keeper.store.standings()
        events = keeper.store.gpu_events(clock.now() - _A_DAY, _MOST_EVENTS)
    except RecordUnwritable as error:
        yield CheckView("GPU health", "failure", error.message, error.hint)
        return
    for reading in keeper.seen.readings if keeper.seen is not None else ():
        standing = standings.get(reading.uuid, Standing())
        if standing.drain is not None:
            yield _saying_who(reading.label, CheckView(
                f"GPU {reading.label}", "warning", str(standing.drain),
                f"gpulease resume {reading.label}",
            ))  # fmt: skip
        if reading.fault is not None and standing.ailment is None:
            # That it cannot be read is said already, and nothing else is known of it now.
            continue
        if reading.uuid in health.modes and reading.fault is None:
            yield _modes(reading, health.modes[reading.uuid])
        if act is not Act.OFF and reading.parent is None:
            of_it = [each for each in events if each.gpu == reading.uuid]
            yield _saying_who(reading.label, _health(reading, standing, health, of_it))


def _saying_who(label: str, check: CheckView) -> CheckView:
    """Say who may resume a GPU, where that is not everyone who can ask."""
    if check.mend is None or os.geteuid() != 0:
        return check
    resume = f"gpulease resume {label}"
    return replace(check, mend=check.mend.replace(resume, f"{resume} (by an admin or root)"))


def _modes(reading: GpuReading, modes: Modes) -> CheckView:
    """Say how a GPU is set up, and warn where it cannot be shared so."""
    name, label = f"GPU {reading.label} modes", reading.label
    known = {
        "MIG": reading.divided,
        "ECC": modes.ecc,
        "persistence": modes.persistence,
    }
    switches = ", ".join(
        f"{what} {'unknown' if is_on is None else 'on' if is_on else 'off'}"
        for what, is_on in known.items()
    )
    compute = _COMPUTE_MODES.get(-1 if modes.compute is None else modes.compute, "unknown")
    message = f"{switches}, compute mode {compute}"
    if modes.compute in _WHAT_MODES_DO:
        return CheckView(
            name, "warning", f"{message}: {_WHAT_MODES_DO[modes.compute]}",
            f"nvidia-smi -i {label} -c DEFAULT",
        )  # fmt: skip
    return CheckView(name, "ok", message)


def mps_check(keeper: Keeper) -> Iterator[CheckView]:
    """Say where MPS runs, since it changes what can be known of each job's memory."""
    for reading in keeper.seen.readings if keeper.seen is not None else ():
        servers = [
            each.pid
            for each in reading.processes or ()
            if keeper.seen is not None and each.pid in keeper.seen.servers
        ]
        if servers:
            yield CheckView(
                "MPS", "warning",
                f"an MPS server (pid {servers[0]}) is on GPU {reading.label}: what its clients use "
                "may not be told apart, and counts as used by the leases that run there",
                "docs/admin.md says what that means for the ledger",
            )  # fmt: skip


def _health(
    reading: GpuReading, standing: Standing, health: HealthWatch, events: list[GpuEvent]
) -> CheckView:
    name, label = f"GPU {reading.label} health", reading.label
    figures = health.figures.get(reading.uuid, Figures())
    if standing.ailment is not None:
        return CheckView(
            name, "failure", str(standing.ailment),
            "it is used again by itself when it is well; what waits for a reset takes, "
            f"{_RESET.format(label)}; gpulease resume {label} uses it at once",
        )  # fmt: skip
    if (still := lasting(figures)) is not None:
        return CheckView(
            name, "warning", f"{still.what}; it is used all the same",
            f"{_RESET.format(label)}, or have it replaced",
        )  # fmt: skip
    if figures.uncorrectable:
        return CheckView(
            name, "warning",
            f"{figures.uncorrectable} memory errors since the driver was loaded that could not be "
            "corrected", "nvidia-smi -q -d ECC,ROW_REMAPPER tells where",
        )  # fmt: skip
    said = [each for each in events if each.kind.startswith("xid")]
    told = "; ".join(_with_count(each) for each in said[-_MOST_TOLD:])
    if any(needs_an_admin(each.kind) for each in said):
        return CheckView(
            name, "warning", f"in the last day: {told}",
            "docs/xids.md says what each XID is, and dmesg | grep Xid what the driver said; "
            f"gpulease drain {label} keeps new jobs off the GPU meanwhile",
        )  # fmt: skip
    known = f"in the last day: {told}" if told else "no fault is known"
    if health.listens.get(reading.uuid) is False:
        known += "; its driver tells no XID events"
    return CheckView(name, "ok", known)


def _with_count(event: GpuEvent) -> str:
    return event.detail if event.count == 1 else f"{event.detail}, {event.count} times"
