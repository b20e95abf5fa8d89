"""What NvmlProbe does while a GPU or the whole driver fails, hangs, or is replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease.domain.memory import Fault, GpuReading
from nvml_stand_in import DRIVER, HANG, Card, Code, ProbeProcess, StandIn

G = 1024**3
_MEMORY = "nvmlDeviceGetMemoryInfo_v2"
_NEWER = "590.44.01"


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path, [Card(total=8 * G, name="first"), Card(total=16 * G, name="second")])


@contextmanager
def probing(stand_in: StandIn, deadline: float = 3.0) -> Iterator[ProbeProcess]:
    """Open a probe on these GPUs, and see that it reads them."""
    with ProbeProcess(stand_in.environment(), deadline=deadline) as probe:
        assert probe.error is None
        assert faults(probe.read()) == [None] * len(stand_in.gpus)
        yield probe


def faults(readings: tuple[GpuReading, ...]) -> list[Fault | None]:
    """Return what is wrong with each GPU."""
    return [reading.fault for reading in readings]


def are_well(readings: tuple[GpuReading, ...]) -> bool:
    """Say whether nothing is wrong with any GPU."""
    return not any(faults(readings))


def test_a_lost_gpu_keeps_its_identity_beside_healthy_ones(stand_in: StandIn) -> None:
    with probing(stand_in) as probe:
        stand_in.change(0, lost=True)
        lost, well = probe.read()

    assert (lost.uuid, lost.index, lost.name) == (StandIn.uuid(0), 0, "first")
    assert (lost.fault, lost.total, lost.detail) == (Fault.LOST, None, "GPU is lost")
    assert (well.uuid, well.fault, well.total) == (StandIn.uuid(1), None, 16 * G)


def test_a_lost_gpu_keeps_its_identity_when_the_gpus_are_listed_again(stand_in: StandIn) -> None:
    with probing(stand_in) as probe:
        stand_in.change(0, lost=True)
        listed = stand_in.calls().count("nvmlDeviceGetCount_v2 -")
        readings = probe.read_until(
            lambda _: stand_in.calls().count("nvmlDeviceGetCount_v2 -") >= listed + 3
        )

    assert [(each.uuid, each.name) for each in readings] == [
        (StandIn.uuid(0), "first"),
        (StandIn.uuid(1), "second"),
    ]


def test_a_gpu_that_comes_back_is_read_again(stand_in: StandIn) -> None:
    with probing(stand_in) as probe:
        stand_in.change(1, lost=True)
        assert faults(probe.read()) == [None, Fault.LOST]
        stand_in.change(1, lost=False)

        readings = probe.read_until(are_well)

    assert [reading.total for reading in readings] == [8 * G, 16 * G]


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
        stand_in.change(0, lost=True)
        probe.read()
        stand_in.update(gpus=[second])

        readings = probe.read_until(lambda found: found[1].index == 0)
        assert [(each.uuid, each.fault) for each in readings] == [
            (first.uuid, Fault.LOST),
            (second.uuid, None),
        ]

        stand_in.update(gpus=[second, first])
        readings = probe.read_until(are_well)
        assert [each.uuid for each in readings] == [second.uuid, first.uuid]


def test_a_hanging_gpu_is_unreadable_within_the_deadline_beside_healthy_ones(
    stand_in: StandIn,
) -> None:
    with probing(stand_in, deadline=0.3) as probe:
        stand_in.change(0, delays={_MEMORY: HANG})
        (hanging, well), seconds = probe.timed_read()

        assert hanging.fault is Fault.UNREADABLE
        assert "has not answered for" in (hanging.detail or "")
        assert (hanging.uuid, well.fault, well.total) == (StandIn.uuid(0), None, 16 * G)
        assert 0.25 < seconds < 2
        stand_in.change(0, delays={})


def test_a_hanging_call_is_neither_repeated_nor_waited_for_again(stand_in: StandIn) -> None:
    with probing(stand_in, deadline=0.3) as probe:
        stand_in.change(0, delays={_MEMORY: HANG})
        probe.read()
        before, threads = stand_in.calls().count(f"{_MEMORY} {StandIn.uuid(0)}"), probe.threads()

        seconds = [probe.timed_read()[1] for _ in range(20)]

        assert stand_in.calls().count(f"{_MEMORY} {StandIn.uuid(0)}") == before
        assert probe.threads() == threads
        assert sum(seconds) < 2, "twenty reads at the deadline would take six seconds"
        stand_in.change(0, delays={})


def test_a_gpu_is_read_again_once_its_hanging_call_returns(stand_in: StandIn) -> None:
    with probing(stand_in, deadline=0.2) as probe:
        stand_in.change(0, delays={_MEMORY: HANG})
        assert faults(probe.read()) == [Fault.UNREADABLE, None]
        stand_in.change(0, delays={}, used=5 * G)

        readings = probe.read_until(are_well)

    assert readings[0].used == 5 * G


def test_the_hang_of_one_gpu_does_not_keep_a_lost_one_from_coming_back(stand_in: StandIn) -> None:
    with probing(stand_in, deadline=0.2) as probe:
        stand_in.change(0, delays={_MEMORY: HANG})
        stand_in.change(1, lost=True)
        assert faults(probe.read()) == [Fault.UNREADABLE, Fault.LOST]
        stand_in.change(1, lost=False)

        probe.read_until(lambda found: faults(found) == [Fault.UNREADABLE, None])
        stand_in.change(0, delays={})


def test_a_driver_that_hangs_as_a_whole_holds_up_no_read(stand_in: StandIn) -> None:
    with probing(stand_in, deadline=0.2) as probe:
        stand_in.update(delays={"nvmlDevice*": HANG})
        readings, seconds = probe.timed_read()

        assert faults(readings) == [Fault.UNREADABLE, Fault.UNREADABLE]
        assert seconds < 2
        stand_in.update(delays={})
        probe.read_until(are_well)


def test_a_probe_closes_while_a_call_hangs(stand_in: StandIn) -> None:
    probe = ProbeProcess(stand_in.environment(), deadline=0.1)
    stand_in.change(0, delays={_MEMORY: HANG})
    probe.read()

    assert probe.close() == 0


@pytest.mark.parametrize("code", [Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.UNKNOWN])
def test_a_driver_that_goes_and_comes_back_is_used_again(stand_in: StandIn, code: Code) -> None:
    with probing(stand_in) as probe:
        stand_in.update(faults={"*": code})
        gone = probe.read()
        assert faults(gone) == [Fault.UNREADABLE, Fault.UNREADABLE]
        assert [each.uuid for each in gone] == [StandIn.uuid(0), StandIn.uuid(1)]
        assert all(each.detail and each.total is None for each in gone)

        stand_in.update(faults={})
        assert [each.total for each in probe.read_until(are_well)] == [8 * G, 16 * G]


def test_gpus_are_known_by_uuid_when_their_order_has_changed(stand_in: StandIn) -> None:
    first, second = stand_in.gpus
    with probing(stand_in) as probe:
        stand_in.update(faults={"*": Code.DRIVER_NOT_LOADED})
        probe.read()
        stand_in.update(faults={}, gpus=[second, first])

        readings = probe.read_until(are_well)

    assert [(each.uuid, each.index, each.total) for each in readings] == [
        (second.uuid, 0, 16 * G),
        (first.uuid, 1, 8 * G),
    ]


def test_attempts_grow_rarer_while_the_driver_stays_away(stand_in: StandIn) -> None:
    with probing(stand_in) as probe:
        before = stand_in.calls().count("nvmlInitWithFlags -")
        stand_in.update(faults={"*": Code.DRIVER_NOT_LOADED})
        for _ in range(200):
            probe.read()
        attempts = stand_in.calls().count("nvmlInitWithFlags -") - before

    assert attempts < 20


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
        assert faults(probe.read()) == [Fault.UNREADABLE, None]
        stand_in.install(_NEWER)
        stand_in.load(_NEWER)
        probe.read_until(lambda found: found[1].fault is None)
        stand_in.change(0, delays={})

        assert [each.total for each in probe.read_until(are_well)] == [8 * G, 16 * G]
