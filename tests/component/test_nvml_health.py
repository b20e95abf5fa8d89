"""What NvmlProbe hears of the GPUs' health, through the real ABI of the driver's library."""

from contextlib import closing
from pathlib import Path

from gpulease.domain.gpu import Fault
from gpulease.domain.health import GpuModes, HealthFigures, HealthReport
from nvml_stand_in import HANG, Card, Code, ProbeProcess, StandIn

_NEWER = "590.44.01"
_WELL = HealthFigures(0, False, False, False, 0)


def xids(heard: list[HealthReport], index: int = 0) -> list[int]:
    """Return the XIDs of one GPU among what was heard."""
    return [each for one in heard if one.gpu == StandIn.uuid(index) for each in one.xids]


def listening(heard: list[HealthReport]) -> bool:
    """Say whether every GPU's XIDs are listened to."""
    return {one.gpu for one in heard if one.listens} == {StandIn.uuid(0), StandIn.uuid(1)}


def figures(heard: list[HealthReport], index: int = 0) -> list[HealthFigures]:
    """Return the figures of one GPU among what was heard."""
    return [one.figures for one in heard if one.gpu == StandIn.uuid(index) and one.figures]


def test_an_xid_is_heard_once_and_on_its_gpu_alone(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [Card(xids=[79]), Card()])
    with ProbeProcess(stand_in.environment()) as probe:
        before = probe.heard_until(listening)
        assert xids(before) == [], "what was before it listened is not news"
        stand_in.change(0, xids=[79, 31, 31])
        heard = probe.heard_until(lambda found: len(xids(found)) == 2)
        heard += probe.heard_until(lambda found: len(found) > 6)
    assert (xids(heard), xids(heard, 1)) == ([31, 31], [])


def test_an_xid_behind_a_storm_of_others_is_heard_within_a_few_looks(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [Card(), Card()])
    with ProbeProcess(stand_in.environment()) as probe:
        probe.heard_until(listening)
        stand_in.change(0, xids=[13] * 3000 + [79])
        heard = probe.heard_until(lambda found: 79 in xids(found))
    assert xids(heard) == [13] * 3000 + [79]
    # Each of these is what one look begins. Sixty at a time they would be 50.
    assert sum(bool(one.xids) for one in heard) <= 20


def test_figures_are_read_at_the_first_look_and_at_once_when_there_was_an_xid(
    tmp_path: Path,
) -> None:
    stand_in = StandIn(tmp_path, [Card(), Card(ecc=3, pages_pending=True, recovery=2)])
    with ProbeProcess(stand_in.environment()) as probe:
        before = probe.heard_until(lambda found: listening(found) and len(found) > 8)
        assert figures(before) == [_WELL]
        assert figures(before, 1) == [HealthFigures(3, False, False, True, 2)]
        assert {one.modes for one in before if one.modes} == {GpuModes(True, True, 0)}
        stand_in.change(0, xids=[63], remap_pending=True)
        heard = probe.heard_until(lambda found: bool(xids(found)))
    assert figures(heard) == [HealthFigures(0, True, False, False, 0)]


def test_what_a_gpu_does_not_support_is_unknown_and_the_rest_is_read(tmp_path: Path) -> None:
    quiet = Card(
        ecc=None,
        remap_pending=None,
        pages_pending=None,
        recovery=None,
        faults={"nvmlDeviceGetSupportedEventTypes": Code.NOT_SUPPORTED,
                "nvmlDeviceRegisterEvents": Code.NOT_SUPPORTED},
    )  # fmt: skip
    with ProbeProcess(StandIn(tmp_path, [quiet, Card(remap_pending=None)]).environment()) as probe:
        heard = probe.heard_until(lambda found: len(figures(found)) + len(figures(found, 1)) == 2)
    assert figures(heard) == [HealthFigures()]
    assert figures(heard, 1) == [HealthFigures(0, None, None, False, 0)]
    assert {one.listens for one in heard if one.gpu == StandIn.uuid(0)} == {False}


