"""The driver's memory limits through the real ABI: what is set, what is kept, what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from goldens import mentions
from nvml_stand_in import HANG, Card, Code, Part, ProbeProcess, StandIn

M, G = 1024**2, 1024**3
R615 = "615.10"
GPU = StandIn.uuid(0)
_RECORDS = ("c_nvmlSetMemoryLimits_v1_t", "c_nvmlGetMemoryLimits_v1_t")
_BOTH = ("nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1")


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    """Return what looks like a cgroup to who only looks."""
    path = tmp_path / "gpulease-job-1.scope"
    path.mkdir()
    (path / "cgroup.procs").touch()
    return path


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path, driver=R615)


@pytest.fixture
def probe(stand_in: StandIn) -> Iterator[ProbeProcess]:
    with ProbeProcess(stand_in.environment()) as opened:
        yield opened


def test_a_limit_is_set_and_what_the_driver_keeps_is_told(
    stand_in: StandIn, probe: ProbeProcess, cgroup: Path
) -> None:
    assert probe.limits("obstacle", GPU, cgroup) is None
    assert probe.limits("kept", GPU, cgroup) is None
    # As NVIDIA's guide has it.
    assert probe.limits("limit", GPU, cgroup, 3000 * M) == 2816 * M
    assert stand_in.limits() == {(GPU, str(cgroup)): (0, 2816 * M)}
    assert probe.limits("kept", GPU, cgroup) == 2816 * M
    assert probe.limits("limit", GPU, cgroup, 4 * G) == 4 * G

    assert probe.limits("lift", GPU, cgroup) is None
    assert stand_in.limits() == {}
    assert probe.limits("lift", GPU, cgroup) is None, "as often as one likes"


def test_a_soft_limit_goes_before_the_hard_one(
    stand_in: StandIn, probe: ProbeProcess, cgroup: Path
) -> None:
    path = Path(stand_in.environment()["NVML_STAND_IN"]).with_name("limits")
    path.write_text(f"{GPU} {G} {2 * G} {cgroup}\n")
    before = len(stand_in.calls())
    probe.limits("lift", GPU, cgroup)
    assert stand_in.limits() == {}
    asked = [call.split()[0] for call in stand_in.calls()[before:]]
    assert asked == [_BOTH[1], _BOTH[0], _BOTH[0]]


def test_a_limit_is_never_above_the_lease_nor_nothing(
    stand_in: StandIn, probe: ProbeProcess, cgroup: Path
) -> None:
    stand_in.change(0, step=-256 * M)
    assert probe.limits("limit", GPU, cgroup, 3000 * M) == 2816 * M
    for step, kept in ((-512 * M, "512M"), (512 * M, " 0"), (0, "")):
        stand_in.change(0, step=step)
        assert mentions(probe.limits("limit", GPU, cgroup, 300 * M), kept)
        assert stand_in.limits() == {}


@pytest.mark.parametrize("missing", [_BOTH, _BOTH[:1]])
def test_a_driver_without_the_functions_has_no_limits(
    tmp_path: Path, cgroup: Path, missing: tuple[str, ...]
) -> None:
    stand_in = StandIn(tmp_path, driver=R615, missing=missing)
    with ProbeProcess(stand_in.environment()) as probe:
        assert "no memory limits" in probe.limits("limit", GPU, cgroup, G)
    assert stand_in.limits() == {}


def test_an_older_driver_says_so_when_it_is_asked_beforehand(tmp_path: Path, cgroup: Path) -> None:
    stand_in = StandIn(tmp_path)
    with ProbeProcess(stand_in.environment()) as probe:
        why = probe.limits("obstacle", GPU, cgroup)
        assert probe.limits("lift", GPU, cgroup) is None, "there is nothing to lift"
    assert mentions(why, "no memory limits", "r615")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (Code.NOT_SUPPORTED, "no memory limits"),
        (Code.NO_PERMISSION, "this user set memory limits"),
        (Code.UNKNOWN, "the driver reports: "),
    ],
)
def test_a_driver_that_refuses_is_quoted(
    stand_in: StandIn, probe: ProbeProcess, cgroup: Path, code: Code, why: str
) -> None:
    stand_in.change(0, faults={_BOTH[0]: code})
    assert why in probe.limits("limit", GPU, cgroup, G)
    assert stand_in.limits() == {}
    stand_in.change(0, faults={_BOTH[1]: code})
    assert why in probe.limits("limit", GPU, cgroup, G)
    assert why in probe.limits("obstacle", GPU, cgroup), "a failure does not mean that it can"


def test_what_the_driver_has_against_one_cgroup_is_no_reason_to_give_up_for_all(
    stand_in: StandIn, probe: ProbeProcess, cgroup: Path
) -> None:
    stand_in.change(0, faults={_BOTH[1]: Code.INVALID_ARGUMENT})
    assert probe.limits("obstacle", GPU, cgroup) is None


def test_a_cgroup_that_has_gone_and_a_gpu_that_never_was_are_refused(
    probe: ProbeProcess, cgroup: Path, tmp_path: Path
) -> None:
    assert probe.limits("limit", GPU, tmp_path / "none", G)
    assert probe.limits("limit", "GPU-x", cgroup, G)


def test_a_driver_that_hangs_is_waited_for_until_the_deadline_and_readings_go_on(
    stand_in: StandIn, cgroup: Path
) -> None:
    with ProbeProcess(stand_in.environment(), deadline=2.0) as probe:
        stand_in.change(0, delays={_BOTH[0]: HANG})
        assert probe.limits("limit", GPU, cgroup, G)
        (reading,) = probe.read()
        assert reading.fault is None
        stand_in.change(0, delays={})
        # What hung comes to its end first, and is not taken for what is asked now.
        assert probe.limits("limit", GPU, cgroup, 2 * G) == 2 * G


def test_an_old_binding_is_told_from_an_old_driver(
    stand_in: StandIn, tmp_path: Path, cgroup: Path
) -> None:
    older = tmp_path / "older"
    older.mkdir()
    forget = "; ".join(f"del pynvml.{name}" for name in (*_BOTH, *_RECORDS))
    (older / "sitecustomize.py").write_text(f"import pynvml; {forget}\n")
    with ProbeProcess({**stand_in.environment(), "PYTHONPATH": str(older)}) as probe:
        said = [probe.limits("obstacle", GPU, cgroup), probe.limits("limit", GPU, cgroup, G)]
    for each in said:
        assert mentions(each, "nvidia-ml-py", "c_nvml", "13.615")


def test_the_driver_is_not_asked_to_limit_a_job_on_a_mig_device(
    stand_in: StandIn, probe: ProbeProcess, cgroup: Path
) -> None:
    stand_in.change(0, mig=True, parts=[Part("MIG-a", total=40 * G)])
    assert [each.uuid for each in probe.read()] == [GPU, "MIG-a"]
    before = len(stand_in.calls())
    why = "drivers have no memory limits for MIG devices: the size of the device is the limit"
    assert probe.limits("obstacle", "MIG-a", cgroup) == why
    assert probe.limits("limit", "MIG-a", cgroup, 4 * G) == why
    assert probe.limits("kept", "MIG-a", cgroup) is None
    assert probe.limits("lift", "MIG-a", cgroup) is None
    assert stand_in.calls()[before:] == []


def test_a_limit_is_set_while_another_gpu_is_read_slowly(tmp_path: Path, cgroup: Path) -> None:
    stand_in = StandIn(tmp_path, [Card(), Card()], driver=R615)
    with ProbeProcess(stand_in.environment()) as probe:
        stand_in.change(1, delays={"nvmlDevice*": 0.6})
        assert probe.limits_during_read("limit", GPU, cgroup, G) == G
        stand_in.change(1, delays={})
