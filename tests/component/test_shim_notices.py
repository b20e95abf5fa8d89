"""A line of the daemon in a job's output: whole, on a line of its own, from the daemon alone."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulease.host.shim_control import notify
from gpulease.record import replace
from gpulease.shim.launch_request import TerminalSpec
from gpulease.wire.frames import HEADER, KINDS, FrameKind
from process_rig import (
    Client,
    end,
    ephemeral_user,
    is_alive,
    job_directory,
    output,
    run,
    shell,
    start,
    user_identity,
    wait_until,
)

HALF_A_LINE = "printf half >&2; read go; printf ' done\\n' >&2; echo out"
TERMINAL = TerminalSpec(24, 80, None, stderr=True)


def errors(directory: Path) -> str:
    return (directory / "stderr").read_text()


def test_a_notice_stands_on_a_line_of_its_own_in_the_midst_of_another(directory: Path) -> None:
    start(shell(directory, HALF_A_LINE, stdin=True))
    with Client(directory, "attach") as client:
        wait_until(lambda: errors(directory) == "half", "half a line")

        assert run(notify(directory, "it is over"))
        client.send(FrameKind.STDIN, b"go\n")
        seen = client.collect()

    assert end(directory).exit_code == 0
    assert errors(directory) == "half\ngpulease: it is over\n done\n"
    assert seen[FrameKind.STDERR].decode() == errors(directory)
    assert output(directory) == "out\n", "standard output is the job's alone"


def test_a_notice_between_lines_adds_no_empty_one(directory: Path) -> None:
    start(shell(directory, "echo first >&2; read go; echo second >&2", stdin=True))
    with Client(directory, "attach") as client:
        wait_until(lambda: errors(directory) == "first\n", "a line")
        assert run(notify(directory, "one")) and run(notify(directory, "two"))
        client.send(FrameKind.STDIN, b"go\n")
        client.collect()

    assert errors(directory) == "first\ngpulease: one\ngpulease: two\nsecond\n"


def test_on_a_terminal_a_notice_comes_in_the_terminals_own_way(directory: Path) -> None:
    start(shell(directory, "printf 'epoch 1'; read go", stdin=True, terminal=TERMINAL))
    with Client(directory, "attach") as client:
        wait_until(lambda: output(directory) == "epoch 1", "half a line")
        assert run(notify(directory, "it is over"))
        wait_until(lambda: "over" in output(directory), "the notice")
        client.send(FrameKind.STDIN, b"go\n")
        seen = client.collect()

    log = (directory / "stdout").read_bytes()
    assert log.startswith(b"epoch 1\r\ngpulease: it is over\r\n")
    assert seen[FrameKind.STDOUT] == log


def test_a_terminal_job_with_errors_apart_is_told_there(directory: Path) -> None:
    terminal = replace(TERMINAL, stderr=False)
    start(shell(directory, "read go", stdin=True, terminal=terminal))
    with Client(directory, "attach") as client:
        assert run(notify(directory, "it is over"))
        wait_until(lambda: errors(directory) == "gpulease: it is over\n", "the notice")
        client.send(FrameKind.STDIN, b"go\n")
        client.collect()

    assert "gpulease" not in output(directory)


def test_a_notice_comes_after_all_that_was_written_before(directory: Path) -> None:
    """More than a pipe holds, to a reader who takes nothing until the notice is out."""
    start(shell(directory, "head -c 30000 /dev/zero >&2; read go", stdin=True))
    with Client(directory, "attach") as client:
        wait_until(lambda: len(errors(directory)) == 30000, "the output")
        assert run(notify(directory, "it is over"))
        client.send(FrameKind.STDIN, b"go\n")
        seen = client.collect()[FrameKind.STDERR]

    assert seen == b"\0" * 30000 + b"\ngpulease: it is over\n"


def test_a_notice_to_an_ended_job_is_let_go(directory: Path) -> None:
    start(shell(directory, "true"))
    end(directory)
    wait_until(lambda: not is_alive(directory), "the end of the shim")

    assert not run(notify(directory, "too late"))
    assert errors(directory) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_the_jobs_own_user_can_send_none() -> None:
    with ExitStack() as stack:
        user, directory = (
            stack.enter_context(ephemeral_user()),
            stack.enter_context(job_directory()),
        )
        identity = user_identity(user)
        start(shell(directory, "sleep 1000", identity=identity))
        with Client(directory, "watch") as watcher:
            watcher.until(FrameKind.STARTED)
            watcher.send(FrameKind.NOTICE, text="send money")
            assert b"the daemon" in watcher.until(FrameKind.REFUSED)

        assert errors(directory) == ""


def test_a_shim_that_does_not_know_an_order_goes_on(directory: Path) -> None:
    """As one from before there were notices meets them: a kind of frame that it has never seen."""
    start(shell(directory, "read go; echo fine", stdin=True))
    with Client(directory, "control") as daemon:
        daemon.socket.sendall(HEADER.pack(max(KINDS) + 1, 2) + b"{}")
        daemon.socket.shutdown(1)
        assert daemon.is_closed()

    with Client(directory, "attach") as client:
        client.send(FrameKind.STDIN, b"go\n")
        client.collect()
    assert end(directory).exit_code == 0
    assert output(directory) == "fine\n"
