"""The timers, and the clock that is set under them."""

import asyncio
from datetime import UTC, datetime, timedelta

from gpulease.timers import Timers

PATIENCE_S = 20


def test_a_timer_goes_on_after_the_clock_was_set_back() -> None:
    async def scenario() -> None:
        ran = asyncio.Event()
        wall = [1_000_000.0]
        timers = Timers(wall=lambda: wall[0], steady=lambda: 0.0)

        async def tick() -> None:
            ran.set()

        timers.every(timedelta(seconds=0.05), tick)
        timers.start()
        async with asyncio.timeout(PATIENCE_S):
            await ran.wait()
        # As it is when the clock was an hour ahead at the last run, and has been set right.
        (entry,) = timers._scheduler.get_jobs()
        entry.modify(next_run_time=datetime.now(UTC) + timedelta(hours=1))
        ran.clear()
        wall[0] -= 3600
        async with asyncio.timeout(PATIENCE_S):
            await ran.wait()
        timers.stop()

    asyncio.run(scenario())
