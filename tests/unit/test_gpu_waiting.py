"""Calls that may hang, and attempts that are made again."""

import threading
from datetime import timedelta

import pytest

from gpulease.call_thread import CallThread, Retry

_PATIENCE = 10.0


def test_a_call_brings_its_failure_to_whoever_asks_for_the_outcome() -> None:
    caller: CallThread[int] = CallThread("test")

    call = caller.submit(lambda: 1 // 0)

    assert call.wait(_PATIENCE)
    with pytest.raises(ZeroDivisionError):
        call.outcome.result()
    assert caller.submit(lambda: 8).wait(_PATIENCE), "the thread goes on after a failure"
    caller.close()


def test_no_call_is_begun_behind_one_that_has_not_returned() -> None:
    caller: CallThread[int] = CallThread("test")
    release = threading.Event()
    hanging = caller.submit(lambda: int(release.wait(_PATIENCE)))

    assert not hanging.wait(0)
    assert caller.is_busy
    assert caller.submit(lambda: 9) is hanging

    release.set()
    assert hanging.wait(_PATIENCE)
    fresh = caller.submit(lambda: 9)
    assert fresh.wait(_PATIENCE)
    assert fresh.outcome.result() == 9
    caller.close()


class Watch:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def test_pauses_double_up_to_the_longest() -> None:
    watch = Watch()
    retry = Retry(timedelta(seconds=2), watch)
    pauses = []
    for _ in range(6):
        retry.schedule(timedelta(seconds=20))
        begun_at = watch.seconds
        while not retry.is_due:
            watch.seconds += 1
        pauses.append(watch.seconds - begun_at)
        retry.start()

    assert pauses == [2, 4, 8, 16, 20, 20]


def test_wanting_an_attempt_again_does_not_put_it_off() -> None:
    watch = Watch()
    retry = Retry(timedelta(seconds=2), watch)
    retry.schedule(timedelta(seconds=20))
    watch.seconds += 1.5
    retry.schedule(timedelta(seconds=20))
    watch.seconds += 0.5

    assert retry.is_due


def test_trouble_after_all_was_well_starts_with_the_first_pause() -> None:
    watch = Watch()
    retry = Retry(timedelta(seconds=2), watch)
    for _ in range(3):
        retry.schedule(timedelta(seconds=20))
        retry.start()

    retry.reset()
    assert not retry.is_due
    retry.schedule(timedelta(seconds=20))
    watch.seconds += 2
    assert retry.is_due
