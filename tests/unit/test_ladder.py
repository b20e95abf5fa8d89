"""Which rungs a machine is said to have, and why it has not the others."""

import asyncio
import os
from pathlib import Path

import pytest

from fakes import NOON, reading
from goldens import mentions, sentence
from gpulease.domain.gpu import Fault, GpuReading, GpuUuid
from gpulease.host import cgroups
from gpulease.host.enforcement import Circumstances, EnforcementLevels
from gpulease.service.observation import Observation
from gpulease.service.ports import MemoryLimiter, NotLimited

OLD = "this driver has no memory limits; they come with r615"
SERVICE = Circumstances(simulated=False, no_scopes=None, hooks_closed_at=None)
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not cgroups.has_version_2(), reason="needs root and cgroups of version 2"
)


class Driver:
    """Answers as a test says, by GPU."""

    def __init__(self, **obstacles: str | None) -> None:
        self.obstacles = obstacles
        self.version = "615.10"
        self.asked: list[str] = []
        self.silent: set[str] = set()

    def why_unavailable(self, gpu: GpuUuid, cgroup: Path) -> str | None:
        self.asked.append(gpu)
        if gpu in self.silent:
            raise NotLimited("the driver has not answered for 3s")
        return self.obstacles.get(gpu)

    def set_limit(self, gpu: GpuUuid, cgroup: Path, memory: int) -> int:
        raise AssertionError("it is only asked")

    def current_limit(self, gpu: GpuUuid, cgroup: Path) -> int | None:
        raise AssertionError("it is only asked")

    def remove_limit(self, gpu: GpuUuid, cgroup: Path) -> None:
        raise AssertionError("it is only asked")


def ladder_of(
    driver: MemoryLimiter | None, around: Circumstances = SERVICE, *, use: bool = True
) -> EnforcementLevels:
    return EnforcementLevels(
        around, driver, lambda: getattr(driver, "version", None), driver_limits=use
    )


def look(*readings: GpuReading) -> Observation:
    return Observation(readings, {}, NOON)


def said(ladder: EnforcementLevels) -> dict[str, tuple[bool, str]]:
    return {each.rung: (each.available, each.why) for each in ladder.views()}


def ask(ladder: EnforcementLevels, *uuids: str) -> None:
    readings = (reading(uuid, index) for index, uuid in enumerate(uuids))
    asyncio.run(ladder.ask(look(*readings)))


@as_root
def test_a_driver_that_can_is_used_from_its_answer_on_and_before() -> None:
    driver = Driver()
    ladder = ladder_of(driver)
    assert ladder.limiter() is driver, "until it is known, the job's own attempt tells"
    ask(ladder, "GPU-a")
    assert ladder.limiter() is driver
    assert said(ladder)["driver"][0]


@as_root
def test_a_driver_that_cannot_is_asked_once_and_again_when_it_is_another() -> None:
    driver = Driver(**{"GPU-a": OLD, "GPU-b": OLD})
    ladder = ladder_of(driver)
    for _ in range(2):
        ask(ladder, "GPU-a", "GPU-b")
    assert driver.asked == ["GPU-a", "GPU-b"]
    assert ladder.limiter() is None
    assert said(ladder)["driver"] == (False, OLD)
    driver.version, driver.obstacles = "616.1", {}
    ask(ladder, "GPU-a", "GPU-b")
    assert ladder.limiter() is driver


@as_root
def test_a_gpu_that_did_not_answer_is_asked_again_and_one_that_cannot_be_read_is_not() -> None:
    driver = Driver(**{"GPU-a": OLD})
    driver.silent = {"GPU-a"}
    ladder = ladder_of(driver)
    ask(ladder, "GPU-a")
    assert ladder.limiter() is driver, "no answer is none"
    assert not said(ladder)["driver"][0], "no wall is claimed that nobody has seen"
    driver.silent = set()
    ask(ladder, "GPU-a")
    assert ladder.limiter() is None
    lost = reading("GPU-b", 1, fault=Fault.LOST)
    asyncio.run(ladder.ask(look(lost)))
    assert "GPU-b" not in driver.asked


@as_root
def test_of_several_gpus_those_that_cannot_are_named() -> None:
    driver = Driver(**{"GPU-b": OLD})
    ladder = ladder_of(driver)
    ask(ladder, "GPU-a", "GPU-b")
    available, why = said(ladder)["driver"]
    assert available
    assert mentions(why, "GPU 1", OLD)
    assert ladder.limiter() is driver


@as_root
def test_mig_devices_are_named_by_their_place_and_their_gpu_is_not_asked() -> None:
    driver = Driver(**{"MIG-a": "no limits on MIG"})
    ladder = ladder_of(driver)
    whole = reading("GPU-a", 0, mig_mode=True)
    part = reading("MIG-a", 0, mig_index=1, parent=GpuUuid("GPU-a"))
    asyncio.run(ladder.ask(look(whole, part)))
    assert driver.asked == ["MIG-a"]
    assert said(ladder)["driver"] == (False, "no limits on MIG")

    asyncio.run(ladder.ask(look(whole, part, reading("GPU-b", 1))))
    assert mentions(said(ladder)["driver"][1], "GPU 0:1", "no limits on MIG")


def test_what_stands_in_the_way_is_said_in_words() -> None:
    simulated = Circumstances(simulated=True, no_scopes=None, hooks_closed_at=None)
    rungs = said(ladder_of(None, simulated))
    for rung in ("driver", "devices", "framework"):
        assert not rungs[rung][0]
        sentence(f"no-{rung}-simulated", rungs[rung][1])
    assert not said(ladder_of(Driver(), use=False))["driver"][0]
    assert "driver_limits" in said(ladder_of(Driver(), use=False))["driver"][1]
    assert ladder_of(Driver(), use=False).limiter() is None
    closed = Circumstances(simulated=False, no_scopes=None, hooks_closed_at=Path("/root"))
    assert not said(ladder_of(Driver(), closed))["framework"][0]


@pytest.mark.skipif(os.geteuid() != 0, reason="another reason comes first")
def test_without_scopes_there_is_neither_a_limit_by_the_driver_nor_a_device_rule() -> None:
    alone = Circumstances(simulated=False, no_scopes="no systemd", hooks_closed_at=None)
    ladder = ladder_of(Driver(), alone)
    assert ladder.limiter() is None
    for rung in ("driver", "devices"):
        available, why = said(ladder)[rung]
        assert not available
        assert "no systemd" in why


def test_watching_is_a_rung_as_long_as_something_is_done() -> None:
    ladder = ladder_of(Driver())
    assert ladder.everywhere == ("framework",)
    ladder.watch = lambda: True
    assert ladder.everywhere == ("framework", "watch")
    assert said(ladder)["watch"][0]
    assert not any(each.varies for each in ladder.views())
    ladder.watch_varies = lambda: True
    assert [each.rung for each in ladder.views() if each.varies] == ["watch"]
