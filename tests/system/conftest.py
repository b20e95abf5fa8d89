"""One machine for all tests here, with this working tree installed as an admin would."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import wait_for
from nvml_stand_in import Card, StandIn

from . import root
from .machine import Machine

SERVICE = "gpuleased.service"
WEB = "gpulease-web.service"
SETUP = f"{root.ENVIRONMENT}/bin/gpulease-setup"
CONFIG = 'simulate = "2x8G"\ngrace = "2s"\n'
DRIVER = "/opt/stand-in"
MAJOR = 195
"""Of /dev/nvidia0 and its like: linux/Documentation/admin-guide/devices.txt."""
NODES = {"nvidia0": 0, "nvidia1": 1, "nvidiactl": 255, "nvidia-uvm": 250}
# Short enough to be waited for; what the unit file says is a minute.
WATCHDOG = "[Service]\nWatchdogSec=4s\nRestartSec=500ms\n"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run only where it was asked for: building the Debian takes minutes and a network."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    asked = os.environ.get("GPULEASE_TEST_SYSTEMD")
    why = root.obstacle() if asked else "make test-system runs these"
    for item in here:
        item.add_marker(pytest.mark.timeout(900 if item is here[0] else 180))
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@dataclass
class Gpulease:
    """The service inside, and the command of its users."""

    machine: Machine

    def run(self, *arguments: str, user: str = "alice", check: bool = True) -> str:
        """Run the command to its end and return what it wrote to stdout."""
        return self.machine.run("gpulease", *arguments, user=user, check=check).stdout

    def submit(self, *arguments: str, user: str = "alice") -> int:
        return int(self.run("run", "-d", *arguments, user=user))

    def job(self, job: int) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.run("show", "--json", str(job), user="root"))
        return shown

    def wait_until(self, job: int, *states: str) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            shown = self.job(job)
            return shown if shown["state"] in states else None

        return wait_for(f"job {job} is {' or '.join(states)}", there)

    def end_all(self) -> None:
        live = json.loads(self.run("list", "--json", user="root"))["jobs"]
        numbers = [str(job["id"]) for job in live]
        if numbers:
            self.run("cancel", *numbers, user="root", check=False)
        for number in numbers:
            self.wait_until(int(number), "ended")

    def configure(self, text: str) -> None:
        self.machine.write("etc/gpulease/config.toml", text)

    def drop_in(self, text: str, unit: str = SERVICE) -> None:
        """Change the unit as `systemctl edit` does."""
        self.machine.write(f"etc/systemd/system/{unit}.d/override.conf", text)
        self.machine.run("systemctl", "daemon-reload")

    def pid(self) -> int:
        return int(self.machine.unit(SERVICE, "MainPID")["MainPID"])

    def wait_until_back(self, before: int) -> int:
        """Wait until another daemon than `before` is ready, and return its pid."""

        def back() -> int | None:
            found = self.machine.unit(SERVICE, "MainPID", "ActiveState", "SubState")
            ready = (found["ActiveState"], found["SubState"]) == ("active", "running")
            return int(found["MainPID"]) if ready and int(found["MainPID"]) != before else None

        return wait_for("the daemon is back", back)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    root.run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
        *("--wheel-dir", str(folder), str(root.REPOSITORY)),
    )
    (built,) = folder.glob("gpulease-*.whl")
    return built


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Debian that boots here; where none does, that says nothing about gpulease."""
    try:
        found = root.cached_root()
    except root.NoDebian as error:
        pytest.skip(f"no Debian can be built here: {error}")
    machine = Machine(tmp_path_factory.mktemp("bare"), [found])
    try:
        machine.boot()
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no systemd can be booted here: {error}")
    finally:
        machine.remove()
    return found


@pytest.fixture(scope="session")
def disk(debian: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the layers of a disk with gpulease in /opt/gpulease, as pip leaves it."""
    machine = Machine(tmp_path_factory.mktemp("disk"), [debian])
    try:
        machine.mount()
        wheels = machine.root / "wheels"
        wheels.mkdir()
        shutil.copy(wheel, wheels)
        root.install(machine.root, "gpulease[daemon,web]")
        shutil.rmtree(wheels)
    finally:
        machine.remove()
    return [machine.written, *machine.lower]


@pytest.fixture(scope="session")
def installed(disk: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpulease]:
    """Yield a booted machine with the units installed, and the daemon on simulated GPUs."""
    machine = Machine(tmp_path_factory.mktemp("machine"), disk)
    gpulease = Gpulease(machine)
    try:
        machine.boot()
        gpulease.configure(CONFIG)
        gpulease.drop_in(WATCHDOG)
        machine.run(SETUP, "install", "--web", "--now")
        yield gpulease
    finally:
        machine.remove()


@pytest.fixture
def gpulease(installed: Gpulease) -> Iterator[Gpulease]:
    """Return gpulease running, with no job; whatever a test did to it is undone after."""
    yield installed
    machine = installed.machine
    if not machine.is_up():
        machine.boot()
    installed.configure(CONFIG)
    installed.drop_in(WATCHDOG)
    machine.run("systemctl", "reset-failed", SERVICE, check=False)
    machine.run("systemctl", "start", SERVICE)
    installed.end_all()


@pytest.fixture
def stand_in(gpulease: Gpulease) -> Iterator[StandIn]:
    """Yield the driver r615 of a machine with two GPUs, on which the daemon runs."""
    machine = gpulease.machine
    cards = [Card(minor=0), Card(minor=1)]
    made = StandIn(machine.root / DRIVER.lstrip("/"), cards, driver="615.10", seen_as=Path(DRIVER))
    made.forget_limits()
    for name, minor in NODES.items():
        machine.run("mknod", "-m", "666", f"/dev/{name}", "c", str(MAJOR), str(minor))
    variables = "".join(f"Environment={name}={it}\n" for name, it in made.environment().items())
    gpulease.configure('grace = "2s"\n')
    gpulease.drop_in(f"{WATCHDOG}{variables}ReadWritePaths={DRIVER}\n")
    machine.run("systemctl", "restart", SERVICE)
    yield made
    gpulease.end_all()
    gpulease.configure(CONFIG)
    gpulease.drop_in(WATCHDOG)
    machine.run("systemctl", "restart", SERVICE)
    machine.run("rm", *(f"/dev/{name}" for name in NODES))
