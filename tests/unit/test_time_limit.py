"""The time limit of a job and its early signal, on a clock that the test sets."""

import signal
from collections.abc import Callable

import pytest

from gpulease.shim.launch_request import EarlySignalSpec
from gpulease.shim.supervisor import TimeLimit

USR1 = int(signal.SIGUSR1)


class Loop:
    """The timers of an event loop."""

    def __init__(self) -> None:
        self.at = 0.0
        self.timers: dict[str, tuple[float, Callable[[], None]]] = {}

    def now(self) -> float:
        return self.at

    def set_timer(self, name: str, at: float, call: Callable[[], None]) -> None:
        self.timers[name] = at, call

    def cancel_timer(self, name: str) -> None:
        self.timers.pop(name, None)

    def run_until(self, at: float) -> None:
        while due := sorted((each[0], name) for name, each in self.timers.items() if each[0] <= at):
            name = due[0][1]
            self.at = max(self.at, due[0][0])
            self.timers.pop(name)[1]()
        self.at = at


class Job:
    """What a job with a time limit gets, and when."""

    def __init__(self, limit_s: float | None, early: EarlySignalSpec | None = None) -> None:
        self.got: list[tuple[float, int | str]] = []
        self.loop = Loop()
        self.limit = TimeLimit(
            self.loop,  # type: ignore[arg-type]
            limit_s,
            early,
            lambda number: self.got.append((self.loop.at, number)),
            lambda: self.got.append((self.loop.at, "end")),
        )
        self.limit.begin()


def test_a_job_is_warned_and_then_ended() -> None:
    job = Job(100, EarlySignalSpec(USR1, 30))
    job.loop.run_until(200)
    assert job.got == [(70, USR1), (100, "end")]


def test_a_limit_is_counted_from_the_start_and_can_be_removed_and_set() -> None:
    job = Job(100)
    job.loop.run_until(50)
    job.limit.change(None)
    job.loop.run_until(150)
    job.limit.change(160)
    job.loop.run_until(200)
    assert job.got == [(160, "end")]


def test_a_signal_that_is_overdue_is_sent_at_once_and_only_once() -> None:
    job = Job(7200, EarlySignalSpec(USR1, 1800))
    job.loop.run_until(60)
    for limit in (600, 600, 700):
        job.limit.change(limit)
        job.loop.run_until(job.loop.at)
    assert job.got == [(60, USR1)]


def test_a_longer_limit_warns_again_before_its_own_end() -> None:
    job = Job(100, EarlySignalSpec(USR1, 30))
    job.loop.run_until(80)
    job.limit.change(200)
    job.loop.run_until(300)
    assert job.got == [(70, USR1), (170, USR1), (200, "end")]


@pytest.mark.parametrize("number", [0, 9999])
def test_what_is_no_signal_warns_no_one(number: int) -> None:
    job = Job(100, EarlySignalSpec(number, 30))
    job.loop.run_until(200)
    assert job.got == [(100, "end")]


def test_without_a_limit_there_is_no_warning() -> None:
    job = Job(None, EarlySignalSpec(USR1, 1e9))
    job.limit.cancel()
    job.loop.run_until(1e9)
    assert job.got == []
