"""The CPU cores of this machine, and which of them each job has that leases some.

The set of a job is a file in its directory, so that a restarted daemon knows it. See
linux/Documentation/ABI/testing/sysfs-devices-system-cpu and sysfs-bus-pci for what is read.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from gpulease.domain.host_share import choose_cores
from gpulease.units import numbers_in

_FILE = "cores"
_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


def cores_of(directory: Path) -> tuple[int, ...]:
    """Return the CPUs of the job with this directory; none if it has no set of its own."""
    try:
        return tuple(map(int, (directory / _FILE).read_text(encoding="ascii").split()))
    except (OSError, ValueError):
        return ()


def take_cores(
    count: int, directory: Path, others: Iterable[Path], buses: Iterable[str | None]
) -> tuple[int, ...]:
    """Choose the CPUs of a job, note them in its directory, and return them.

    `others` are the directories of all jobs that hold some, and `buses` the PCI addresses of the
    job's GPUs.

    Raises:
        OSError: they cannot be noted.
    """
    online = os.sched_getaffinity(0)
    held = [cores_of(each) for each in others if each != directory]
    chosen = choose_cores(count, online, _near(buses), held, _siblings())
    (directory / _FILE).write_text(" ".join(map(str, chosen)), encoding="ascii")
    return chosen


def _near(buses: Iterable[str | None]) -> set[int]:
    """Return the CPUs on the NUMA nodes of GPUs; none where that is unknown, as in many VMs."""
    return {cpu for bus in buses if bus for cpu in local_cpus(bus)}


@cache
def local_cpus(bus: str, devices: Path = _PCI) -> tuple[int, ...]:
    """Return the CPUs near the PCI device at an address such as 00000000:3B:00.0."""
    domain, _, rest = bus.lower().partition(":")
    try:
        return tuple(numbers_in((devices / f"{domain[-4:]}:{rest}" / "local_cpulist").read_text()))
    except OSError:
        return ()


@cache
def _siblings(cpus: Path = _CPUS) -> Mapping[int, int]:
    """Return the first hardware thread of the physical core of each CPU."""
    found = {}
    for path in cpus.glob("cpu[0-9]*/topology/thread_siblings_list"):
        with suppress(OSError, IndexError):
            found[int(path.parts[-3][3:])] = numbers_in(path.read_text())[0]
    return found
