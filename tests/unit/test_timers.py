"""The timers, and the instants of recurring windows."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from fakes import NOON
from gpulease.errors import BadValue
from gpulease.timers import Call, LocalTime, Timers

PATIENCE_S = 20


Plan = Callable[[Timers, timedelta, Call], object]
both = pytest.mark.parametrize("plan", [Timers.every, Timers.often])
"""What APScheduler calls, and what the event loop calls."""


@both
def test_a_call_that_takes_longer_than_the_period_is_not_made_twice_at_once(plan: Plan) -> None:
    async def scenario() -> None:
        running, most, over = 0, 0, asyncio.Event()
        timers = Timers()

        async def slow() -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            over.set()

        plan(timers, timedelta(seconds=0.01), slow)
        timers.start()
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
        timers.stop()
        assert most == 1

    asyncio.run(scenario())


def test_a_changed_period_counts_at_once() -> None:
    async def scenario() -> None:
        ran, timers = asyncio.Event(), Timers()

        async def tick() -> None:
            ran.set()

        timer = timers.often(timedelta(hours=1), tick)
        timers.start()
        timer.change(timedelta(seconds=0.01))
        async with asyncio.timeout(PATIENCE_S):
            await ran.wait()
        timers.stop()

    asyncio.run(scenario())


@both
def test_a_call_that_is_under_way_at_the_end_is_cancelled_without_a_traceback(
    plan: Plan,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        began, ended = asyncio.Event(), asyncio.Event()
        timers = Timers()

        async def slow() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        plan(timers, timedelta(seconds=0.05), slow)
        timers.start()
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
            timers.stop()
            await ended.wait()

    asyncio.run(scenario())
    assert caplog.records == []


@both
def test_a_call_that_fails_is_called_again_and_logged_once_until_it_passes(
    plan: Plan,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        failures: list[Exception | None] = [
            OSError("the disk"), OSError("the disk"), ValueError("another"), None,
            OSError("the disk"), None,
        ]  # fmt: skip
        over = asyncio.Event()
        timers = Timers()

        async def tick() -> None:
            if not failures:
                over.set()
                return
            failure = failures.pop(0)
            if failure is not None:
                raise failure

        plan(timers, timedelta(seconds=0.01), tick)
        timers.start()
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
        timers.stop()

    asyncio.run(scenario())
    said = [each for each in caplog.records if each.levelname == "ERROR"]
    assert [str(each.exc_info[1]) for each in said if each.exc_info] == [
        "the disk", "another", "the disk"
    ]  # fmt: skip


BERLIN = LocalTime(ZoneInfo("Europe/Berlin"))


def begins(cron: str, *since: int, count: int = 1) -> list[str]:
    """Return the next begins in Berlin, and how far the clocks there are ahead."""
    at, found = datetime(*since, tzinfo=UTC), []  # type: ignore[misc,arg-type]
    for _ in range(count):
        begin = BERLIN.next(cron, at)
        assert begin is not None
        found.append(f"{begin.astimezone(ZoneInfo('Europe/Berlin')):%a %d %H:%M %z}")
        at = begin + timedelta(seconds=1)
    return found


def test_a_recurring_window_keeps_its_time_of_day_over_a_change_of_the_clocks() -> None:
    spring = begins("0 22 * * *", 2026, 3, 28, 12, count=2)
    assert spring == ["Sat 28 22:00 +0100", "Sun 29 22:00 +0200"]
    autumn = begins("0 22 * * mon-fri", 2026, 10, 23, 12, count=2)
    assert autumn == ["Fri 23 22:00 +0200", "Mon 26 22:00 +0100"]


def test_a_time_that_is_skipped_comes_an_hour_later_and_one_that_is_repeated_counts_once() -> None:
    spring = begins("30 2 * * *", 2026, 3, 28, 12, count=2)
    assert spring == ["Sun 29 03:30 +0200", "Mon 30 02:30 +0200"]
    autumn = begins("30 2 * * *", 2026, 10, 24, 12, count=2)
    assert autumn == ["Sun 25 02:30 +0200", "Mon 26 02:30 +0100"]


@pytest.mark.parametrize(
    ("zone", "begun"),
    [
        ("EST5", ["15 07:00", "16 07:00"]),
        ("X3", ["15 02:00", "16 02:00"]),  # too short for the C library, which takes it for UTC
        # As Berlin, without a file; the clocks show 2:00 twice on 25 October.
        ("CET-1CEST,M3.5.0,M10.5.0/3", ["25 00:00", "26 01:00"]),
    ],
)
def test_a_time_zone_of_posix_without_a_file_counts(
    zone: str, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, found = datetime(2026, 10, int(begun[0][:2]) - 1, 12, tzinfo=UTC), []
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        for _ in begun:
            begin = LocalTime().next("0 2 * * *", at)
            assert begin is not None
            found.append(f"{begin:%d %H:%M}")
            at = begin + timedelta(seconds=1)
    time.tzset()
    assert found == begun


@pytest.mark.parametrize(
    ("weekdays", "found"),
    [("0", "Sun"), ("7", "Sun"), ("5-7", "Fri"), ("2,4", "Tue"), ("SAT", "Sat"), ("3/2", "Wed")],
)  # fmt: skip
def test_numbers_of_weekdays_are_those_of_crontab(weekdays: str, found: str) -> None:
    # Saturday evening: of the days, the first that follows.
    since = {"Sat": 10, "Fri": 15, "Tue": 12, "Wed": 13, "Sun": 17}[found]
    assert begins(f"0 3 * * {weekdays}", 2026, 10, since, 12)[0].startswith(found)


def test_a_date_that_never_comes_has_no_begin() -> None:
    assert BERLIN.next("0 3 31 2 *", NOON) is None


@pytest.mark.parametrize(
    "cron", ["", "0 22 * *", "99 * * * *", "0 22 * * mon-", "0 0 1 * mon", "*/0 * * * *"]
)
def test_times_that_cannot_be_read_are_refused(cron: str) -> None:
    with pytest.raises(BadValue) as refused:
        BERLIN.next(cron, NOON)
    assert refused.value.hint


def test_an_instant_is_shown_with_its_day_unless_that_is_today() -> None:
    assert BERLIN.text(NOON, NOON) == "13:00"
    assert BERLIN.text(NOON + timedelta(days=1), NOON) == "Sat 13:00"
    assert BERLIN.text(NOON + timedelta(days=9), NOON) == "2026-01-11 13:00"
