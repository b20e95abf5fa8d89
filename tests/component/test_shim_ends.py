"""How a worker ends, and how it is made to."""

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpulease.host.shim_control import Exited, MainExited, Stopping, follow, set_time_limit, stop
from gpulease.shim.record import read_record
from process_rig import (
    end,
    events_of,
    finish,
    is_alive,
    is_running,
    output,
    python,
    run,
    shell,
    start,
    wait_until,
)

FOREVER = "while :; do sleep 1000; done"
DAEMONIZE = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("code", [0, 255])
def test_the_exit_code_is_the_commands_own(directory: Path, code: int) -> None:
    ended = finish(shell(directory, f"exit {code}"))

    assert (ended.reason, ended.exit_code, ended.signal) == ("exited", code, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_that_ends_the_command_is_told(directory: Path, number: signal.Signals) -> None:
    ended = finish(shell(directory, f"kill -{int(number)} $$"))

    assert (ended.reason, ended.exit_code, ended.signal) == ("signaled", None, number)


def test_the_record_says_what_the_events_said(directory: Path) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    started = start(shell(directory, "exit 3"))
    told = end(directory)

    record = read_record(directory)
    assert record is not None
    assert record.started == started
    assert record.exited == told
    assert record.main_exited is not None
    assert before < started.started_at <= record.main_exited.at <= told.ended_at


def test_the_job_lasts_as_long_as_its_last_process(directory: Path) -> None:
    start(shell(directory, "sleep 1000 & echo $!; exit 5"))
    background = int(wait_until(lambda: output(directory)))

    async def until_main_exited() -> MainExited:
        async for event in follow(directory):
            if isinstance(event, MainExited):
                return event
        raise AssertionError

    assert run(until_main_exited()).exit_code == 5
    assert is_running(background)
    os.kill(background, signal.SIGKILL)

    ended = end(directory)
    assert (ended.reason, ended.exit_code) == ("exited", 5)
    assert ended.main_exited_at is not None and ended.main_exited_at <= ended.ended_at


def test_a_polite_worker_is_asked_and_goes(directory: Path) -> None:
    start(shell(directory, "trap 'echo bye; exit 7' TERM; echo up; sleep 1000 & wait"))
    wait_until(lambda: "up" in output(directory))

    assert run(stop(directory, "cancelled", timedelta(minutes=5)))

    events = run(events_of(directory))
    told = [type(event) for event in events if not isinstance(event, MainExited)]
    assert told == [Stopping, Exited]
    assert isinstance(events[-1], Exited)
    assert (events[-1].reason, events[-1].exit_code) == ("cancelled", 7)
    assert output(directory) == "up\nbye\n"


def test_a_stubborn_worker_is_killed_after_its_grace(directory: Path) -> None:
    start(shell(directory, f"trap '' TERM; echo up; {FOREVER}"))
    wait_until(lambda: "up" in output(directory))

    assert run(stop(directory, "cancelled", timedelta(seconds=0.2)))

    ended = end(directory)
    assert (ended.reason, ended.signal) == ("cancelled", signal.SIGKILL)


def test_a_second_order_shortens_the_grace(directory: Path) -> None:
    start(shell(directory, f"trap '' TERM; echo up; {FOREVER}"))
    wait_until(lambda: "up" in output(directory))

    assert run(stop(directory, "cancelled", timedelta(hours=1)))
    assert is_alive(directory)
    assert run(stop(directory, "drained", timedelta(0)))

    assert end(directory).reason == "cancelled"


def test_a_stopped_worker_is_asked_too(directory: Path) -> None:
    started = start(shell(directory, "sleep 1000"))
    os.kill(started.pid, signal.SIGSTOP)

    assert run(stop(directory, "cancelled", timedelta(minutes=5)))

    assert end(directory).signal == signal.SIGTERM


def test_grandchildren_that_fled_the_session_are_found(directory: Path) -> None:
    start(python(directory, DAEMONIZE))
    fled = int(wait_until(lambda: output(directory)))
    assert os.getsid(fled) != os.getsid(0)

    assert run(stop(directory, "cancelled", timedelta(seconds=0.1)))

    assert end(directory).reason == "cancelled"
    assert not is_running(fled)


def test_a_tree_that_forks_while_it_is_killed_is_killed(directory: Path) -> None:
    bomb = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
deadline = time.monotonic() + 50
while time.monotonic() < deadline:
    if os.fork():
        time.sleep(0.002)
        os._exit(0)
    os.setsid()
"""
    start(python(directory, bomb))
    wait_until(lambda: output(directory))

    assert run(stop(directory, "cancelled", timedelta(0)))

    assert end(directory).reason == "cancelled"


def test_the_time_limit_ends_the_job(directory: Path) -> None:
    ended = finish(shell(directory, "exec sleep 1000", time_limit=timedelta(seconds=0.1)))

    assert (ended.reason, ended.signal) == ("time_limit", signal.SIGTERM)
    record = read_record(directory)
    assert record is not None and record.stopping == "time_limit"


def test_a_time_limit_can_be_removed_and_set(directory: Path) -> None:
    start(shell(directory, "sleep 1000", time_limit=timedelta(hours=1)))
    assert run(set_time_limit(directory, None))
    assert run(set_time_limit(directory, timedelta(0)))

    assert end(directory).reason == "time_limit"


def test_a_shim_goes_when_its_worker_has(directory: Path) -> None:
    started = start(shell(directory, "exit 0"))

    end(directory)

    wait_until(lambda: not is_running(started.shim_pid), "the end of the shim")
    assert not is_alive(directory)
