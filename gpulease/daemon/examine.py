"""What `doctor` finds out on the daemon's side: each thing, and its mend where it is wrong."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpulease.daemon.ladder import FOREIGN_PIDS
from gpulease.daemon.places import closed_to_others
from gpulease.domain.enforcement import Rung
from gpulease.domain.memory import ComputeMode
from gpulease.service.look import Look
from gpulease.units import GIB, format_size
from gpulease.wire import CheckState, CheckView, DoctorView, RungView

_LITTLE_SPACE = GIB
_LEAVES_OPEN = {
    Rung.DRIVER: "so a program that goes around its framework can take more than its lease",
    Rung.FRAMEWORK: "so a framework may take all that is free on a GPU",
    Rung.WATCH: "so a job keeps what it takes beyond its lease",
    Rung.DEVICES: "so CUDA_VISIBLE_DEVICES alone keeps a job to the GPUs that it leased",
}
_SYSTEMD = Path("/run/systemd/system")
_CGROUPS_V2 = Path("/sys/fs/cgroup/cgroup.controllers")


@dataclass(frozen=True, slots=True)
class Examination:
    """Looks at the machine through what the daemon has at hand."""

    seen: Callable[[], Look | None]
    driver: Callable[[], str | None]
    simulated: str | None
    state: Path
    hooks: Path
    rungs: Callable[[], Sequence[RungView]]
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
                state: CheckState = "ok" if reading.divided else "warning"
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
                    _LEAVES_OPEN.get(Rung(each.rung)),
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
