"""The timers, and the clock that is set under them."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from gpulease.timers import Timers

PATIENCE_S = 20


def test_a_timer_goes_on_after_the_clock_was_set_back() -> None:
    async def scenario() -> None:
        ran = asyncio.Event()
        wall = [1_000_000.0]
        timers = Timers(lambda: wall[0], lambda: 0.0, check_clock_every_s=0.1)

        async def tick() -> None:
            ran.set()

        timers.every(timedelta(seconds=0.05), tick)
        timers.start()
        async with asyncio.timeout(PATIENCE_S):
            await ran.wait()
        # As it is when the clock was an hour ahead at the last run, and has been set right.
        (entry,) = timers._apscheduler.get_jobs()
        entry.modify(next_run_time=datetime.now(UTC) + timedelta(hours=1))
        ran.clear()
        wall[0] -= 3600
        async with asyncio.timeout(PATIENCE_S):
            await ran.wait()
        timers.stop()

    asyncio.run(scenario())


def test_a_call_that_is_under_way_at_the_end_is_cancelled_without_a_traceback(
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

        timers.every(timedelta(seconds=0.05), slow)
        timers.start()
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
            timers.stop()
            await ended.wait()

    asyncio.run(scenario())
    assert caplog.records == []


def test_a_call_that_fails_is_called_again_and_logged_once_until_it_passes(
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

        timers.every(timedelta(seconds=0.01), tick)
        timers.start()
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
        timers.stop()

    asyncio.run(scenario())
    said = [each for each in caplog.records if each.levelname == "ERROR"]
    assert [str(each.exc_info[1]) for each in said if each.exc_info] == [
        "the disk", "another", "the disk"
    ]  # fmt: skip
