"""The spawner: quick, clean, and no loss when it dies."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpulease.host.launcher import Launcher
from gpulease.host.shim_control import Exited
from gpulease.shim.spawner import STOCK, _keep_stock
from gpulease.wire.frames import FrameKind
from process_rig import (
    Client,
    end,
    end_session,
    end_shim,
    events_of,
    is_alive,
    is_running,
    job_directory,
    kill,
    output,
    run,
    shell,
    start,
    wait_until,
)

DESCRIPTORS = 4 + STOCK
"""Of a spawner: three streams, the channel, and one for each shim of the stock."""


@pytest.fixture
def directory():
    with job_directory() as made:
        yield made


def spawner_of(pid: int) -> psutil.Process:
    """Return the parent of a shim while its spawner lives."""
    parent = psutil.Process(pid).parent()
    assert parent is not None and parent.name() == "gpulease-spawn"
    return parent


def stock_of(spawner: psutil.Process) -> set[int]:
    """Return the shims that wait for a job."""
    waiting = "gpulease-shim: waits for a job"
    return {child.pid for child in spawner.children() if " ".join(child.cmdline()) == waiting}


async def filled(spawner: psutil.Process, used: set[int]) -> set[int]:
    while len(stock_of(spawner)) < STOCK or stock_of(spawner) == used:
        await asyncio.sleep(0.01)
    return stock_of(spawner)


def directories_in(directory: Path, count: int) -> list[Path]:
    made = [directory / str(number) for number in range(count)]
    for one in made:
        one.mkdir()
    return made


def test_two_hundred_quick_jobs_leave_nothing_behind(directory: Path) -> None:
    async def scenario() -> None:
        launcher = Launcher()
        at_once = asyncio.Semaphore(16)
        places = directories_in(directory, 200)
        first = await launcher.launch(shell(directory, "sleep 1000"))
        spawner = spawner_of(first.shim_pid)
        own = psutil.Process().num_fds()

        async def one(place: Path) -> None:
            async with at_once:
                await launcher.launch(shell(place, "exit 3"))
                last = (await events_of(place))[-1]
                assert isinstance(last, Exited) and last.exit_code == 3

        await asyncio.gather(*map(one, places))
        while (
            len(spawner.children()) != 1 + STOCK
            or spawner.num_fds() != DESCRIPTORS
            or psutil.Process().num_fds() > own
        ):
            await asyncio.sleep(0.01)
        await launcher.close()

    run(scenario())


def test_a_killed_spawner_costs_no_job_and_is_replaced(directory: Path) -> None:
    one, two = directories_in(directory, 2)

    async def scenario() -> None:
        launcher = Launcher()
        started = await launcher.launch(shell(one, "read x < /dev/zero; exit 4"))
        await asyncio.to_thread(kill, spawner_of(started.shim_pid).pid)
        again = await launcher.launch(shell(two, "exit 5"))
        assert is_running(started.shim_pid) and is_running(started.pid)
        assert again.shim_pid != started.shim_pid
        os.kill(started.pid, signal.SIGINT)
        await launcher.close()

    run(scenario())
    assert end(one).signal == signal.SIGINT
    assert end(two).exit_code == 5


def test_a_spawner_that_dies_over_a_launch_is_replaced(directory: Path) -> None:
    one, two = directories_in(directory, 2)

    async def scenario() -> int:
        launcher = Launcher()
        await launcher.launch(shell(one, "exit 0"))
        spawner = _child_called("gpulease-spawn")
        spawner.suspend()
        launching = asyncio.ensure_future(launcher.launch(shell(two, "exit 6")))
        await asyncio.sleep(0)  # now the request is on its way, and no one reads it
        spawner.kill()
        pid = (await launching).pid
        await launcher.close()
        return pid

    assert run(scenario()) > 0
    assert end(two).exit_code == 6


@pytest.mark.parametrize("what", ["the spawner", "its stock"])
def test_a_stopped_spawner_or_stock_is_named_and_the_launch_goes_on_with_it(
    directory: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, *more = directories_in(directory, 1 + STOCK + 1)

    async def scenario() -> int:
        launcher = Launcher()
        shim = (await launcher.launch(shell(one, "sleep 1000"))).shim_pid
        spawner = spawner_of(shim)
        stock = await filled(spawner, set())
        stopped = {spawner.pid} if what == "the spawner" else stock
        assert launcher.obstacle() is None
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        launching = [asyncio.ensure_future(launcher.launch(shell(each, "true"))) for each in more]
        async with asyncio.timeout(60):
            while (why := launcher.obstacle()) is None:
                await asyncio.sleep(0.05)
        assert all(str(pid) in why for pid in stopped) and "kill -CONT" in why
        assert launcher.obstacle() == why
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*launching)
        assert launcher.obstacle() is None
        os.kill(shim, signal.SIGKILL)
        await launcher.close()
        return shim

    end_session(run(scenario()))
    said = [each.message for each in caplog.records if "start jobs" in each.message]
    assert len(said) == 2 and said[1] == "the processes that start jobs continue"


def _child_called(name: str) -> psutil.Process:
    return next(child for child in psutil.Process().children() if child.name() == name)


def test_the_stock_is_refilled_and_ends_with_the_spawner(directory: Path) -> None:
    one, two, three = directories_in(directory, 3)

    async def scenario() -> set[int]:
        launcher = Launcher()
        started = await launcher.launch(shell(one, "sleep 1000"))
        spawner = spawner_of(started.shim_pid)
        first = await filled(spawner, set())
        taken = (await launcher.launch(shell(two, "sleep 1000"))).shim_pid
        assert taken in first
        second = await filled(spawner, first)
        for pid in second:
            os.kill(pid, signal.SIGKILL)
        last = await launcher.launch(shell(three, "sleep 1000"))
        assert last.shim_pid not in second
        # A spawner that lost a request with its stock is replaced.
        spawner = spawner_of(last.shim_pid)
        stock = await filled(spawner, second)
        spawner.kill()
        await asyncio.to_thread(wait_until, lambda: not any(map(is_running, stock)))
        assert all(map(is_running, (started.shim_pid, taken, last.shim_pid)))
        await launcher.close()
        return stock

    assert len(run(scenario())) == STOCK
    for place in (one, two, three):
        end_shim(place)


def test_a_spawner_that_cannot_fork_refuses_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reply, status = os.pipe()
    with Path(os.devnull).open("rb") as request, ours, theirs:
        socket.send_fds(ours, [b"L"], [request.fileno(), status])
        os.close(status)
        ours.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(os, "fork", fork)
        _keep_stock(theirs, None)
    with os.fdopen(reply, "rb") as lines:
        failed = json.loads(lines.read())["failed"]
    assert (failed["step"], failed["errno"]) == ("fork", errno.EAGAIN)


DAEMON = """
import asyncio, sys
from pathlib import Path
from process_rig import shell
from gpulease.host.launcher import Launcher

