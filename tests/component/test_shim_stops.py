"""A job that is stopped and continued, and one that is warned before its time is up."""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from gpulease.host.launch import Launch
from gpulease.host.shim_control import notify, set_time_limit, stop
from gpulease.shim.launch_request import EarlySignalSpec
from gpulease.wire.frames import FrameKind
from process_rig import (
    READ_STAT,
    Client,
    end,
    output,
    python,
    run,
    shell,
    start,
    state,
    wait_until,
)

HOUR = timedelta(hours=1)


def test_a_stop_that_is_asked_for_is_told_and_undone(directory: Path) -> None:
    started = start(shell(directory, "sleep 1000 & echo $!; wait"))
    child = int(wait_until(lambda: output(directory)))
    with Client(directory, "attach") as client:
        for _ in range(3):
            client.send(FrameKind.SIGNAL, signal=int(signal.SIGTSTP))
            assert json.loads(client.until(FrameKind.SUSPENDED)) == {"signal": signal.SIGTSTP}
            wait_until(lambda: state(child) == state(started.pid) == "T", "a stopped group")
            client.send(FrameKind.SIGNAL, signal=int(signal.SIGCONT))
            wait_until(lambda: state(child) == state(started.pid) == "S", "a running group")


def test_who_comes_after_the_stop_is_told_and_who_comes_after_the_end_of_it_is_not(
    directory: Path,
) -> None:
    started = start(shell(directory, "exec sleep 1000"))
    os.kill(started.pid, signal.SIGSTOP)
    with Client(directory, "watch") as client:
        assert json.loads(client.until(FrameKind.SUSPENDED)) == {"signal": signal.SIGSTOP}
        os.kill(started.pid, signal.SIGCONT)
        wait_until(lambda: state(started.pid) == "S")
        # Before the shim confirms a notice, it has reaped what was ready when that arrived.
        assert run(notify(directory, "continued"))

    with Client(directory, "watch") as client:
        os.kill(started.pid, signal.SIGKILL)
        assert not client.collect()[FrameKind.SUSPENDED]


def test_a_stop_of_another_process_is_not_told(directory: Path) -> None:
    start(shell(directory, "sleep 1000 & echo $!; wait; exit 3"))
    child = int(wait_until(lambda: output(directory)))
    with Client(directory, "watch") as client:
        os.kill(child, signal.SIGSTOP)
        wait_until(lambda: state(child) == "T")
        os.kill(child, signal.SIGKILL)
        seen = client.collect()

    assert not seen[FrameKind.SUSPENDED]
    assert json.loads(seen[FrameKind.EXITED])["exit_code"] == 3


def test_processes_that_go_on_stopping_themselves_can_be_cancelled(directory: Path) -> None:
    program = """
import os, signal
for _ in range(4):
    os.fork()
signal.signal(signal.SIGCONT, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"up")
while True:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    start(python(directory, program))
    wait_until(lambda: output(directory).count("up") == 16)

    assert run(stop(directory, "cancelled", timedelta(seconds=0.2)))

    ended = end(directory)
    assert (ended.reason, ended.signal) == ("cancelled", signal.SIGKILL)


def test_a_job_on_pipes_is_a_group_of_its_own_that_is_not_orphaned(directory: Path) -> None:
    started = start(shell(directory, f"{READ_STAT}; echo $sid $pgid $pid"))
    end(directory)

    pid = started.pid
    assert [int(number) for number in output(directory).split()] == [started.shim_pid, pid, pid]


def test_a_full_pipe_of_a_stopped_job_holds_no_one_up(directory: Path) -> None:
    started = start(shell(directory, "exec cat", stdin=True, awaits_attach=True))
    with Client(directory, "attach") as client, Client(directory, "watch") as aside:
        client.until(FrameKind.STARTED)
        os.kill(started.pid, signal.SIGSTOP)
        aside.until(FrameKind.SUSPENDED)
        client.socket.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while True:
                sent += client.socket.send(bytes([17, 0, 1, 0, 0]) + bytes(65536))
        aside.send(FrameKind.SIGNAL, signal=int(signal.SIGCONT))
        client.socket.settimeout(60)
        client.read(sent - sent % 65541 - 65541 * 2)


def warned(directory: Path, before_s: float, **changes: object) -> Launch:
    script = """
trap 'echo warned' USR1
(trap 'echo child' USR1; while :; do sleep 1000 & wait; done) &
echo up
while :; do sleep 1000 & wait $!; done
"""
    early = EarlySignalSpec(int(signal.SIGUSR1), before_s)
    return shell(directory, script, early_signal=early, grace=timedelta(0), **changes)


def test_a_new_limit_that_is_near_warns_the_main_process_once(directory: Path) -> None:
    start(warned(directory, 1800.0, time_limit=timedelta(hours=2)))
    wait_until(lambda: output(directory) == "up\n")
    # Sent twice, as by a daemon that has restarted.
    for _ in range(2):
        assert run(set_time_limit(directory, timedelta(minutes=11)))
        wait_until(lambda: output(directory) == "up\nwarned\n")
    assert run(stop(directory, "cancelled", timedelta(0)))

    assert end(directory).reason == "cancelled"
    assert output(directory) == "up\nwarned\n"


SLOW_DISK = f"""#!{sys.executable} -PS
import os, sys, time

def slow(fd, real=os.fdatasync):
    time.sleep(1)
    real(fd)

os.fdatasync = slow
sys.argv[1:] = sys.argv[-1:]

from gpulease.shim import spawner
spawner.main()
"""
"""The spawner of shims, with a disk that takes a second to sync."""


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(SLOW_DISK)
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(
    ("then", "reason"),
    [("exit 3", "exited"), ("kill -9 $$", "signaled"), ("sleep 1000", "preempted")],
)
def test_a_job_that_ends_before_sigterm_reaches_it_has_ended_by_itself(
    directory: Path, then: str, reason: str
) -> None:
    until_it_stops = f"until grep -q stopping {directory}/record; do sleep 0.01; done"
    start(shell(directory, f"{until_it_stops}; {then}"))

    assert run(stop(directory, "preempted", HOUR))

    assert end(directory).reason == reason
