"""Callers share a call where its result is good for all of them."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import pytest

from gpulease.shared_calls import SharedCalls

LONG = 60.0


class Calls:
    """Calls that return their number when they may go on."""

    def __init__(self) -> None:
        self.numbers = count(1)
        self.running = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> int:
        number = next(self.numbers)
        self.running += 1
        await self.may_end.wait()
        self.running -= 1
        return number


async def begun(*callers: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(each) for each in callers]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    run.__name__ = test.__name__
    return run


@in_loop
async def test_callers_that_arrive_during_a_call_share_the_next_one() -> None:
    shared, calls = SharedCalls(), Calls()
    first = await begun(shared(calls))
    late = await begun(*(shared(calls) for _ in range(3)))
    assert calls.running == 1
    calls.may_end.set()
    assert await asyncio.gather(*first, *late) == [1, 2, 2, 2]
    assert await shared(calls) == 3


@in_loop
async def test_a_result_that_may_be_old_is_that_of_the_call_that_runs_or_has_just_run() -> None:
    shared, calls = SharedCalls(), Calls()
    callers = await begun(shared(calls, "a", LONG), shared(calls, "a", LONG))
    other = await begun(shared(calls, "b", LONG))
    calls.may_end.set()
    assert await asyncio.gather(*callers, *other) == [1, 1, 2]
    assert await shared(calls, "a", LONG) == 1
    assert await shared(calls, "a") == 3
    assert await shared(calls, "c", 1e-9) == 4
    assert await shared(calls, "c", 1e-9) == 5


@in_loop
async def test_only_so_many_calls_are_made_at_once() -> None:
    shared, calls = SharedCalls(at_once=2), Calls()
    callers = await begun(*(shared(calls, key, LONG) for key in range(5)))
    assert (calls.running, shared.pending) == (2, 5)
    calls.may_end.set()
    assert await asyncio.gather(*callers) == [1, 2, 3, 4, 5]
    assert shared.pending == 0


@in_loop
async def test_all_who_share_a_call_get_its_error_and_the_next_one_asks_again() -> None:
    shared, calls = SharedCalls(), Calls()

    async def fails() -> int:
        await calls()
        raise OSError

    callers = await begun(shared(fails, fresh_for=LONG), shared(fails, fresh_for=LONG))
    calls.may_end.set()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(each) for each in found] == [OSError, OSError]
    assert await shared(calls, fresh_for=LONG) == 2


@in_loop
async def test_a_caller_that_leaves_takes_the_answer_from_nobody() -> None:
    shared, calls = SharedCalls(), Calls()
    leaver, stayer = await begun(shared(calls, fresh_for=LONG), shared(calls, fresh_for=LONG))
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    calls.may_end.set()
    assert await stayer == 1
