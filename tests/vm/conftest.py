"""One virtual machine for all tests here, with this working tree installed as an admin would."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from system import root
from system.conftest import CONFIG, SETUP, Gpulease
from system.conftest import wheel as wheel  # noqa: PLC0414  a fixture
from system.machine import Machine

from .machine import VirtualMachine, cached_layer, has_kvm, obstacle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run only where it was asked for: without KVM it takes a quarter of an hour."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    why = obstacle() if os.environ.get("GPULEASE_TEST_VM") else "make test-vm runs these"
    for item in here:
        item.add_marker(pytest.mark.timeout(3600))
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def gpulease(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpulease]:
    """Yield a booted machine with the units installed, and the daemon on simulated GPUs."""
    try:
        debian = root.cached_root()
        layer = cached_layer(debian)
    except root.NoDebian as error:
        pytest.skip(f"no Debian can be built here: {error}")
    lower = [layer / "upper", debian]
    built = _installed(tmp_path_factory.mktemp("layer"), lower, wheel)
    machine = VirtualMachine(tmp_path_factory.mktemp("vm"), layer, [built, *lower])
    try:
        machine.make_disk()
        machine.boot()
        machine.write("etc/gpulease/config.toml", CONFIG)
        machine.run(SETUP, "install", "--now", within_s=900)
        yield Gpulease(machine)
    finally:
        machine.cut_power()


def _installed(folder: Path, lower: list[Path], wheel: Path) -> Path:
    """Return a layer with gpulease in /opt/gpulease, as pip leaves it."""
    machine = Machine(folder, lower)
    try:
        machine.mount()
        wheels = machine.root / "wheels"
        wheels.mkdir()
        shutil.copy(wheel, wheels)
        root.install(machine.root, "gpulease[daemon,web]")
        shutil.rmtree(wheels)
    finally:
        machine.remove()
    return machine.written


@pytest.fixture(scope="session")
def is_emulated() -> bool:
    """Return whether figures of time say little."""
    return not has_kvm()
