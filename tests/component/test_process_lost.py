"""When a shim is killed: the worker goes, the loss is told, and what fled is found."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from gpulease.host.processes import MARKER, ProcessTable
from gpulease.host.shim_control import Lost, Missing, follow, stop
from gpulease.shim.record import Started, read_record
from process_rig import (
    PATH,
    events_of,
    is_alive,
    is_running,
    kill,
    output,
    pids,
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
def marker() -> Iterator[str]:
    made = f"{secrets.token_hex(4)}/17"
    yield made
    for pid in pids(ProcessTable().survivors(made)):
        os.kill(pid, signal.SIGKILL)


def test_a_worker_dies_with_its_shim(directory: Path) -> None:
    started = start(shell(directory, "trap '' TERM; while :; do sleep 1000; done"))

    kill(started.shim_pid)

    wait_until(lambda: not is_running(started.pid), "the end of the worker")
    assert not is_alive(directory)
    record = read_record(directory)
    assert record is not None and record.started == started and record.exited is None
    assert run(events_of(directory)) == [Lost()]
    assert run(stop(directory, "cancelled", timedelta(0))) is False


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


def test_where_nothing_was_launched_nothing_lives(directory: Path) -> None:
    assert read_record(directory) is None
    assert not is_alive(directory)
    assert run(events_of(directory)) == [Missing()]


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

    assert pids(table.survivors(marker)) == {fled}
    assert pids(table.survivors(marker, os.getuid())) == {fled}
    assert table.survivors(marker, os.getuid() + 1) == set()
    assert table.survivors(f"{marker}0") == set()


def test_survivors_that_dropped_their_environment_are_found_by_their_session(
    directory: Path, marker: str
) -> None:
    script = "env -i sh -c 'echo $$; while :; do sleep 0.1; done' & wait"
    started = start(shell(directory, script, environment={**PATH, MARKER: marker}))
    fled = int(wait_until(lambda: output(directory)))
    table, session = ProcessTable(), started.shim_pid
    assert table.survivors(marker, os.getuid() + 1, session) == set()
    assert fled not in pids(table.survivors(f"{marker}0", session=session)), "its leader lives"
    kill(started.shim_pid)
    wait_until(lambda: not is_running(started.pid), "the end of the main process")
    assert fled not in pids(table.survivors(marker))

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


HEADLESS = """
import ctypes, os, platform, signal, threading, time
def go():
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(1000)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=go).start()
    # The main thread ends, and no other: see exit(2), which is no exit_group(2).
    ctypes.CDLL(None).syscall({"x86_64": 60}.get(platform.machine(), 93), 0)
time.sleep(1000)
"""


def threads_of(pid: int) -> dict[int, str]:
    """Return the state of each thread of a process that has not ended."""
    found = {}
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            found[int(each.parent.name)] = each.read_text().rpartition(")")[2].split()[0]
    return {} if set(found.values()) <= {"Z", "X"} else found


@pytest.fixture
def headless(directory: Path, marker: str) -> tuple[Started, int]:
    """Return a job, and the pid of a process of it whose main thread has ended."""
    started = start(python(directory, HEADLESS, environment={**PATH, MARKER: marker}))
    pid = int(wait_until(lambda: output(directory)))
    wait_until(lambda: threads_of(pid).get(pid) == "Z", "the end of its main thread")
    return started, pid


def test_who_has_lost_but_the_main_thread_is_found_behind_a_lost_shim(
    directory: Path, marker: str, headless: tuple[Started, int]
) -> None:
    started, pid = headless
    kill(started.shim_pid)
    wait_until(lambda: not is_running(started.pid), "the end of the main process")
    table = ProcessTable()
    assert pids(table.survivors(marker)) == {pid}

    run(table.end_survivors(marker, timedelta(0)))

    assert not threads_of(pid)


TRACER = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
seize = 0x4206  # PTRACE_SEIZE, see ptrace(2)
print(libc.ptrace(seize, int(sys.argv[1]), 0, 0), flush=True)
time.sleep(1000)
"""


def test_a_killed_thread_that_a_debugger_keeps_is_no_life(
    directory: Path, marker: str, headless: tuple[Started, int]
) -> None:
    started, pid = headless
    kill(started.shim_pid)
    thread = next(each for each in threads_of(pid) if each != pid)
    debugger = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(thread)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert debugger.stdout is not None
        if debugger.stdout.readline() != "0\n":
            pytest.skip("nobody may debug here")
        run(ProcessTable().end_survivors(marker, timedelta(0)))
        assert not threads_of(pid)
    finally:
        debugger.kill()
        debugger.communicate()
