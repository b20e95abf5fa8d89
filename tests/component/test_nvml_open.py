"""What NvmlProbe says where there is no GPU to read: what was found, and what to do."""

import re
from collections.abc import Mapping
from ctypes.util import find_library
from datetime import timedelta
from pathlib import Path

import pytest

from gpulease.gpu.nvml import START_TIMEOUT
from nvml_stand_in import HANG, Card, Code, ProbeProcess, StandIn

LIBRARY_MISMATCH = 18


def refused(environment: Mapping[str, str], start_timeout: float = 10.0) -> str:
    """Return what the probe says instead of opening."""
    probe = ProbeProcess(environment, start_timeout=start_timeout)
    assert probe.close() == 0
    assert probe.error is not None
    assert probe.error
    assert probe.hint
    return probe.error


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (Code.DRIVER_NOT_LOADED, "installed but not loaded"),
        (Code.NO_PERMISSION, "denies access"),
        (LIBRARY_MISMATCH, "different versions"),
        (Code.UNKNOWN, "Unknown Error"),
    ],
)
def test_a_driver_that_does_not_start_is_named_with_the_reason(
    tmp_path: Path, code: int, found: str
) -> None:
    assert found in refused(StandIn(tmp_path, faults={"nvmlInit*": code}).environment())


def test_a_machine_without_the_library_is_told_so(tmp_path: Path) -> None:
    if find_library("nvidia-ml") is not None:
        pytest.skip("this machine has an NVIDIA driver")

    assert "libnvidia-ml.so.1" in refused({"LD_LIBRARY_PATH": str(tmp_path)})


def test_a_driver_without_gpus_is_told_so(tmp_path: Path) -> None:
    assert "no GPU" in refused(StandIn(tmp_path, []).environment())


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetUUID"])
def test_a_driver_that_hangs_at_the_start_is_given_up(tmp_path: Path, function: str) -> None:
    stand_in = StandIn(tmp_path, delays={function: HANG})

    assert "answer" in refused(stand_in.environment(), start_timeout=0.2)


def test_a_driver_that_wakes_slowly_is_waited_for_longer_than_a_read(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [Card()], delays={"nvmlInitWithFlags": 0.5})

    with ProbeProcess(stand_in.environment(), deadline=0.2, start_timeout=20) as probe:
        assert probe.error is None
        probe.read_until(lambda found: found[0].fault is None)


def test_sixteen_gpus_have_time_to_wake_up_and_systemd_waits_for_longer_than_that() -> None:
    unit = Path(__file__).parents[2] / "systemd" / "gpuleased.service"
    (minutes,) = re.findall(r"^TimeoutStartSec=(\d+)min$", unit.read_text(), re.MULTILINE)
    assert 16 * timedelta(seconds=6) < START_TIMEOUT < timedelta(minutes=int(minutes))
