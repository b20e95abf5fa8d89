"""What `doctor` finds out on the daemon's side: each thing, and its mend where it is wrong.

The watch over the GPUs' health, as the settings want it, and what `doctor` says of it.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from gpulease.config import Settings
from gpulease.domain.enforcement import EnforcementLevel
from gpulease.domain.gpu import ComputeMode, GpuReading
from gpulease.domain.health import (
    GpuAvailability,
    GpuEvent,
    GpuModes,
    HealthAction,
    HealthFigures,
    lasting,
    needs_an_admin,
)
from gpulease.errors import RecordUnwritable
from gpulease.host.enforcement import FOREIGN_PIDS
from gpulease.path_ownership import closed_to_others
from gpulease.service.health import HealthPolicy, HealthWatch
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock, InThread
from gpulease.service.scheduler import Scheduler
from gpulease.units import GIB, format_size
from gpulease.wire.views import CheckState, CheckView, DoctorView, EnforcementLevelView

_LITTLE_SPACE = GIB
_LEAVES_OPEN = {
    EnforcementLevel.DRIVER: "so a program that bypasses its framework can exceed its lease",
    EnforcementLevel.FRAMEWORK: "so a framework may take all that is free on a GPU",
    EnforcementLevel.WATCH: "so a job keeps what it takes beyond its lease",
    EnforcementLevel.DEVICES: "so only CUDA_VISIBLE_DEVICES keeps a job on its own GPUs",
}
_SYSTEMD = Path("/run/systemd/system")
_CGROUPS_V2 = Path("/sys/fs/cgroup/cgroup.controllers")


@dataclass(frozen=True, slots=True)
class Doctor:
    """Looks at the machine through what the daemon has at hand."""

    seen: Callable[[], Observation | None]
    driver: Callable[[], str | None]
    simulated: str | None
    state: Path
    hooks: Path
    rungs: Callable[[], Sequence[EnforcementLevelView]]
    health: Callable[[], Iterable[CheckView]] = tuple
    library: Callable[[], str | None] = lambda: None
    closed: Callable[[], str | None] = lambda: None
    """Why no job is started on this machine now."""

    def results(self) -> DoctorView:
        """Return every check, in the order in which a reader needs them."""
        return DoctorView(
            [
                self._driver(),
                *self._gpus(),
                *self._jobs(),
                *self._pids(),
                *self.health(),
                self._identity(),
                *self._python(),
                self._space(),
                self._hooks(),
                *self._enforcement(),
                self._systemd(),
            ]
        )

    def _driver(self) -> CheckView:
        if self.simulated:
            return CheckView(
                "driver", "ok", f"simulating {self.simulated}; no real GPU is used",
                "start gpuleased without --simulate to use the GPUs of this machine",
            )  # fmt: skip
        library = self.library()
        nvml = f", NVML {library}" if library else ""
        driver = self.driver() or "of unknown version"
        return CheckView("driver", "ok", f"NVIDIA driver {driver}{nvml}")

    def _gpus(self) -> Iterator[CheckView]:
        seen = self.seen()
        for reading in seen.readings if seen is not None else ():
            name = f"GPU {reading.label}"
            if reading.fault is not None:
                yield CheckView(
                    name, "failure", f"{reading.fault}: {reading.detail or 'no more is known'}",
                    "dmesg shows Xid messages, nvidia-smi -q more; a lost GPU needs a reset",
                )  # fmt: skip
            elif reading.total is None:
                state: CheckState = "ok" if reading.mig_mode else "warning"
                yield CheckView(name, state, reading.detail or "its size is not known", None)
            elif reading.compute_mode is ComputeMode.PROHIBITED:
                yield CheckView(
                    name, "failure",
                    "its compute mode is prohibited: no program can use it, and nothing is leased",
                    f"nvidia-smi -i {reading.label} -c DEFAULT",
                )  # fmt: skip
            elif reading.compute_mode is None:
                yield CheckView(
                    name, "failure", "its compute mode cannot be read, so nothing is leased",
                    "nvidia-smi -q -d COMPUTE shows what the driver says",
                )  # fmt: skip
            else:
                yield CheckView(name, "ok", f"{reading.name}, {format_size(reading.total)}")

    def _jobs(self) -> Iterator[CheckView]:
        if (why := self.closed()) is not None:
            yield CheckView(
                "jobs", "failure", why,
                "for a missing device node: nvidia-modprobe -u -c=0, as root, makes it or says why",
            )  # fmt: skip

    def _pids(self) -> Iterator[CheckView]:
        seen = self.seen()
        if seen is not None and seen.is_blind:
            yield CheckView(
                "pids", "warning",
                f"{FOREIGN_PIDS}: what each job uses is unknown, and counts as used by the leases",
                "run the daemon in the pid namespace of the host: docker run --pid=host",
            )  # fmt: skip

    def _identity(self) -> CheckView:
        if os.geteuid() == 0:
            return CheckView("identity", "ok", "runs as root: each job runs as the user who asked")
        return CheckView(
            "identity", "ok", f"a personal daemon: jobs run as uid {os.geteuid()} alone",
            "an admin can install it for the whole machine: gpulease-setup install --now",
        )  # fmt: skip

    def _python(self) -> Iterator[CheckView]:
        """Tell where root alone can run what is installed, of which root notices nothing."""
        python = Path(sys.executable).resolve()
        closed = closed_to_others(python) if os.geteuid() == 0 else None
        if closed is not None:
            yield CheckView(
                "python", "failure", f"users cannot run {python}: {closed} is closed to them",
                "install gpulease with a python that all users can run: /usr/bin/python3 -m venv",
            )  # fmt: skip

    def _space(self) -> CheckView:
        free = shutil.disk_usage(self.state).free
        message = f"{self.state} has {format_size(free)} free"
        if free < _LITTLE_SPACE:
            return CheckView("state", "warning", message, "make room: output of jobs is kept there")
        return CheckView("state", "ok", message)

    def _hooks(self) -> CheckView:
        closed = closed_to_others(self.hooks) if os.geteuid() == 0 else None
        if closed is None and self.simulated:
            return CheckView(
                "hooks", "ok", "simulated GPUs: the hooks are there, and limit nothing"
            )
        if closed is None:
            return CheckView("hooks", "ok", f"frameworks are limited by {self.hooks}")
        return CheckView(
            "hooks", "failure", f"users cannot read {self.hooks}: {closed} is closed to them",
            f"install gpulease where all users can read, or: chmod o+rx {closed}",
        )  # fmt: skip

    def _enforcement(self) -> Iterator[CheckView]:
        """Yield each rung of the ladder; that one is not to be had is not always a fault."""
        for each in self.rungs():
            if each.available:
                yield CheckView("enforcement", "ok", f"held by {each.rung}: {each.why}")
            else:
                yield CheckView(
                    "enforcement", "warning", f"not held by {each.rung}: {each.why}",
                    _LEAVES_OPEN.get(EnforcementLevel(each.rung)),
                )  # fmt: skip

    def _systemd(self) -> CheckView:
        systemd = "running" if _SYSTEMD.exists() else "not running"
        cgroups = _cgroups()
        return CheckView("system", "ok", f"systemd is {systemd}, cgroups are {cgroups}")


def _cgroups() -> str:
    try:
        controllers = _CGROUPS_V2.read_text(encoding="ascii").split()
    except OSError:
        return "not v2"
    dmem = "with" if "dmem" in controllers else "without"
    return f"v2, {dmem} the kernel's controller of device memory (dmem)"


_log = logging.getLogger(__name__)


def health_policy(settings: Settings) -> HealthPolicy:
    """Return what the admin wants done about faults."""
    return HealthPolicy(HealthAction(settings.health), settings.health_quiet)


def watch_health(
    settings: Settings, keeper: Scheduler, clock: Clock, lanes: tuple[InThread, InThread]
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


def health_checks(keeper: Scheduler, health: HealthWatch, clock: Clock) -> Iterator[CheckView]:
    """Yield what is to be said about the health of each GPU, and of who drained it."""
    yield from mps_check(keeper)
    act = health.policy.act
    if act is not HealthAction.DRAIN:
        what = {
            HealthAction.TELL: "faults are told and drain nothing",
            HealthAction.OFF: "nobody looks at it",
        }
        yield CheckView(
            "GPU health", "warning", what[act],
            f"the setting health is {act}: see docs/admin.md",
        )  # fmt: skip
    try:
        availabilities = keeper.store.availabilities()
        events = keeper.store.gpu_events(clock.now() - _A_DAY, _MOST_EVENTS)
    except RecordUnwritable as error:
        yield CheckView("GPU health", "failure", error.message, error.hint)
        return
    for reading in keeper.seen.readings if keeper.seen is not None else ():
        standing = availabilities.get(reading.uuid, GpuAvailability())
        if standing.drain is not None:
            yield _saying_who(reading.label, CheckView(
                f"GPU {reading.label}", "warning", str(standing.drain),
                f"gpulease resume {reading.label}",
            ))  # fmt: skip
        if reading.fault is not None and standing.hardware_fault is None:
            # That it cannot be read is said already, and nothing else is known of it now.
            continue
        if reading.uuid in health.modes and reading.fault is None:
            yield _modes(reading, health.modes[reading.uuid])
        if act is not HealthAction.OFF and reading.parent is None:
            of_it = [each for each in events if each.gpu == reading.uuid]
            yield _saying_who(reading.label, _health(reading, standing, health, of_it))


def _saying_who(label: str, check: CheckView) -> CheckView:
    """Say who may resume a GPU, where that is not everyone who can ask."""
    if check.mend is None or os.geteuid() != 0:
        return check
    resume = f"gpulease resume {label}"
    return replace(check, mend=check.mend.replace(resume, f"{resume} (by an admin or root)"))


def _modes(reading: GpuReading, modes: GpuModes) -> CheckView:
    """Say how a GPU is set up, and warn where it cannot be shared so."""
    name, label = f"GPU {reading.label} modes", reading.label
    known = {
        "MIG": reading.mig_mode,
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


def mps_check(keeper: Scheduler) -> Iterator[CheckView]:
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
    reading: GpuReading, standing: GpuAvailability, health: HealthWatch, events: list[GpuEvent]
) -> CheckView:
    name, label = f"GPU {reading.label} health", reading.label
    figures = health.figures.get(reading.uuid, HealthFigures())
    if standing.hardware_fault is not None:
        return CheckView(
            name, "failure", str(standing.hardware_fault),
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
