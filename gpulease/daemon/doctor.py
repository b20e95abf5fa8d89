"""The daemon's part of `gpulease doctor`: checks of the machine, each with a fix where it fails."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

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
from gpulease.service.health import HealthWatch
from gpulease.service.observation import Observation
from gpulease.service.ports import Clock
from gpulease.service.scheduler import Scheduler
from gpulease.units import GIB, format_size
from gpulease.wire.machine import CheckState, CheckView, DoctorView, EnforcementLevelView

_LITTLE_SPACE = GIB
_CONSEQUENCES = {
    EnforcementLevel.DRIVER: "so a program that bypasses its framework can exceed its lease",
    EnforcementLevel.FRAMEWORK: "so a framework may take all free memory of a GPU",
    EnforcementLevel.WATCH: "so a job keeps the memory that it takes beyond its lease",
    EnforcementLevel.DEVICES: "so only CUDA_VISIBLE_DEVICES keeps a job on its own GPUs",
}
"""What a missing level means."""
_SYSTEMD = Path("/run/systemd/system")
_CGROUPS_V2 = Path("/sys/fs/cgroup/cgroup.controllers")


@dataclass(frozen=True, slots=True)
class Doctor:
    """Checks the machine."""

    seen: Callable[[], Observation | None]
    driver: Callable[[], str | None]
    simulated: str | None
    state: Path
    hooks: Path
    levels: Callable[[], Sequence[EnforcementLevelView]]
    health: Callable[[], Iterable[CheckView]] = tuple
    library: Callable[[], str | None] = lambda: None
    restriction: Callable[[], str | None] = lambda: None
    """Returns how NVML is used otherwise than usual, or None."""
    closed: Callable[[], str | None] = lambda: None
    """Returns why no job can start on this machine now, or None."""
    slurm: Callable[[], Iterable[CheckView]] = tuple

    def results(self) -> DoctorView:
        """Return every check, the most fundamental first."""
        systemd = "running" if _SYSTEMD.exists() else "not running"
        return DoctorView(
            [
                self._driver(),
                *self._from_readings(),
                *self.health(),
                self._identity(),
                *self._python(),
                self._space(),
                self._hooks(),
                *self._enforcement(),
                CheckView("system", "ok", f"systemd is {systemd}, cgroups are {_cgroups()}"),
                *self.slurm(),
            ]
        )

    def _driver(self) -> CheckView:
        if self.simulated:
            return CheckView(
                "driver", "ok", f"simulating {self.simulated}; no real GPU is used",
                "to use the GPUs of this machine, start gpuleased without --simulate",
            )  # fmt: skip
        library = self.library()
        nvml = f", NVML {library}" if library else ""
        driver = self.driver() or "of unknown version"
        if (why := self.restriction()) is not None:
            return CheckView(
                "driver", "warning", f"NVIDIA driver {driver}{nvml}: {why}",
                "install a driver that fits the kernel and the GPUs, then restart gpuleased",
            )  # fmt: skip
        return CheckView("driver", "ok", f"NVIDIA driver {driver}{nvml}")

    def _from_readings(self) -> Iterator[CheckView]:
        """Yield whether each GPU, the start of jobs and the use of each job work."""
        seen = self.seen()
        for reading in seen.readings if seen is not None else ():
            yield _gpu_check(reading)
        if seen is not None:
            yield from _links_check(seen.readings)
        if (why := self.closed()) is not None:
            node = "to create a missing device node, run as root: nvidia-modprobe -u -c=0"
            yield CheckView("jobs", "failure", why, node if "/dev/" in why else None)
        if seen is not None and seen.is_blind:
            yield CheckView(
                "pids", "warning",
                f"{FOREIGN_PIDS}: the use of each job is unknown, and counts as used by leases",
                "run the daemon in the pid namespace of the host: docker run --pid=host",
            )  # fmt: skip

    def _identity(self) -> CheckView:
        if os.geteuid() == 0:
            return CheckView("identity", "ok", "runs as root: each job runs as its own user")
        return CheckView(
            "identity", "ok", f"a personal daemon: all jobs run as uid {os.geteuid()}",
            "to install gpulease for the whole machine, as root: gpulease-setup install --now",
        )  # fmt: skip

    def _python(self) -> Iterator[CheckView]:
        """Check that users can run the Python of the daemon, which always works for root."""
        python = Path(sys.executable).resolve()
        closed = closed_to_others(python) if os.geteuid() == 0 else None
        if closed is not None:
            yield CheckView(
                "python", "failure", f"users cannot run {python}: they cannot access {closed}",
                "install gpulease with a python that all users can run: /usr/bin/python3 -m venv",
            )  # fmt: skip

    def _space(self) -> CheckView:
        free = shutil.disk_usage(self.state).free
        message = f"{self.state} has {format_size(free)} free"
        if free < _LITTLE_SPACE:
            return CheckView(
                "state", "warning", message, "free some space: job output is kept there"
            )
        return CheckView("state", "ok", message)

    def _hooks(self) -> CheckView:
        closed = closed_to_others(self.hooks) if os.geteuid() == 0 else None
        if closed is None and self.simulated:
            return CheckView(
                "hooks", "ok", "simulated GPUs: the hooks are loaded but limit nothing"
            )
        if closed is None:
            return CheckView("hooks", "ok", f"the hooks in {self.hooks} limit frameworks")
        return CheckView(
            "hooks", "failure", f"users cannot read {self.hooks}: they cannot access {closed}",
            f"install gpulease in a directory that all users can read, or: chmod o+rx {closed}",
        )  # fmt: skip

    def _enforcement(self) -> Iterator[CheckView]:
        """Yield each enforcement level; a missing one is a warning."""
        for each in self.levels():
            if each.available:
                yield CheckView("enforcement", "ok", f"enforced by {each.rung}: {each.why}")
            else:
                yield CheckView(
                    "enforcement", "warning", f"not enforced by {each.rung}: {each.why}",
                    _CONSEQUENCES.get(EnforcementLevel(each.rung)),
                )  # fmt: skip


def _gpu_check(reading: GpuReading) -> CheckView:
    name = f"GPU {reading.label}"
    if reading.fault is not None:
        return CheckView(
            name, "failure", f"{reading.fault}: {reading.detail or 'no details'}",
            "see dmesg for Xid messages, and nvidia-smi -q; a lost GPU needs a reset",
        )  # fmt: skip
    if reading.total is None:
        state: CheckState = "ok" if reading.mig_mode else "warning"
        return CheckView(name, state, reading.detail or "its size is unknown", None)
    if reading.compute_mode is ComputeMode.PROHIBITED:
        return CheckView(
            name, "failure",
            "its compute mode is prohibited: no program can use it, and it takes no lease",
            f"nvidia-smi -i {reading.label} -c DEFAULT",
        )  # fmt: skip
    if reading.compute_mode is None:
        return CheckView(
            name, "failure", "its compute mode cannot be read, so it takes no lease",
            "nvidia-smi -q -d COMPUTE shows what the driver reports",
        )  # fmt: skip
    return CheckView(name, "ok", f"{reading.name}, {format_size(reading.total)}")


def _links_check(readings: Sequence[GpuReading]) -> Iterator[CheckView]:
    """Yield how many of the GPUs are linked, if there are several and the driver says so."""
    links = [link for reading in readings for link in reading.links]
    if links:
        by_nvlink = [link for link in links if link.nvlinks]
        nodes = {each.numa_node for each in readings if each.numa_node is not None}
        message = f"{len(by_nvlink) // 2} of {len(links) // 2} pairs of GPUs are linked by NVLink"
        on = f"; the GPUs are on {len(nodes)} NUMA nodes" if len(nodes) > 1 else ""
        yield CheckView("links", "ok", f"{message}{on} (gpulease status --topology)")


def _cgroups() -> str:
    try:
        controllers = _CGROUPS_V2.read_text(encoding="ascii").split()
    except OSError:
        return "not v2"
    dmem = "with" if "dmem" in controllers else "without"
    return f"v2, {dmem} the kernel's controller of device memory (dmem)"


_COMPUTE_MODES = {
    0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process",
}  # fmt: skip
_EFFECTS_OF_MODES = {
    1: "it takes one lease at a time",
    2: "it takes no lease",
    3: "it takes one lease at a time",
}
_RESET = (
    "when nothing runs there: systemctl stop gpuleased (it keeps the GPU open; jobs continue), "
    "nvidia-smi --gpu-reset -i {}, systemctl start gpuleased"
)
_A_DAY = timedelta(days=1)
_MOST_EVENTS = 1000
_MOST_SHOWN = 3
_EFFECTS_OF_ACTS = {
    HealthAction.TELL: "faults are reported but do not drain GPUs",
    HealthAction.OFF: "GPUs are not monitored for faults",
}


def health_checks(scheduler: Scheduler, health: HealthWatch, clock: Clock) -> Iterator[CheckView]:
    """Yield the checks of MPS, drains, modes and hardware faults of each GPU."""
    yield from mps_check(scheduler)
    act = health.policy.act
    if act is not HealthAction.DRAIN:
        yield CheckView(
            "GPU health", "warning", _EFFECTS_OF_ACTS[act],
            f"the setting health is {act}; see docs/admin/gpus-and-health.md",
        )  # fmt: skip
    try:
        availabilities = scheduler.store.availabilities()
        events = scheduler.store.gpu_events(clock.now() - _A_DAY, _MOST_EVENTS)
    except RecordUnwritable as error:
        yield CheckView("GPU health", "failure", error.message, error.hint)
        return
    for reading in scheduler.seen.readings if scheduler.seen is not None else ():
        availability = availabilities.get(reading.uuid, GpuAvailability())
        if availability.drain is not None:
            yield CheckView(
                f"GPU {reading.label}", "warning", str(availability.drain),
                _resume_command(reading.label),
            )  # fmt: skip
        if reading.fault is not None and availability.hardware_fault is None:
            # The check of the GPU itself reports this, and nothing else is known.
            continue
        if reading.uuid in health.modes and reading.fault is None:
            yield _modes_check(reading, health.modes[reading.uuid])
        if act is not HealthAction.OFF and reading.parent is None:
            of_it = [each for each in events if each.gpu == reading.uuid]
            yield _health_check(reading, availability, health, of_it)


def _resume_command(label: str) -> str:
    """Return the command, and who may run it where not every caller may."""
    return f"gpulease resume {label}" + (" (by an admin or root)" if os.geteuid() == 0 else "")


def _modes_check(reading: GpuReading, modes: GpuModes) -> CheckView:
    """Show the modes of a GPU, and warn if they prevent sharing."""
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
    if modes.compute in _EFFECTS_OF_MODES:
        return CheckView(
            name, "warning", f"{message}: {_EFFECTS_OF_MODES[modes.compute]}",
            f"nvidia-smi -i {label} -c DEFAULT",
        )  # fmt: skip
    return CheckView(name, "ok", message)


def mps_check(scheduler: Scheduler) -> Iterator[CheckView]:
    """Warn of MPS servers, which hide the memory of single jobs."""
    for reading in scheduler.seen.readings if scheduler.seen is not None else ():
        servers = [
            each.pid
            for each in reading.processes or ()
            if scheduler.seen is not None and each.pid in scheduler.seen.servers
        ]
        if servers:
            yield CheckView(
                "MPS", "warning",
                f"an MPS server (pid {servers[0]}) runs on GPU {reading.label}: the memory of its "
                "clients may not be attributed to jobs, and counts as used by the leases there",
                "see docs/admin/mig-and-mps.md",
            )  # fmt: skip


def _health_check(
    reading: GpuReading,
    availability: GpuAvailability,
    health: HealthWatch,
    events: Sequence[GpuEvent],
) -> CheckView:
    name, label = f"GPU {reading.label} health", reading.label
    figures = health.figures.get(reading.uuid, HealthFigures())
    if availability.hardware_fault is not None:
        return CheckView(
            name, "failure", str(availability.hardware_fault),
            "the GPU resumes by itself after a time without faults; if it needs a reset, "
            f"{_RESET.format(label)}; {_resume_command(label)} resumes it at once",
        )  # fmt: skip
    if (still := lasting(figures)) is not None:
        return CheckView(
            name, "warning", f"{still.what}; the GPU stays in use",
            f"{_RESET.format(label)}, or replace the GPU",
        )  # fmt: skip
    if figures.uncorrectable:
        return CheckView(
            name, "warning",
            f"{figures.uncorrectable} uncorrectable memory errors since the driver was loaded",
            "nvidia-smi -q -d ECC,ROW_REMAPPER shows where",
        )  # fmt: skip
    return _xid_check(name, label, events, can_listen=health.listens.get(reading.uuid))


def _xid_check(
    name: str, label: str, events: Sequence[GpuEvent], *, can_listen: bool | None
) -> CheckView:
    xids = [each for each in events if each.kind.startswith("xid")]
    shown = "; ".join(
        each.detail if each.count == 1 else f"{each.detail}, {each.count} times"
        for each in xids[-_MOST_SHOWN:]
    )
    if any(needs_an_admin(each.kind) for each in xids):
        return CheckView(
            name, "warning", f"in the last day: {shown}",
            "docs/xids.md explains each XID, and dmesg | grep Xid shows the driver's messages; "
            f"gpulease drain {label} keeps new jobs off the GPU",
        )  # fmt: skip
    known = f"in the last day: {shown}" if shown else "no known fault"
    if can_listen is False:
        known += "; its driver reports no XID events"
    return CheckView(name, "ok", known)
