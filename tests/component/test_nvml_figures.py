"""What NvmlProbe makes of the driver's figures, through the real ABI of the driver's library."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulease.domain.gpu import (
    ComputeMode,
    Fault,
    GpuReading,
    GpuUuid,
    ProcessReading,
    build_ledger,
)
from gpulease.domain.lease import Claim
from gpulease.domain.placement import can_ever_hold
from nvml_stand_in import DRIVER, Card, Code, Part, ProbeProcess, StandIn

G = 1024**3
_NEWEST = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")
_OLDER = ("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v2")
_HIGHEST_PID = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
_CARD = Card(
    total=80 * G,
    used=61 * G,
    reserved=G,
    processes=[(101, 60 * G)],
    graphics=[(102, G)],
    utilization=97,
    temperature=61,
    power=287.4,
    power_limit=400,
)
_READING = GpuReading(
    uuid=GpuUuid(StandIn.uuid(0)),
    index=0,
    name="NVIDIA Stand-in",
    total=80 * G,
    used=61 * G,
    reserved=G,
    processes=(ProcessReading(101, 60 * G), ProcessReading(102, G, graphics=True)),
    utilization=97,
    temperature=61,
    power=287.4,
    power_limit=400.0,
)


def read(tmp_path: Path, *cards: Card, missing: tuple[str, ...] = ()) -> tuple[GpuReading, ...]:
    """Read these cards once."""
    stand_in = StandIn(tmp_path, cards, missing=missing)
    with ProbeProcess(stand_in.environment()) as probe:
        assert probe.error is None
        return probe.read()


def without(reading: GpuReading, **fields: object) -> dict[str, object]:
    """Return the fields of `reading` with some replaced."""
    names = GpuReading.__dataclass_fields__
    return {name: getattr(reading, name) for name in names} | fields


def fields_of(reading: GpuReading) -> dict[str, object]:
    """Return the fields of `reading`, to be compared with `without`."""
    return without(reading)


def test_every_figure_of_a_healthy_gpu_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, _CARD) == (_READING,)


def test_a_second_gpu_of_the_same_name_cannot_be_read(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, Card(uuid="GPU-a"), Card(uuid="GPU-a"), Card())

    assert (first.uuid, first.fault, third.fault) == ("GPU-a", None, None)
    assert (second.uuid, second.fault) == ("unknown-1", Fault.UNREADABLE)
    assert "GPU 0" in (second.detail or "")


def test_a_gpu_without_a_uuid_takes_no_lease_and_says_why(tmp_path: Path) -> None:
    nameless = Card(faults={"nvmlDeviceGetUUID": Code.NOT_SUPPORTED})
    first, second = read(tmp_path, Card(), nameless)

    assert (first.fault, first.total) == (None, 80 * G)
    assert (second.fault, second.total, "UUID" in (second.detail or "")) == (None, None, True)
    assert not can_ever_hold(Claim(G), build_ledger(second, [], {})), "refused, not queued"


def test_more_reserved_than_there_is_is_no_size(tmp_path: Path) -> None:
    (seen,) = read(tmp_path, Card(total=8 * G, reserved=9 * G))

    assert (seen.total, seen.used, seen.reserved) == (None, None, None)


def test_the_drivers_version_is_told(tmp_path: Path) -> None:
    with ProbeProcess(StandIn(tmp_path).environment()) as probe:
        assert probe.driver == DRIVER


def test_without_the_second_memory_function_what_the_driver_holds_counts_as_used(
    tmp_path: Path,
) -> None:
    (reading,) = read(tmp_path, _CARD, missing=("nvmlDeviceGetMemoryInfo_v2",))

    assert fields_of(reading) == without(_READING, used=62 * G, reserved=None)


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.NO_PERMISSION, Code.INVALID_ARGUMENT])
def test_a_gpu_is_not_larger_while_its_second_memory_function_fails(
    tmp_path: Path, code: Code
) -> None:
    faults = {"nvmlDeviceGetMemoryInfo_v2": code}

    (reading,) = read(tmp_path, replace(_CARD, faults=faults))

    assert (reading.fault, reading.total) == (Fault.UNREADABLE, None)


@pytest.mark.parametrize("code", [Code.NOT_SUPPORTED, Code.ARGUMENT_VERSION_MISMATCH])
def test_a_driver_that_does_not_know_the_second_memory_figures_is_asked_for_the_first(
    tmp_path: Path, code: Code
) -> None:
    faults = {"nvmlDeviceGetMemoryInfo_v2": code}

    (reading,) = read(tmp_path, replace(_CARD, faults=faults))

    assert fields_of(reading) == without(_READING, used=62 * G, reserved=None)


@pytest.mark.parametrize(
    ("function", "unknown"),
    [
        ("nvmlDeviceGetTemperature*", {"temperature": None}),
        ("nvmlDeviceGetUtilizationRates", {"utilization": None}),
        ("nvmlDeviceGetPowerUsage", {"power": None}),
        ("nvmlDeviceGetEnforcedPowerLimit", {}),
        ("nvmlDeviceGetComputeRunningProcesses_v3", {}),
    ],
)
def test_a_figure_that_cannot_be_read_now_is_unknown_and_no_other(
    tmp_path: Path, function: str, unknown: dict[str, object]
) -> None:
    (reading,) = read(tmp_path, replace(_CARD, faults={function: Code.UNKNOWN}))

    assert fields_of(reading) == without(_READING, **unknown)


@pytest.mark.parametrize("kind", ["Compute", "Graphics"])
def test_a_gpu_whose_processes_cannot_be_listed_now_is_unreadable(
    tmp_path: Path, kind: str
) -> None:
    function = f"nvmlDeviceGet{kind}RunningProcesses*"

    (now,) = read(tmp_path / "now", replace(_CARD, faults={function: Code.UNKNOWN}))
    (never,) = read(tmp_path / "never", replace(_CARD, faults={function: Code.NO_PERMISSION}))

    assert (now.fault, now.used) == (Fault.UNREADABLE, None)
    assert (never.fault, never.processes) == (None, None)


def test_a_name_a_minor_number_and_an_address_are_asked_for_until_the_driver_tells_them(
    tmp_path: Path,
) -> None:
    asked = ("nvmlDeviceGetName", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo_v3")
    faults = dict.fromkeys(asked, Code.UNKNOWN)
    card = replace(_CARD, minor=3, bus="00000000:3B:00.0", faults=faults)
    stand_in = StandIn(tmp_path, [card])
    with ProbeProcess(stand_in.environment()) as probe:
        (before,) = probe.read()
        stand_in.change(0, faults={})
        (after,) = probe.read()

    assert (before.name, before.minor, before.bus) == ("unnamed GPU", None, None)
    assert before.fault is None
    assert (after.name, after.minor, after.bus) == ("NVIDIA Stand-in", 3, "0000:3b:00.0")


def test_a_pci_domain_that_needs_all_its_digits_keeps_them(tmp_path: Path) -> None:
    (reading,) = read(tmp_path, replace(_CARD, bus="00010000:3B:00.0"))

    assert reading.bus == "00010000:3b:00.0"


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        (("nvmlDeviceGetUtilizationRates",), {"utilization": None}),
        (("nvmlDeviceGetTemperature",), {}),
        (("nvmlDeviceGetTemperatureV",), {}),
        (("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), {"temperature": None}),
        (("nvmlDeviceGetMigMode",), {}),
        (("nvmlDeviceGetName",), {"name": "unnamed GPU"}),
        ((*_NEWEST,), {}),
        ((*_NEWEST, *_OLDER), {"processes": None}),
        ((_NEWEST[0], _OLDER[0]), {"processes": None}),
        ((_NEWEST[1], _OLDER[1]), {"processes": (ProcessReading(101, 60 * G),)}),
    ],
)
def test_a_missing_function_costs_its_field_and_no_other(
    tmp_path: Path, missing: tuple[str, ...], lost: dict[str, object]
) -> None:
    (reading,) = read(tmp_path, _CARD, missing=missing)

    assert fields_of(reading) == without(_READING, **lost)


def test_a_driver_that_does_not_tell_its_version_is_used_all_the_same(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [_CARD], missing=["nvmlSystemGetDriverVersion"])
    with ProbeProcess(stand_in.environment()) as probe:
        assert probe.driver is None
        assert probe.read() == (_READING,)


def test_what_a_gpu_does_not_support_is_unknown(tmp_path: Path) -> None:
    (reading,) = read(tmp_path, Card(utilization=None, temperature=None, mig=None))

    assert (reading.utilization, reading.temperature) == (None, None)
    assert (reading.total, reading.processes, reading.detail) == (80 * G, (), None)


def test_a_process_in_both_lists_counts_once_with_the_larger_figure(tmp_path: Path) -> None:
    card = Card(used=9 * G, processes=[(7, 2 * G), (8, None)], graphics=[(7, 3 * G), (8, G)])

    (reading,) = read(tmp_path, card)

    assert reading.processes == (ProcessReading(7, 3 * G), ProcessReading(8, G))


def test_memory_that_the_driver_does_not_tell_stays_unknown(tmp_path: Path) -> None:
    (reading,) = read(tmp_path, Card(used=9 * G, processes=[(7, None), (8, G)]))

    assert reading.processes == (ProcessReading(7, None), ProcessReading(8, G))


def test_more_memory_than_the_gpu_has_is_unknown(tmp_path: Path) -> None:
    (reading,) = read(tmp_path, Card(total=8 * G, used=9 * G, processes=[(7, 10 * G)]))

    assert (reading.total, reading.used) == (8 * G, None)
    assert reading.processes == (ProcessReading(7, None),)


def test_a_total_that_is_not_available_is_unknown(tmp_path: Path) -> None:
    (reading,) = read(tmp_path, Card(total=2**64 - 1))

    assert (reading.total, reading.used, reading.fault) == (None, None, None)


def test_records_longer_than_expected_are_read_by_the_older_function(tmp_path: Path) -> None:
    processes = [(101, G), (102, 2 * G), (103, 3 * G)]

    (reading,) = read(tmp_path, Card(used=6 * G, processes=processes, long_records=True))

    assert reading.processes == tuple(ProcessReading(*process) for process in processes)


def test_misread_processes_are_unknown_where_there_is_no_older_function(tmp_path: Path) -> None:
    card = Card(used=3 * G, processes=[(101, G), (102, 2 * G)], long_records=True)

    (reading,) = read(tmp_path, card, missing=_OLDER)

    assert (reading.used, reading.processes) == (3 * G, None)


@pytest.mark.parametrize("pid", [0, _HIGHEST_PID + 1, 2**32 - 1])
def test_a_list_with_an_impossible_pid_is_not_believed(tmp_path: Path, pid: int) -> None:
    (reading,) = read(tmp_path, Card(used=3 * G, processes=[(101, G), (pid, G)]))

    assert (reading.used, reading.processes) == (3 * G, None)


def test_a_full_card_of_processes_is_read(tmp_path: Path) -> None:
    processes = [(pid, G // 2) for pid in range(1, 61)]

    (reading,) = read(tmp_path, Card(used=40 * G, processes=processes))

    assert reading.processes == tuple(ProcessReading(*process) for process in processes)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"compute_mode": 0}, ComputeMode.DEFAULT),
        ({"compute_mode": 1}, ComputeMode.EXCLUSIVE_PROCESS),
        ({"compute_mode": 2}, ComputeMode.PROHIBITED),
        ({"compute_mode": 3}, ComputeMode.EXCLUSIVE_PROCESS),
        ({"compute_mode": 9}, None),
        ({"compute_mode": None}, ComputeMode.DEFAULT),
        ({"faults": {"nvmlDeviceGetComputeMode": Code.UNKNOWN}}, None),
        ({"faults": {"nvmlDeviceGetComputeMode": Code.INVALID_ARGUMENT}}, ComputeMode.DEFAULT),
    ],
)
def test_a_compute_mode_is_unknown_only_where_the_driver_has_one(
    tmp_path: Path, fields: dict[str, Any], mode: ComputeMode | None
) -> None:
    (reading,) = read(tmp_path, Card(**fields))

    assert (reading.compute_mode, reading.fault) == (mode, None)


def test_a_driver_without_compute_modes_has_the_default(tmp_path: Path) -> None:
    (reading,) = read(tmp_path, Card(compute_mode=2), missing=("nvmlDeviceGetComputeMode",))

    assert reading.compute_mode is not None
    assert reading.compute_mode == ComputeMode.DEFAULT


def test_unified_memory_has_no_total_and_says_so(tmp_path: Path) -> None:
    unified, plain = read(tmp_path, Card(total=None, processes=[(5, G)]), Card(total=8 * G))

    assert (unified.total, unified.used, unified.fault) == (None, None, None)
    assert unified.processes == (ProcessReading(5, G),)
    assert "unified memory" in (unified.detail or "")
    assert (plain.total, plain.detail) == (8 * G, None)


def test_a_gpu_in_mig_mode_is_not_leased_and_says_so(tmp_path: Path) -> None:
    divided, plain = read(tmp_path, Card(mig=True, used=G), Card(mig=False))

    assert (divided.total, divided.used, divided.fault) == (None, G, None)
    assert divided.mig_mode
    assert "MIG" in (divided.detail or "")
    assert (plain.total, plain.detail, plain.mig_mode) == (80 * G, None, False)


def test_mig_devices_are_read_like_gpus_of_their_own(tmp_path: Path) -> None:
    parts = [
        Part("MIG-a", total=40 * G, used=3 * G, reserved=G, processes=[(101, 2 * G)]),
        Part(),
        Part("MIG-b", total=20 * G),
    ]
    card = Card(mig=True, used=3 * G, processes=[(101, 2 * G)], parts=parts, temperature=61)

    whole, first, second, plain = read(tmp_path, card, Card())

    assert "2 MIG devices" in (whole.detail or "")
    assert whole.processes == (), "shown where they are, and not twice"
    assert [each.label for each in (whole, first, second, plain)] == ["0", "0:0", "0:2", "1"]
    assert (first.uuid, first.parent, first.total) == ("MIG-a", StandIn.uuid(0), 40 * G)
    assert (first.used, first.reserved, first.temperature) == (3 * G, G, 61)
    assert first.processes == (ProcessReading(101, 2 * G),)
    assert (first.utilization, first.device_nodes, first.fault) == (None, None, None)
    assert (second.uuid, second.processes, second.used) == ("MIG-b", (), 0)


def test_mig_devices_come_and_go_and_are_lost_with_their_gpu(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [Card(mig=True, parts=[Part("MIG-a"), Part("MIG-b")])])
    with ProbeProcess(stand_in.environment()) as probe:
        assert [each.uuid for each in probe.read()[1:]] == ["MIG-a", "MIG-b"]
        stand_in.change(0, parts=[Part("MIG-c")])
        assert [each.uuid for each in probe.read()[1:]] == ["MIG-c"]
        stand_in.change(0, lost=True)
        whole, part = probe.read()
        assert (whole.fault, part.uuid, part.fault) == (Fault.LOST, "MIG-c", Fault.LOST)
        assert part.label == "0:0"
        stand_in.change(0, lost=False, mig=False)
        (again,) = probe.read_until(lambda found: found[0].fault is None)
        assert (again.mig_mode, again.total) == (False, 80 * G)


_MIG_MODE = "nvmlDeviceGetMigMode"
_LISTING_PARTS = (
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetUUID",
)


@pytest.mark.parametrize("function", [_MIG_MODE, *_LISTING_PARTS])
def test_a_divided_gpu_and_its_parts_are_unreadable_while_the_driver_does_not_say_which_there_are(
    tmp_path: Path, function: str
) -> None:
    card = Card(mig=True, parts=[Part("MIG-a"), Part("MIG-b")])
    stand_in = StandIn(tmp_path, [card, Card()])
    with ProbeProcess(stand_in.environment()) as probe:
        before = probe.read()
        stand_in.change(0, faults={function: Code.UNKNOWN})
        during = probe.read()
        stand_in.change(0, faults={})
        after = probe.read()

    unreadable = Fault.UNREADABLE
    assert [each.uuid for each in during] == [each.uuid for each in before]
    assert [each.fault for each in during] == [unreadable, unreadable, unreadable, None]
    assert [each.total for each in during[:3]] == [None, None, None]
    assert after == before


def test_a_gpu_whose_mig_mode_is_not_known_now_is_not_leased(tmp_path: Path) -> None:
    (reading,) = read(tmp_path, Card(faults={_MIG_MODE: Code.UNKNOWN}))

    assert (reading.fault, reading.total, reading.mig_mode) == (Fault.UNREADABLE, None, False)


def test_a_place_that_the_driver_calls_invalid_holds_no_mig_device(tmp_path: Path) -> None:
    faults = {"nvmlDeviceGetMigDeviceHandleByIndex": Code.INVALID_ARGUMENT}

    (whole,) = read(tmp_path, Card(mig=True, faults=faults))

    assert (whole.mig_mode, whole.fault) == (True, None)


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.INVALID_ARGUMENT, Code.GPU_IS_LOST])
def test_a_mig_device_whose_memory_cannot_be_read_now_is_unreadable_and_not_lost(
    tmp_path: Path, code: Code
) -> None:
    failing = Part("MIG-a", fault=("nvmlDeviceGetMemoryInfo*", int(code)))

    whole, part, beside = read(tmp_path, Card(mig=True, parts=[failing, Part("MIG-b")]))

    assert (part.uuid, part.fault) == ("MIG-a", Fault.UNREADABLE)
    assert (whole.fault, whole.mig_mode, beside.fault) == (None, True, None)


def test_the_figures_of_a_divided_gpu_itself_may_be_unknown(tmp_path: Path) -> None:
    card = Card(
        mig=True, parts=[Part("MIG-a")], faults={"nvmlDeviceGetMemoryInfo*": Code.NO_PERMISSION}
    )

    whole, part = read(tmp_path, card)

    assert (whole.mig_mode, whole.fault, whole.used) == (True, None, None)
    assert part.fault is Fault.UNREADABLE


def test_a_mig_devices_memory_that_cannot_be_read_is_its_own_fault(tmp_path: Path) -> None:
    card = Card(
        mig=True, parts=[Part("MIG-a")], faults={"nvmlDeviceGetMemoryInfo*": Code.NOT_SUPPORTED}
    )

    whole, part = read(tmp_path, card)

    assert (whole.mig_mode, part.total, part.fault) == (True, None, None)


@pytest.mark.parametrize("code", [Code.NO_PERMISSION, Code.UNKNOWN])
def test_a_gpu_whose_memory_cannot_be_read_now_is_unreadable(tmp_path: Path, code: Code) -> None:
    broken = Card(faults={"nvmlDeviceGetMemoryInfo*": code})

    first, second = read(tmp_path, broken, _CARD)

    assert (first.fault, first.total, first.uuid) == (Fault.UNREADABLE, None, StandIn.uuid(0))
    assert first.detail
    assert (second.fault, second.used) == (None, 61 * G)


@pytest.mark.parametrize(
    ("samples", "busy"),
    [
        pytest.param([(101, 40), (101, 55), (7, 0)], (55, 0), id="by process, and none is nothing"),
        pytest.param([(101, 40), (7, 3)], (None, None), id="one that is not listed computes, too"),
        pytest.param([(7, 95)], (None, None), id="none that is listed computes"),
        pytest.param([(101, 0)], (None, None), id="nobody computes, and yet something does"),
        pytest.param([(101, 0), (102, 1)], (0, 1), id="told of one that did nothing"),
        pytest.param((), (None, None), id="no samples, though something computes"),
        pytest.param(None, (None, None), id="a driver that cannot"),
        pytest.param([(101, 40), (102, 900)], (None, None), id="more than all of the time"),
        pytest.param([(101, 40), (0, 0)], (None, None), id="records of nobody"),
    ],
)
def test_how_busy_each_process_is_comes_from_samples_that_can_be_true(
    tmp_path: Path,
    samples: list[tuple[int, int]] | None,
    busy: tuple[int | None, int | None],
) -> None:
    (reading,) = read(tmp_path, replace(_CARD, samples=samples))

    assert reading.processes is not None
    assert tuple(each.utilization for each in reading.processes) == busy


def test_processes_are_told_apart_only_where_that_answers_something(tmp_path: Path) -> None:
    alone = replace(_CARD, graphics=(), samples=[(101, 40)])
    idle = replace(_CARD, utilization=0, samples=[(101, 40)])
    stand_in = StandIn(tmp_path, [alone, idle])
    with ProbeProcess(stand_in.environment()) as probe:
        probe.read()

    assert not [line for line in stand_in.calls() if "ProcessUtilization" in line]
