"""Reserving GPUs: names, overlaps, recurring times, groups."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from zoneinfo import ZoneInfo

import pytest

from fakes import ALICE, BOB, NOON, FakeClock, MemoryStore
from goldens import mentions
from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.job import Owner
from gpulease.errors import BadValue, NoSuchWindow, WindowClash
from gpulease.service.windows import Windows
from gpulease.timers import LocalTime

T = TypeVar("T")
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


async def at_once(call: Callable[[], T]) -> T:
    return call()


class World:
    """Windows on a machine with two GPUs, in Berlin."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.groups: dict[Owner, Collection[str]] = {}
        self.windows = Windows(
            self.store,  # type: ignore[arg-type]
            self.clock,
            LocalTime(ZoneInfo("Europe/Berlin")),
            lambda owner: self.groups.get(owner, ()),
            at_once,
        )

    def reserve(self, *uuids: str, gpus: int = 1, **fields: object) -> Window:
        plain = Window(
            WindowId(0), "", len(uuids) or gpus, tuple(map(GpuUuid, uuids)), NOON + HOUR, HOUR,
            None, ("alice",), (), "root", NOON,
        )  # fmt: skip
        return done(self.windows.reserve(replace(plain, **fields), 2))  # type: ignore[arg-type]

    def next_begin(self, owners: Collection[Owner] = ()) -> list[datetime]:
        now = self.clock.now()
        return [each.begins_at for each in self.windows.current(now, owners)]


def done(call: Awaitable[T]) -> T:
    async def run() -> T:
        return await call

    return asyncio.run(run())


@pytest.fixture
def world() -> World:
    return World()


def test_a_window_is_named_after_its_first_user_or_group(world: World) -> None:
    later = NOON + 9 * HOUR
    names = [
        world.reserve().name,
        world.reserve().name,
        world.reserve(begins_at=later, users=(), groups=("lab",)).name,
        world.reserve(begins_at=later, users=()).name,
        world.reserve(begins_at=later + HOUR, name="exam").name,
    ]
    assert names == ["alice", "alice-2", "lab", "maintenance", "exam"]


def test_a_name_is_given_once_until_its_window_has_ended(world: World) -> None:
    world.reserve(name="exam")
    with pytest.raises(WindowClash) as refused:
        world.reserve(name="exam", begins_at=NOON + DAY)
    assert mentions(refused.value.text(), "exam", "--cancel")
    world.clock.forward(hours=2)
    world.reserve(name="exam", begins_at=NOON + DAY)
    assert [each.begins_at for each in world.store.windows()] == [NOON + DAY], "the past is removed"


def test_windows_that_need_the_same_gpus_are_refused_with_the_other_and_the_time(
    world: World,
) -> None:
    world.reserve("GPU-0", cron="0 22 * * mon-fri", lasts_for=10 * HOUR, name="nights")
    sunday = datetime(2026, 1, 4, 22, tzinfo=UTC)
    world.reserve("GPU-0", begins_at=sunday, lasts_for=HOUR)
    with pytest.raises(WindowClash) as refused:
        world.reserve("GPU-0", begins_at=sunday + DAY - 9 * HOUR, lasts_for=9 * HOUR)
    assert mentions(refused.value.message, "nights", "Mon 22:00")


def test_a_window_for_all_day_every_day_is_no_overlap_with_itself(world: World) -> None:
    world.reserve(cron="0 0 * * *", lasts_for=DAY)
    with pytest.raises(BadValue):
        world.reserve(cron="0 0 * * *", lasts_for=DAY + 2 * HOUR)


def test_a_recurring_window_is_on_again_and_again(world: World) -> None:
    world.reserve(cron="0 22 * * *", lasts_for=10 * HOUR)
    tonight = datetime(2026, 1, 2, 21, tzinfo=UTC)
    for at, begin in (
        (NOON, tonight),
        (tonight + 9 * HOUR, tonight),
        (tonight + 10 * HOUR, tonight + DAY),
        (NOON + 30 * DAY, tonight + 30 * DAY),
        (NOON, tonight),
    ):
        world.clock.at = at
        assert world.next_begin() == [begin], "also after the clock was set back"


def test_a_group_admits_its_members_as_of_the_last_minute(world: World) -> None:
    world.reserve(users=(), groups=("lab",))
    world.groups[ALICE] = ["users", "lab"]
    assert world.windows.current(NOON, [ALICE, BOB])[0].admits == {"alice"}
    world.groups[BOB] = ["lab"]
    later = NOON + timedelta(minutes=1)
    assert world.windows.current(later, [ALICE, BOB])[0].admits == {"alice", "bob"}


def test_a_window_is_cancelled_by_its_name_or_number(world: World) -> None:
    first, second = world.reserve(), world.reserve()
    assert done(world.windows.cancel(first.name)) == first
    assert done(world.windows.cancel(str(second.id))) == second
    with pytest.raises(NoSuchWindow):
        done(world.windows.cancel(first.name))
