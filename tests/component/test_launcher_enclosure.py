"""A shim waits for the daemon to put it where its job belongs, before anything says it is there."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from gpulease.errors import LaunchFailed
from gpulease.host.launch import Launch
from gpulease.host.launcher import Launcher
from gpulease.shim.record import read_record
from process_rig import PATIENCE_S, finish, run, shell, wait_until


def test_the_shim_is_enclosed_before_its_record_exists(directory: Path) -> None:
    seen: list[tuple[int, bool]] = []

    async def enclose(pid: int, launch: Launch) -> None:
        await asyncio.sleep(0.05)
        seen.append((pid, read_record(Path(launch.shim.directory)) is None))

    async def scenario() -> None:
        launcher = Launcher(sandbox=enclose)
        started = await launcher.launch(shell(directory, "sleep 1000"))
        await launcher.close()
        assert seen == [(started.shim_pid, True)]

    run(scenario())


def test_a_daemon_that_dies_in_between_leaves_no_record_and_the_launch_can_be_repeated(
    directory: Path,
) -> None:
    shims: list[int] = []

    async def dies(pid: int, _: Launch) -> None:
        shims.append(pid)
        raise asyncio.CancelledError

    async def scenario() -> None:
        launcher = Launcher(sandbox=dies)
        with contextlib.suppress(asyncio.CancelledError):
            await launcher.launch(shell(directory, "true"))
        await launcher.close()

    run(scenario())
    wait_until(lambda: not psutil.pid_exists(shims[0]), "the shim has left")
    assert read_record(directory) is None
    assert finish(shell(directory, "exit 3")).exit_code == 3


def test_a_daemon_that_leaves_lets_the_launches_that_it_began_come_to_their_end(
    directory: Path,
) -> None:
    enclosed = asyncio.Event()

    async def enclose(pid: int, _: Launch) -> None:
        enclosed.set()

    async def scenario() -> None:
        launcher = Launcher(sandbox=enclose, begins_within_s=PATIENCE_S)
        launching = asyncio.create_task(launcher.launch(shell(directory, "exit 3")))
        await enclosed.wait()
        # What encloses it never waits, so the shim has the daemon's word by now.
        launching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await launching
        record = read_record(directory)
        assert record is not None
        assert record.started is not None
        await launcher.close()

    run(scenario())


def test_a_shim_that_is_killed_while_it_waits_costs_no_more_than_an_attempt(
    directory: Path,
) -> None:
    attempts: list[int] = []

    async def kills_the_first(pid: int, _: Launch) -> None:
        attempts.append(pid)
        if len(attempts) == 1:
            os.kill(pid, signal.SIGKILL)

    async def scenario() -> None:
        launcher = Launcher(sandbox=kills_the_first)
        started = await launcher.launch(shell(directory, "sleep 1000"))
        await launcher.close()
        assert attempts == [attempts[0], started.shim_pid]

    run(scenario())


def test_a_shim_that_is_killed_again_and_again_is_given_up(directory: Path) -> None:
    async def kills(pid: int, _: Launch) -> None:
        os.kill(pid, signal.SIGKILL)

    async def scenario() -> None:
        launcher = Launcher(sandbox=kills)
        with pytest.raises(LaunchFailed):
            await launcher.launch(shell(directory, "true"))
        await launcher.close()

    run(scenario())
    assert read_record(directory) is None


@pytest.mark.parametrize(("alone", "found"), [(True, "0 kept"), (False, "3 kept")])
def test_gpus_are_counted_anew_only_where_no_others_can_be_opened(
    directory: Path, alone: bool, found: str
) -> None:
    async def enclose(pid: int, launch: Launch) -> Mapping[str, str] | None:
        return {**launch.invocation.environment, "CUDA_VISIBLE_DEVICES": "0"} if alone else None

    script = "echo $CUDA_VISIBLE_DEVICES $OTHER; sleep 1000"
    environment = {"CUDA_VISIBLE_DEVICES": "3", "OTHER": "kept", "PATH": os.environ["PATH"]}
    wanted = shell(directory, script, environment=environment)

    async def scenario() -> None:
        launcher = Launcher(sandbox=enclose)
        await launcher.launch(wanted)
        await launcher.close()

    run(scenario())
    wait_until(lambda: (directory / "stdout").read_bytes() != b"", "it has said what it found")
    assert found.encode() in (directory / "stdout").read_bytes()
