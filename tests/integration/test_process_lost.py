"""When a shim is killed: the worker goes, the loss is told, and what fled is found."""

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from gpulease.process.control import Lost, follow, stop
from gpulease.process.record import read_record
from gpulease.process.table import MARKER, ProcessTable
from process_rig import (
    PATH,
    events_of,
    is_alive,
    is_running,
    job_directory,
    kill,
    output,
    python,
    run,
    shell,
    start,
    wait_until,
)

FLED = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    {extra}
    print(os.getpid(), flush=True)
    time.sleep(1000)
time.sleep(1000)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with job_directory() as made:
        yield made


@pytest.fixture
def marker() -> Iterator[str]:
    made = f"{secrets.token_hex(4)}/17"
    yield made
    for pid in ProcessTable().survivors(made):
        os.kill(pid, signal.SIGKILL)


def test_a_worker_dies_with_its_shim(directory: Path) -> None:
    started = start(shell(directory, "trap '' TERM; while :; do sleep 1000; done"))

    kill(started.shim_pid)

    wait_until(lambda: not is_running(started.pid), "the end of the worker")
    assert not is_alive(directory)
    record = read_record(directory)
    assert record is not None and record.started == started and record.exited is None


def test_the_loss_is_told_to_who_follows(directory: Path) -> None:
    started = start(shell(directory, "sleep 1000"))

    async def scenario() -> object:
        events = follow(directory)
        assert await anext(events) == started
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        os.kill(started.shim_pid, signal.SIGKILL)
        event = await waiting
        await events.aclose()
        return event

    assert run(scenario()) == Lost()


def test_the_loss_is_told_to_who_comes_later(directory: Path) -> None:
    kill(start(shell(directory, "sleep 1000")).shim_pid)

    assert run(events_of(directory)) == [Lost()]
    assert run(stop(directory, "cancelled", timedelta(0))) is False


def test_where_nothing_was_launched_nothing_lives(directory: Path) -> None:
    assert read_record(directory) is None
    assert not is_alive(directory)
    assert run(events_of(directory)) == [Lost()]


def survivor_of_a_lost_shim(directory: Path, marker: str, extra: str = "") -> int:
    program = FLED.format(extra=extra)
    started = start(python(directory, program, environment={**PATH, MARKER: marker}))
    fled = int(wait_until(lambda: output(directory)))
    kill(started.shim_pid)
    wait_until(lambda: not is_running(started.pid), "the end of the main process")
    assert is_running(fled)
    return fled


def test_survivors_are_found_by_their_marker(directory: Path, marker: str) -> None:
    fled = survivor_of_a_lost_shim(directory, marker)
    table = ProcessTable()

    assert table.survivors(marker) == [fled]
    assert table.survivors(marker, os.getuid()) == [fled]
    assert table.survivors(marker, os.getuid() + 1) == []
    assert table.survivors(f"{marker}0") == []


def test_survivors_are_asked_to_go(directory: Path, marker: str) -> None:
    fled = survivor_of_a_lost_shim(directory, marker)

    run(ProcessTable().end_survivors(marker, timedelta(minutes=10)))

    assert not is_running(fled)


def test_survivors_that_dropped_their_environment_are_found_by_their_session(
    directory: Path, marker: str
) -> None:
    script = "env -i sh -c 'echo $$; while :; do sleep 0.1; done' & wait"
    started = start(shell(directory, script, environment={**PATH, MARKER: marker}))
    fled = int(wait_until(lambda: output(directory)))
    table, session = ProcessTable(), started.shim_pid
    assert table.survivors(marker, os.getuid() + 1, session) == []
    assert fled not in table.survivors(f"{marker}0", session=session), "its leader lives"
    kill(started.shim_pid)
    wait_until(lambda: not is_running(started.pid), "the end of the main process")
    assert fled not in table.survivors(marker)

    run(table.end_survivors(marker, timedelta(minutes=10), os.getuid(), session))

    assert not is_running(fled)


def test_stubborn_survivors_are_killed(directory: Path, marker: str) -> None:
    fled = survivor_of_a_lost_shim(
        directory, marker, "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    )

    run(ProcessTable().end_survivors(marker, timedelta(seconds=0.2)))

    assert not is_running(fled)


def test_a_shim_that_is_asked_to_go_stays_with_its_worker(directory: Path) -> None:
    started = start(shell(directory, "echo up; sleep 1000"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(started.shim_pid, number)

    assert run(stop(directory, "cancelled", timedelta(minutes=1)))
    assert is_running(started.shim_pid) or read_record(directory).exited  # type: ignore[union-attr]
