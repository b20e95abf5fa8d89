"""Who writes to a job: the newest on a terminal, the first on pipes; everyone else watches."""

import json
import signal
import threading
import time
from pathlib import Path

from gpulease.host.launch import Launch
from gpulease.shim.launch_request import TerminalSpec
from gpulease.wire.frames import FrameKind
from process_rig import Client, output, shell, start, wait_until

MIB = 1 << 20


def terminal_job(directory: Path, script: str) -> Launch:
    order = TerminalSpec(rows=24, columns=80, attributes=None, stderr=True)
    return shell(directory, script, terminal=order, stdin=True, awaits_attach=True)


def pipe_job(directory: Path, script: str) -> Launch:
    return shell(directory, script, stdin=True, awaits_attach=True)


def test_on_a_terminal_the_newest_writes_and_the_former_watches(directory: Path) -> None:
    start(terminal_job(directory, "stty -echo; echo up; exec cat"))
    with Client(directory, "attach") as first:
        first.read_until(b"up")
        with Client(directory, "attach") as second:
            assert first.until(FrameKind.WATCHING) == b"{}"
            second.send(FrameKind.STDIN, b"two\n")
            first.read_until(b"two")
            first.send(FrameKind.STDIN, b"one\n")
            first.send(FrameKind.SIGNAL, signal=int(signal.SIGWINCH))
            second.send(FrameKind.STDIN, b"three\n")
            assert b"one" not in second.read_until(b"three")


def test_a_watcher_may_ask_to_write(directory: Path) -> None:
    start(terminal_job(directory, "stty -echo; echo up; exec cat"))
    with Client(directory, "attach") as first, Client(directory, "watch") as watcher:
        first.read_until(b"up")
        watcher.send(FrameKind.HELLO, role="attach", window={"rows": 5, "columns": 6})
        first.until(FrameKind.WATCHING)
        watcher.send(FrameKind.STDIN, b"mine\n")
        first.read_until(b"mine")
        first.send(FrameKind.HELLO, role="attach")
        watcher.until(FrameKind.WATCHING)
        first.send(FrameKind.STDIN, b"mine again\n")
        watcher.read_until(b"mine again")


def test_who_was_demoted_does_not_slow_the_job(directory: Path) -> None:
    script = f"stty -opost; echo up; read line; head -c {20 * MIB} /dev/zero; echo done >&2"
    order = TerminalSpec(rows=24, columns=80, attributes=None, stderr=False)
    start(shell(directory, script, terminal=order, stdin=True, awaits_attach=True))
    with Client(directory, "attach") as stalled:
        stalled.until(FrameKind.STDOUT)
        with Client(directory, "attach") as reader:
            reader.send(FrameKind.STDIN, b"\n")
            seen = reader.collect()
        assert seen[FrameKind.STDOUT].count(0) == 20 * MIB
        assert json.loads(stalled.until(FrameKind.SKIPPED))["bytes"] > 10 * MIB


def test_who_was_demoted_over_a_full_terminal_is_heard_again(directory: Path) -> None:
    start(terminal_job(directory, "stty raw -echo; echo up; exec sleep 1000"))
    with Client(directory, "attach") as first:
        first.read_until(b"up")

        def paste() -> None:
            for _ in range(64):
                first.send(FrameKind.STDIN, b"x" * 65536)
            first.send(FrameKind.SIGNAL, signal=int(signal.SIGTERM))

        pasting = threading.Thread(target=paste)
        pasting.start()
        with Client(directory, "attach") as second:
            pasting.join()
            assert json.loads(second.until(FrameKind.EXITED))["signal"] == signal.SIGTERM


def test_on_pipes_the_first_keeps_the_input(directory: Path) -> None:
    start(pipe_job(directory, "exec cat"))
    with Client(directory, "attach") as first:
        first.send(FrameKind.STDIN, b"one\n")
        first.read_until(b"one\n")
        with Client(directory, "attach") as second:
            assert second.until(FrameKind.WATCHING) == b"{}"
            second.send(FrameKind.STDIN, b"two\n")
            second.send(FrameKind.STDIN_END)
            second.read_until(b"one\n")
            first.send(FrameKind.STDIN, b"three\n")
            assert second.read_until(b"three\n") == b"three\n"
        first.send(FrameKind.STDIN_END)
        seen = first.collect()

    assert seen[FrameKind.STDOUT] == b"three\n"
    assert not seen[FrameKind.WATCHING]
    assert output(directory) == "one\nthree\n"


def test_a_watcher_attaches_when_the_first_has_gone_and_finds_the_input_over(
    directory: Path,
) -> None:
    start(pipe_job(directory, "cat; echo over; exec sleep 1000"))
    with Client(directory, "attach") as first:
        first.send(FrameKind.STDIN, b"one\n")
        first.read_until(b"one\n")
        late = Client(directory, "attach")
        late.until(FrameKind.WATCHING)
    with late:
        late.read_until(b"over\n")
        late.send(FrameKind.HELLO, role="attach")
        late.send(FrameKind.STDIN, b"nowhere\n")
        late.send(FrameKind.SIGNAL, signal=int(signal.SIGINT))
        seen = late.collect()

    assert not seen[FrameKind.WATCHING]
    assert output(directory) == "one\nover\n"


def test_an_attached_watcher_is_held_to_as_the_first_was(directory: Path) -> None:
    start(pipe_job(directory, "cat; while :; do head -c 1000000 /dev/zero; done"))
    with Client(directory, "attach"):
        late = Client(directory, "watch")
        late.until(FrameKind.STARTED)
    with late:
        late.until(FrameKind.STDOUT)
        late.send(FrameKind.HELLO, role="attach")
        log = directory / "stdout"
        wait_until(lambda: _rests(log), "back-pressure")


def _rests(log: Path) -> bool:
    before = log.stat().st_size
    time.sleep(0.3)
    return log.stat().st_size == before
