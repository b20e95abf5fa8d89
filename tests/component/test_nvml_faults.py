"""What NvmlProbe does while a GPU or the whole driver fails, hangs, or is replaced."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from daemon_rig import wait_for
from gpulease.domain.gpu import Fault, GpuReading
from gpulease.gpu.new_session import readable_gpus
from gpulease.gpu.nvml_process import NvmlProcess
from nvml_stand_in import DRIVER, HANG, Card, Code, ProbeProcess, StandIn

G = 1024**3
_MEMORY = "nvmlDeviceGetMemoryInfo_v2"
_NEWER = "590.44.01"


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path, [Card(total=8 * G, name="first"), Card(total=16 * G, name="second")])


@contextmanager
def probing(
    stand_in: StandIn, deadline: float = 3.0, present: Path = Path("/nonexistent")
) -> Iterator[ProbeProcess]:
    """Open a probe on these GPUs, and see that it reads them."""
    with ProbeProcess(stand_in.environment(), deadline=deadline, present=present) as probe:
        assert probe.error is None
        probe.read_until(are_well)
        yield probe


def faults(readings: tuple[GpuReading, ...]) -> list[Fault | None]:
    """Return what is wrong with each GPU."""
    return [reading.fault for reading in readings]


def are_well(readings: tuple[GpuReading, ...]) -> bool:
    """Say whether nothing is wrong with any GPU."""
    return not any(faults(readings))


def attempts(stand_in: StandIn) -> int:
    """Return how often NVML was initialised, by any process."""
    return stand_in.calls().count("nvmlInitWithFlags -")


def sessions_ended(stand_in: StandIn) -> int:
    """Return how often the probe has ended a session; the last call of each finds none."""
    return stand_in.calls().count("nvmlShutdown -") // 2


def test_a_lost_gpu_keeps_its_identity_and_is_read_again_when_it_comes_back(
    stand_in: StandIn,
) -> None:
    stand_in.change(0, minor=3)
    with probing(stand_in) as probe:
        stand_in.change(0, lost=True)
        lost, well = probe.read()
        assert (lost.uuid, lost.index, lost.name, lost.minor) == (StandIn.uuid(0), 0, "first", 3)
        assert (lost.fault, lost.total, lost.detail) == (Fault.LOST, None, "GPU is lost")
        assert (well.uuid, well.fault, well.total) == (StandIn.uuid(1), None, 16 * G)

        listed = stand_in.calls().count("nvmlDeviceGetCount_v2 -")
        again, _ = probe.read_until(
            lambda _: stand_in.calls().count("nvmlDeviceGetCount_v2 -") >= listed + 3
        )
        assert (again.uuid, again.name) == (lost.uuid, "first"), "listed in other processes"

        stand_in.change(0, lost=False)
        assert [each.total for each in probe.read_until(are_well)] == [8 * G, 16 * G]


def test_a_gpu_that_was_lost_from_the_start_has_no_identity_until_it_comes_back(
    stand_in: StandIn,
) -> None:
    stand_in.change(0, lost=True)
    with ProbeProcess(stand_in.environment()) as probe:
        lost, well = probe.read()
        assert (lost.uuid, lost.index, lost.fault) == ("unknown-0", 0, Fault.LOST)
        assert (well.uuid, well.fault) == (StandIn.uuid(1), None)

        stand_in.change(0, lost=False)
        readings = probe.read_until(are_well)

    assert [reading.uuid for reading in readings] == [StandIn.uuid(0), StandIn.uuid(1)]


def test_a_gpu_that_is_no_longer_listed_is_lost(stand_in: StandIn) -> None:
    first, second = stand_in.gpus
    with probing(stand_in) as probe:
        stand_in.update(faults={"*": Code.DRIVER_NOT_LOADED})
        probe.read()
        stand_in.update(faults={}, gpus=[second])

        readings = probe.read_until(lambda found: found[1].index == 0)
        assert [(each.uuid, each.fault) for each in readings] == [
            (first.uuid, Fault.LOST),
            (second.uuid, None),
        ]

        stand_in.update(gpus=[second, first])
        readings = probe.read_until(are_well)
        assert [each.uuid for each in readings] == [second.uuid, first.uuid]


def test_a_gpu_has_the_index_that_new_programs_see_while_another_is_lost(
    stand_in: StandIn,
) -> None:
    first, second = stand_in.gpus
    with probing(stand_in) as probe:
        stand_in.change(0, lost=True)
        probe.read()
        stand_in.update(gpus=[second])

        readings = probe.read_until(lambda found: found[1].index == 0)

    assert [(each.uuid, bool(each.fault)) for each in readings] == [
        (first.uuid, True),
        (second.uuid, False),
    ]
    assert sessions_ended(stand_in) == 1, "at the end alone"


def test_the_other_gpus_are_read_while_nvml_cannot_be_initialised_for_a_lost_one(
    stand_in: StandIn,
) -> None:
    with probing(stand_in) as probe:
        stand_in.change(0, lost=True, stays_lost=True)
        stand_in.update(delays={"nvmlInit*": HANG})
        tried, reads = attempts(stand_in), 0
        while attempts(stand_in) == tried or reads < 50:
            reads += 1
            assert faults(probe.read()) == [Fault.LOST, None]
        assert sessions_ended(stand_in) == 0

        stand_in.change(0, lost=False)
        stand_in.update(delays={})
        assert [each.total for each in probe.read_until(are_well)] == [8 * G, 16 * G]
        assert sessions_ended(stand_in) == 1, "for the GPU that only a new one reads"


def test_a_gpu_that_comes_later_is_found_in_a_new_session(
    stand_in: StandIn, tmp_path: Path
) -> None:
    present = tmp_path / "gpus"
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (present / bus).mkdir(parents=True)
    with probing(stand_in, present=present) as probe:
        stand_in.update(gpus=[*stand_in.gpus, Card(total=24 * G)])
        assert len(probe.read()) == 2
        (present / "0000:03:00.0").mkdir()

        found = probe.read_until(lambda readings: len(readings) == 3)
        assert [each.total for each in found] == [8 * G, 16 * G, 24 * G]
        assert faults(probe.read()) == [None] * 3
        assert sessions_ended(stand_in) == 1


def test_what_one_gpu_says_of_the_whole_driver_alone_ends_no_session(stand_in: StandIn) -> None:
    with probing(stand_in) as probe:
        stand_in.change(0, faults={_MEMORY: Code.UNINITIALIZED})
        readings = probe.read()
        stand_in.change(0, faults={})
        probe.read_until(are_well)

    assert faults(readings) == [Fault.UNREADABLE, None]
    assert sessions_ended(stand_in) == 1, "at the end alone"


def test_a_process_that_asks_a_driver_which_hangs_is_killed(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.update(delays={"nvmlInit*": HANG})
    for name, value in stand_in.environment().items():
        monkeypatch.setenv(name, value)

    # A daemon of other tests may be a child of this process as well.
    before = psutil.Process().children()

    assert readable_gpus(timedelta(seconds=0.5)) == {}
    assert psutil.Process().children() == before


def test_a_process_that_asks_a_driver_which_hangs_ends_without_the_daemon(
    stand_in: StandIn,
) -> None:
    stand_in.update(delays={"nvmlInit*": HANG})
    done = subprocess.run(
        [sys.executable, "-m", "gpulease.gpu.new_session", "1"],
        env={**os.environ, **stand_in.environment()},
        check=False,
        timeout=20,
    )

    assert done.returncode == -signal.SIGALRM


def test_gpus_whose_calls_are_all_slow_are_read(stand_in: StandIn) -> None:
    with probing(stand_in, deadline=2.0) as probe:
        stand_in.update(delays={"nvmlDevice*": 0.3})
        readings, seconds = probe.timed_read()
        stand_in.update(delays={})

    assert [each.total for each in readings] == [8 * G, 16 * G]
    assert seconds > 2.0, "each call keeps to the deadline, and all of them do not"


def test_a_gpu_whose_calls_together_take_too_long_is_unreadable_beside_healthy_ones(
    stand_in: StandIn,
) -> None:
    with probing(stand_in, deadline=0.3) as probe:
        stand_in.change(0, delays={"nvmlDevice*": 0.25})
        tried = attempts(stand_in)
        probe.read_until(lambda found: faults(found) == [Fault.UNREADABLE, None])
        for _ in range(20):
            assert probe.read()[0].fault is Fault.UNREADABLE
        assert attempts(stand_in) == tried, "a new session would be no faster"
        stand_in.change(0, delays={})
        probe.read_until(are_well)


def test_a_hanging_call_is_waited_for_once_and_its_gpu_is_read_again_when_it_returns(
    stand_in: StandIn,
) -> None:
    with probing(stand_in, deadline=1.0) as probe:
        stand_in.change(0, delays={_MEMORY: HANG})
        hanging, well = probe.read()
        assert (hanging.uuid, hanging.fault) == (StandIn.uuid(0), Fault.UNREADABLE)
        assert hanging.detail
        assert (well.fault, well.total) == (None, 16 * G)
        before, threads = stand_in.calls().count(f"{_MEMORY} {StandIn.uuid(0)}"), probe.threads()

        seconds = sum(probe.timed_read()[1] for _ in range(20))

        assert seconds < 10, "twenty reads at the deadline would take twenty seconds"
        assert stand_in.calls().count(f"{_MEMORY} {StandIn.uuid(0)}") == before
        assert probe.threads() == threads
        stand_in.change(0, delays={}, used=5 * G)
        assert probe.read_until(are_well)[0].used == 5 * G


def test_the_hang_of_one_gpu_does_not_keep_a_lost_one_from_coming_back(stand_in: StandIn) -> None:
    with probing(stand_in, deadline=0.2) as probe:
        stand_in.change(0, delays={_MEMORY: HANG})
        stand_in.change(1, lost=True)
        probe.read_until(lambda found: faults(found) == [Fault.UNREADABLE, Fault.LOST])
        stand_in.change(1, lost=False)

        probe.read_until(lambda found: faults(found) == [Fault.UNREADABLE, None])
        stand_in.change(0, delays={})


def test_a_driver_that_hangs_as_a_whole_holds_up_no_read(stand_in: StandIn) -> None:
    with probing(stand_in, deadline=0.2) as probe:
        stand_in.update(delays={"nvmlDevice*": HANG})
        assert faults(probe.read()) == [Fault.UNREADABLE, Fault.UNREADABLE]
        stand_in.update(delays={})
        probe.read_until(are_well)


def test_a_probe_closes_while_a_call_hangs(stand_in: StandIn) -> None:
    probe = ProbeProcess(stand_in.environment(), deadline=0.1)
    stand_in.change(0, delays={_MEMORY: HANG})
    probe.read()

    assert probe.close() == 0


@pytest.mark.parametrize("code", [Code.UNINITIALIZED, Code.UNKNOWN])
def test_a_driver_that_goes_and_comes_back_is_used_again(stand_in: StandIn, code: Code) -> None:
    with probing(stand_in) as probe:
        stand_in.update(faults={"*": code})
        gone = probe.read()
        assert faults(gone) == [Fault.UNREADABLE, Fault.UNREADABLE]
        assert [each.uuid for each in gone] == [StandIn.uuid(0), StandIn.uuid(1)]
        assert all(each.detail and each.total is None for each in gone)

        stand_in.update(faults={})
        assert [each.total for each in probe.read_until(are_well)] == [8 * G, 16 * G]


def test_gpus_are_known_by_uuid_when_their_order_has_changed_and_attempts_grow_rarer(
    stand_in: StandIn,
) -> None:
    first, second = stand_in.gpus
    with probing(stand_in) as probe:
        stand_in.update(faults={"*": Code.DRIVER_NOT_LOADED})
        before = attempts(stand_in)
        for _ in range(200):
            probe.read()
        assert attempts(stand_in) - before < 20
        stand_in.update(faults={}, gpus=[second, first])

        readings = probe.read_until(are_well)

    assert [(each.uuid, each.index, each.total) for each in readings] == [
        (second.uuid, 0, 16 * G),
        (first.uuid, 1, 8 * G),
    ]


def test_a_driver_replaced_under_the_probe_is_used_through_its_own_library(
    stand_in: StandIn,
) -> None:
    with probing(stand_in) as probe:
        stand_in.load(_NEWER)
        readings = probe.read()
        assert faults(readings) == [Fault.UNREADABLE, Fault.UNREADABLE]
        assert "mismatch" in (readings[0].detail or "")
        assert probe.driver == DRIVER

        stand_in.install(_NEWER)
        assert [each.total for each in probe.read_until(are_well)] == [8 * G, 16 * G]
        assert probe.driver == _NEWER


def test_a_call_that_hangs_in_a_replaced_driver_is_left_behind(stand_in: StandIn) -> None:
    with probing(stand_in, deadline=0.2) as probe:
        stand_in.change(0, delays={_MEMORY: HANG})
        probe.read_until(lambda found: faults(found) == [Fault.UNREADABLE, None])
        stand_in.install(_NEWER)
        stand_in.load(_NEWER)
        probe.read_until(lambda found: found[1].fault is None)
        stand_in.change(0, delays={})

        assert [each.total for each in probe.read_until(are_well)] == [8 * G, 16 * G]


def test_a_process_for_nvml_that_ends_between_two_readings_is_started_again(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stand_in.environment().items():
        monkeypatch.setenv(name, value)
    gpus = NvmlProcess(timedelta(seconds=3), first_retry=timedelta(milliseconds=1))
    try:
        assert are_well(gpus.read())
        (child,) = (
            each
            for each in psutil.Process().children()
            if "gpulease.gpu.nvml_process" in each.cmdline()
        )
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert faults(gpus.read()) == [Fault.UNREADABLE] * 2
        wait_for("another one reads", lambda: are_well(gpus.read()))
    finally:
        gpus.close()
