"""NvmlProbe against nvidia-smi, on a machine with a driver and at least one GPU."""

import csv
import shutil
import subprocess

import pytest

from gpulease.domain.gpu import GpuReading
from gpulease.gpu.nvml import NvmlProbe

pytestmark = pytest.mark.gpu

M = 1024**2
_FIELDS = "index,uuid,name,memory.total,memory.used,memory.reserved,temperature.gpu,driver_version"
_SLACK = 64 * M
"""Memory in use may move between two looks."""


@pytest.fixture
def probe(nvml: NvmlProbe) -> NvmlProbe:
    return nvml


def whole_gpus(probe: NvmlProbe) -> list[GpuReading]:
    """Return the readings of GPUs, without those of MIG devices, as nvidia-smi lists them."""
    return [reading for reading in probe.read() if reading.parent is None]


@pytest.fixture
def shown() -> list[dict[str, str]]:
    """What nvidia-smi shows, a row for each GPU, sizes in MiB."""
    command = shutil.which("nvidia-smi")
    if command is None:
        pytest.skip("there is no nvidia-smi to compare with")
    asked = [command, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    output = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=120).stdout
    rows = csv.reader(output.splitlines(), skipinitialspace=True)
    return [dict(zip(_FIELDS.split(","), row, strict=True)) for row in rows]


def assert_close(size: int | None, shown: str, slack: int = _SLACK) -> None:
    """Compare bytes with what nvidia-smi shows in MiB; unknown is no number in both."""
    if size is None:
        assert not shown.isdigit()
    else:
        assert abs(size - int(shown) * M) <= slack, (size, shown)


def test_gpus_are_those_that_nvidia_smi_lists(
    probe: NvmlProbe, shown: list[dict[str, str]]
) -> None:
    readings = whole_gpus(probe)

    assert [(str(each.index), each.uuid, each.name) for each in readings] == [
        (row["index"], row["uuid"], row["name"]) for row in shown
    ]
    assert {probe.driver()} == {row["driver_version"] for row in shown}


def test_memory_is_what_nvidia_smi_shows(probe: NvmlProbe, shown: list[dict[str, str]]) -> None:
    for reading, row in zip(whole_gpus(probe), shown, strict=True):
        if reading.detail is None:
            assert_close(reading.total, row["memory.total"], slack=M)
        assert_close(reading.used, row["memory.used"])
        assert_close(reading.reserved, row["memory.reserved"])


@pytest.mark.usefixtures("own_pids")
def test_processes_are_listed_with_memory_that_fits_the_gpu(probe: NvmlProbe) -> None:
    for reading in probe.read():
        assert reading.processes is not None, reading
        held = [process.memory or 0 for process in reading.processes]
        assert reading.used is None or sum(held) <= reading.used + _SLACK


def test_a_healthy_gpu_tells_its_memory(probe: NvmlProbe) -> None:
    def is_whole(reading: GpuReading) -> bool:
        return None not in (reading.used, reading.total) or reading.mig_mode

    for reading in probe.read():
        assert reading.fault is not None or is_whole(reading)
