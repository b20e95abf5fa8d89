"""The spawner: quick, clean, and no loss when it dies."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpulease.host.launcher import Launcher
from gpulease.host.shim_control import Exited
from gpulease.wire.frames import FrameKind
from process_rig import (
    Client,
    end,
    events_of,
    finish,
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


@pytest.fixture
def directory():
    with job_directory() as made:
        yield made


def spawner_of(pid: int) -> psutil.Process:
    """Return the parent of a shim while its spawner lives."""
    parent = psutil.Process(pid).parent()
    assert parent is not None and parent.name() == "gpulease-spawn"
    return parent


def directories_in(directory: Path, count: int) -> list[Path]:
    made = [directory / str(number) for number in range(count)]
    for one in made:
        one.mkdir()
    return made


def test_two_hundred_quick_jobs_leave_nothing_behind(directory: Path) -> None:
    async def scenario() -> None:
        launcher = Launcher()
        room = asyncio.Semaphore(16)
        places = directories_in(directory, 200)
        first = await launcher.launch(shell(directory, "sleep 1000"))
        spawner = spawner_of(first.shim_pid)
        descriptors = spawner.num_fds()
        own = psutil.Process().num_fds()

        async def one(place: Path) -> None:
            async with room:
                await launcher.launch(shell(place, "exit 3"))
                last = (await events_of(place))[-1]
                assert isinstance(last, Exited) and last.exit_code == 3

        await asyncio.gather(*map(one, places))
        shims = {first.shim_pid}
        while {child.pid for child in spawner.children()} - shims:
            await asyncio.sleep(0.01)
        assert spawner.num_fds() == descriptors
        assert psutil.Process().num_fds() == own
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
        started = await launcher.launch(shell(one, "exit 0"))
        spawner = (
            psutil.Process(started.shim_pid).parent() if is_running(started.shim_pid) else None
        )
        spawner = spawner or _child_called("gpulease-spawn")
        spawner.suspend()
        launching = asyncio.ensure_future(launcher.launch(shell(two, "exit 6")))
        await asyncio.sleep(0)  # now the request is on its way, and no one reads it
        spawner.kill()
        pid = (await launching).pid
        await launcher.close()
        return pid

    assert run(scenario()) > 0
    assert end(two).exit_code == 6


def _child_called(name: str) -> psutil.Process:
    return next(child for child in psutil.Process().children() if child.name() == name)


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
        seen = spawner.environ(), spawner.cwd(), spawner.num_fds()
        await launcher.close()
        return seen

    environment, cwd, descriptors = run(scenario())
    assert "DAEMONS_SECRET" not in environment
    assert cwd == "/"
    assert descriptors == 4  # three streams and the channel


def test_spawner_and_shims_load_nothing_heavy() -> None:
    program = "import sys, gpulease.shim.spawner; print(*sys.modules)"
    root = str(Path(sys.modules["gpulease"].__file__ or "").parents[1])
    seen = subprocess.run(
        [sys.executable, "-P", "-S", "-c", program],
        env={"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout.split()

    heavy = {"asyncio", "logging", "subprocess", "dataclasses", "inspect", "psutil", "pathlib"}
    assert not heavy & set(seen)
    ours = {name for name in seen if name.startswith("gpulease.") and ".shim" not in name}
    light = {"event_loop", "peer_credentials", "record", "wire", "wire.frames", "write_buffer"}
    assert ours <= {f"gpulease.{name}" for name in light}


def test_a_closed_launcher_can_launch_again(directory: Path) -> None:
    one, two = directories_in(directory, 2)

    async def scenario() -> None:
        launcher = Launcher()
        await launcher.launch(shell(one, "exit 0"))
        await launcher.close()
        await launcher.close()
        await launcher.launch(shell(two, "exit 0"))
        await launcher.close()

    run(scenario())
    assert finish(shell(directory, "exit 0")).exit_code == 0
