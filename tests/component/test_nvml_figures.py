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
_MIG_MODE = "nvmlDeviceGetMigMode"
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


def test_every_figure_of_a_healthy_gpu_is_read(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [_CARD])
    with ProbeProcess(stand_in.environment()) as probe:
        assert probe.read() == (_READING,)
        assert probe.driver == DRIVER


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


def test_processes_are_told_apart_only_where_that_answers_something(tmp_path: Path) -> None:
    alone = replace(_CARD, graphics=(), samples=[(101, 40)])
    idle = replace(_CARD, utilization=0, samples=[(101, 40)])
    stand_in = StandIn(tmp_path, [alone, idle])
    with ProbeProcess(stand_in.environment()) as probe:
        probe.read()

    assert not [line for line in stand_in.calls() if "ProcessUtilization" in line]


_NO_SIZE = dict.fromkeys(("total", "used", "reserved"))
_FIRST_VERSION = {"used": 62 * G, "reserved": None}
"""What the first function of memory reports: what the driver reserves counts as used."""
_UNREADABLE = {"fault": Fault.UNREADABLE}
_MEMORY = "nvmlDeviceGetMemoryInfo*"
_THREE = [(101, G), (102, 2 * G), (103, 3 * G)]
_FULL = [(pid, G // 2) for pid in range(1, 61)]


def processes(*pairs: tuple[int, int | None]) -> dict[str, Any]:
    return {"processes": tuple(ProcessReading(*pair) for pair in pairs)}


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(
            [
                (Card(reserved=81 * G), _NO_SIZE | processes()),
                (Card(total=2**64 - 1), _NO_SIZE),
                (Card(total=8 * G, used=9 * G, processes=[(7, 10 * G)]),
                 {"total": 8 * G, "used": None} | processes((7, None))),
                (Card(faults={"nvmlDeviceGetMemoryInfo_v2": Code.NOT_SUPPORTED}, used=61 * G,
                      reserved=G), _FIRST_VERSION),
                (Card(faults={"nvmlDeviceGetMemoryInfo_v2": Code.ARGUMENT_VERSION_MISMATCH},
                      used=61 * G, reserved=G), _FIRST_VERSION),
                (Card(faults={"nvmlDeviceGetMemoryInfo_v2": Code.UNKNOWN}), _UNREADABLE),
                (Card(faults={_MEMORY: Code.NO_PERMISSION}), _UNREADABLE),
            ],
            id="memory",
        ),
        pytest.param(
            [
                (Card(used=9 * G, processes=[(7, 2 * G), (8, None)], graphics=[(7, 3 * G), (8, G)]),
                 processes((7, 3 * G), (8, G))),
                (Card(used=9 * G, processes=[(7, None), (8, G)]), processes((7, None), (8, G))),
                (Card(used=6 * G, processes=_THREE, long_records=True), processes(*_THREE)),
                (Card(used=40 * G, processes=_FULL), processes(*_FULL)),
                (Card(used=3 * G, processes=[(101, G), (0, G)]), {"processes": None}),
                (Card(used=3 * G, processes=[(101, G), (2**22 + 1, G)]), {"processes": None}),
            ],
            id="processes",
        ),
        pytest.param(
            [
                (Card(faults={f"nvmlDeviceGet{kind}RunningProcesses*": code}), expected)
                for kind in ("Compute", "Graphics")
                for code, expected in (
                    (Code.UNKNOWN, _UNREADABLE),
                    (Code.NO_PERMISSION, {"fault": None, "processes": None}),
                )
            ],
            id="lists",
        ),
        pytest.param(
            [
                (Card(compute_mode=0), {"compute_mode": ComputeMode.DEFAULT}),
                (Card(compute_mode=1), {"compute_mode": ComputeMode.EXCLUSIVE_PROCESS}),
                (Card(compute_mode=2), {"compute_mode": ComputeMode.PROHIBITED}),
                (Card(compute_mode=3), {"compute_mode": ComputeMode.EXCLUSIVE_PROCESS}),
                (Card(compute_mode=9), {"compute_mode": None}),
                (Card(compute_mode=None), {"compute_mode": ComputeMode.DEFAULT}),
                (Card(faults={"nvmlDeviceGetComputeMode": Code.UNKNOWN}), {"compute_mode": None}),
                (Card(faults={"nvmlDeviceGetComputeMode": Code.INVALID_ARGUMENT}),
                 {"compute_mode": ComputeMode.DEFAULT}),
            ],
            id="compute modes",
        ),
        pytest.param(
            [
                (Card(faults={"nvmlDeviceGetTemperature*": Code.UNKNOWN}), {"temperature": None}),
                (Card(utilization=None, mig=None), {"utilization": None, "fault": None}),
                (Card(faults={"nvmlDeviceGetPowerUsage": Code.UNKNOWN}), {"power": None}),
                (Card(bus="00010000:3B:00.0"), {"bus": "00010000:3b:00.0"}),
                (Card(faults={_MIG_MODE: Code.UNKNOWN}), _UNREADABLE),
                (Card(mig=True, faults={
                    "nvmlDeviceGetMigDeviceHandleByIndex": Code.INVALID_ARGUMENT}),
                 {"mig_mode": True, "fault": None}),
            ],
            id="others",
        ),
    ],
)  # fmt: skip
def test_a_figure_is_read_where_it_can_be_true_and_is_unknown_elsewhere(
    tmp_path: Path, table: list[tuple[Card, dict[str, object]]]
) -> None:
    for reading, (card, expected) in zip(
        read(tmp_path, *(card for card, _ in table)), table, strict=True
    ):
        assert {name: getattr(reading, name) for name in expected} == expected, card
        assert reading.fault is expected.get("fault")
        if reading.fault is not None:
            assert (reading.total, bool(reading.detail)) == (None, True)


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        (("nvmlDeviceGetMemoryInfo_v2",), _FIRST_VERSION),
        (("nvmlDeviceGetTemperature", *_NEWEST), {}),
        (("nvmlDeviceGetTemperatureV", "nvmlSystemGetDriverVersion", _MIG_MODE), {}),
        (("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), {"temperature": None}),
        (("nvmlDeviceGetName", "nvmlDeviceGetComputeMode"), {"name": "unnamed GPU"}),
        ((_NEWEST[0], _OLDER[0]), {"processes": None}),
        ((_NEWEST[1], _OLDER[1]), {"processes": (ProcessReading(101, 60 * G),)}),
    ],
)
def test_a_missing_function_costs_its_field_and_no_other(
    tmp_path: Path, missing: tuple[str, ...], lost: dict[str, Any]
) -> None:
    assert read(tmp_path, _CARD, missing=missing) == (replace(_READING, **lost),)