def test_a_library_without_any_of_these_functions_is_used_all_the_same(tmp_path: Path) -> None:
    missing = [
        "nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetFieldValues",
    ]  # fmt: skip
    stand_in = StandIn(tmp_path, [Card()], missing=missing)
    with ProbeProcess(stand_in.environment()) as probe:
        heard = probe.heard_until(bool)
        assert (heard[0].figures, heard[0].listens) == (HealthFigures(), False)
        assert probe.read()[0].fault is None


def test_health_that_hangs_holds_up_neither_reading_nor_the_other_gpu(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [Card(), Card()])
    with ProbeProcess(stand_in.environment()) as probe:
        probe.read()
        probe.heard_until(listening)
        stand_in.change(0, delays={"nvmlEventSetWait_v2": HANG})
        # Until a round has begun that hangs: of this GPU nothing comes any more.
        probe.heard_until(lambda found: [one.gpu for one in found[-4:]] == [StandIn.uuid(1)] * 4)
        threads = probe.threads()
        assert [reading.fault for reading in probe.read()] == [None, None]
        stand_in.change(1, xids=[43])
        assert xids(probe.heard_until(lambda found: bool(xids(found, 1))), 0) == []
        assert probe.threads() == threads
        stand_in.change(0, delays={}, xids=[13])
        probe.heard_until(lambda found: xids(found) == [13])


def test_a_probe_is_closed_while_its_health_hangs(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [Card()])
    probe = ProbeProcess(stand_in.environment(), deadline=0.3)
    with closing(probe):
        probe.heard_until(bool)
        stand_in.change(0, delays={"nvmlEventSetWait_v2": HANG})
        for _ in range(3):
            probe.health()
        assert probe.close() == 0


def test_events_are_heard_again_after_nvml_was_initialised_anew_and_no_thread_is_left(
    tmp_path: Path,
) -> None:
    stand_in = StandIn(tmp_path, [Card(), Card()])
    with ProbeProcess(stand_in.environment()) as probe:
        probe.read()
        probe.heard_until(listening)
        threads = probe.threads()
        for _ in range(3):
            stand_in.change(0, lost=True)
            probe.read_until(lambda found: found[0].fault is Fault.LOST)
            probe.health()
            stand_in.change(0, lost=False)
            probe.read_until(lambda found: found[0].fault is None)
            probe.heard_until(listening)
        stand_in.change(0, xids=[31])
        probe.heard_until(lambda found: xids(found) == [31])
        assert probe.threads() == threads


def test_events_are_heard_again_after_the_driver_was_replaced(tmp_path: Path) -> None:
    stand_in = StandIn(tmp_path, [Card(), Card()])
    with ProbeProcess(stand_in.environment()) as probe:
        probe.read()
        probe.heard_until(listening)
        threads = probe.threads()
        stand_in.install(_NEWER)
        stand_in.load(_NEWER)
        probe.read_until(lambda found: found[0].fault is not None)
        assert probe.health() == [], "nothing is asked of a driver that is gone"
        probe.read_until(lambda found: not any(one.fault for one in found))
        # What a round heard before is still told; that it listens would be said too early.
        assert all(one.listens is None for one in probe.health())
        probe.heard_until(listening)
        stand_in.change(1, xids=[48])
        probe.heard_until(lambda found: xids(found, 1) == [48])
        assert probe.threads() == threads


def test_a_figure_that_cannot_be_read_now_stays_as_it_was(tmp_path: Path) -> None:
    faulty = Card(ecc=1, remap_failed=True, pages_pending=True, recovery=1)
    stand_in = StandIn(tmp_path, [faulty])
    known = HealthFigures(1, False, True, True, 1)
    failing = ("TotalEccErrors", "RemappedRows", "RetiredPagesPendingStatus", "FieldValues")
    with ProbeProcess(stand_in.environment()) as probe:
        before = probe.heard_until(lambda found: bool(figures(found)) and bool(found[-1].listens))
        assert figures(before) == [known]
        # An XID has the figures read again at once.
        stand_in.change(
            0, xids=[31], faults={f"nvmlDeviceGet{each}": Code.UNKNOWN for each in failing}
        )
        heard = probe.heard_until(lambda found: bool(xids(found)))
    assert figures(heard) == [known]