async def main():
    launcher = Launcher()
    script = "echo up; read line; echo heard; exit 9"
    launch = shell(Path(sys.argv[1]), script, stdin=True, awaits_attach=True)
    print((await launcher.launch(launch)).shim_pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_killed_daemon_costs_no_job(directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(directory)], stdout=subprocess.PIPE, env=environment
    )
    assert daemon.stdout is not None
    with daemon, daemon.stdout as lines:
        shim = int(lines.readline())
        spawner = spawner_of(shim).pid
        daemon.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(spawner), "the end of the spawner")
    assert is_running(shim) and is_alive(directory)

    with Client(directory, "attach") as client:
        client.until(FrameKind.STDOUT)
        client.send(FrameKind.STDIN, b"line\n")
        client.until(FrameKind.EXITED)

    assert end(directory).exit_code == 9
    assert output(directory) == "up\nheard\n"


def test_a_killed_client_costs_no_job(directory: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from process_rig import Client;"
        "client = Client(Path(sys.argv[1]), 'attach'); client.next(); print(1, flush=True);"
        "client.next(); client.next(); client.next()"
    )
    start(shell(directory, "sleep 1000; exit 2", awaits_attach=True))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    client = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE, env=environment
    )
    assert client.stdout is not None
    with client, client.stdout as lines:
        assert lines.readline() == b"1\n"
        client.send_signal(signal.SIGKILL)

    with Client(directory, "attach") as again:
        again.until(FrameKind.STARTED)
        again.send(FrameKind.SIGNAL, signal=2)
        again.until(FrameKind.EXITED)


def test_the_spawner_has_nothing_of_the_daemon(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAEMONS_SECRET", "x")

    async def scenario() -> tuple[dict[str, str], str, int]:
        launcher = Launcher()
        started = await launcher.launch(shell(directory, "sleep 1000"))
        spawner = spawner_of(started.shim_pid)
        while len(stock_of(spawner)) < STOCK:
            await asyncio.sleep(0.01)
        seen = spawner.environ(), spawner.cwd(), spawner.num_fds()
        await launcher.close()
        return seen

    environment, cwd, descriptors = run(scenario())
    assert "DAEMONS_SECRET" not in environment
    assert cwd == "/"
    assert descriptors == DESCRIPTORS