def test_misread_processes_are_unknown_where_there_is_no_older_function(tmp_path: Path) -> None:
    card = Card(used=3 * G, processes=_THREE, long_records=True)

    (reading,) = read(tmp_path, card, missing=_OLDER)

    assert (reading.used, reading.processes) == (3 * G, None)


def test_how_busy_each_process_is_comes_from_samples_that_can_be_true(tmp_path: Path) -> None:
    table: dict[str, tuple[Any, tuple[int | None, int | None]]] = {
        "by process, and none is nothing": ([(101, 40), (101, 55), (7, 0)], (55, 0)),
        "one that is not listed computes, too": ([(101, 40), (7, 3)], (None, None)),
        "none that is listed computes": ([(7, 95)], (None, None)),
        "nobody computes, and yet something does": ([(101, 0)], (None, None)),
        "told of one that did nothing": ([(101, 0), (102, 1)], (0, 1)),
        "no samples, though something computes": ((), (None, None)),
        "a driver that cannot": (None, (None, None)),
        "more than all of the time": ([(101, 40), (102, 900)], (None, None)),
        "records of nobody": ([(101, 40), (0, 0)], (None, None)),
    }
    cards = [replace(_CARD, samples=samples) for samples, _ in table.values()]
    for reading, (case, (_, busy)) in zip(read(tmp_path, *cards), table.items(), strict=True):
        assert tuple(each.utilization for each in reading.processes or ()) == busy, case
