"""What a worker writes and reads: nothing is lost, and no reader holds it up who should not."""

import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gpulease.host.launch import Launch
from gpulease.wire.frames import FrameKind
from process_rig import (
    Client,
    end,
    finish,
    is_alive,
    output,
    python,
    shell,
    start,
    wait_until,
)

MIB = 1 << 20
RANDOM = """
import hashlib, os, sys
out, err = hashlib.sha256(), hashlib.sha256()
for _ in range({pieces}):
    for digest, stream in ((out, sys.stdout.buffer), (err, sys.stderr.buffer)):
        piece = os.urandom(100_000)
        digest.update(piece)
        stream.write(piece)
sys.stdout.flush()
sys.stderr.flush()
open({path!r}, "w").write(out.hexdigest() + " " + err.hexdigest())
"""


def test_a_slow_reader_gets_every_byte(directory: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums"
    program = RANDOM.format(pieces=168, path=str(sums))
    start(python(directory, program, awaits_attach=True))
    got = {FrameKind.STDOUT: hashlib.sha256(), FrameKind.STDERR: hashlib.sha256()}

    with Client(directory, "attach") as client:
        client.socket.setsockopt(1, 8, 4096)  # SO_RCVBUF: small bites
        while (seen := client.next()) is not None and seen[0] != FrameKind.EXITED:
            if seen[0] in got:
                got[seen[0]].update(seen[1])

    assert seen is not None and json.loads(seen[1])["exit_code"] == 0
    assert sums.read_text() == " ".join(digest.hexdigest() for digest in got.values())
    logs = [(directory / name).read_bytes() for name in ("stdout", "stderr")]
    assert sums.read_text() == " ".join(hashlib.sha256(log).hexdigest() for log in logs)


def test_an_attached_reader_that_stalls_holds_the_job_back(directory: Path) -> None:
    start(shell(directory, "yes", awaits_attach=True))
    with Client(directory, "attach") as client:
        client.until(FrameKind.STDOUT)
        log = directory / "stdout"
        stalled = wait_until(lambda: _stopped_growing(log), "back-pressure")
        assert stalled < 16 * MIB
        client.read(4 * MIB)

        assert log.stat().st_size > stalled

    gone = log.stat().st_size
    wait_until(lambda: log.stat().st_size > gone + 8 * MIB, "going on without a reader")


def _stopped_growing(log: Path) -> int:
    before = log.stat().st_size
    time.sleep(0.3)
    return before if log.stat().st_size == before else 0


def test_a_watcher_that_stalls_holds_no_one_back(directory: Path) -> None:
    count = 20 * MIB
    pid = start(_counted(directory, count)).pid
    with Client(directory, "watch") as client:
        wait_until((directory / "stderr").read_bytes, "being ready")
        client.until(FrameKind.STDERR)
        os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: (directory / "stdout").stat().st_size == count, "all of the output")
        first = client.read(MIB)
        os.kill(pid, signal.SIGUSR2)
        seen = client.collect()

    shown = len(first) + len(seen[FrameKind.STDOUT])
    assert shown < count
    assert shown + json.loads(seen[FrameKind.SKIPPED])["bytes"] == count + len("live")
    assert seen[FrameKind.STDOUT].endswith(b"live")


def _counted(directory: Path, count: int) -> Launch:
    program = f"""
import signal, sys
signals = {{signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("up", file=sys.stderr, flush=True)
signal.sigwait({{signal.SIGUSR1}})
sys.stdout.write("x" * {count})
sys.stdout.flush()
signal.sigwait({{signal.SIGUSR2}})
sys.stdout.write("live")
"""
    return python(directory, program)


def test_binary_input_comes_back_as_it_was(directory: Path) -> None:
    sent = os.urandom(8 * MIB)
    start(shell(directory, "exec cat", stdin=True, awaits_attach=True))
    with Client(directory, "attach") as client:

        def feed() -> None:
            for offset in range(0, len(sent), 65536):
                client.send(FrameKind.STDIN, sent[offset : offset + 65536])
            client.send(FrameKind.STDIN_END)

        feeder = threading.Thread(target=feed)
        feeder.start()
        seen = client.collect()
        feeder.join()

    assert seen[FrameKind.STDOUT] == sent


def test_a_job_that_closes_its_input_may_be_typed_at(directory: Path) -> None:
    start(shell(directory, "exec 0<&-; echo up; sleep 1000", stdin=True, awaits_attach=True))
    with Client(directory, "attach") as client:
        client.until(FrameKind.STDOUT)
        client.send(FrameKind.STDIN, b"z" * 500_000)
        client.send(FrameKind.STDIN, b"z" * 500_000)
        client.send(FrameKind.SIGNAL, signal=15)
        ended = json.loads(client.until(FrameKind.EXITED))

    assert ended["signal"] == 15


def test_losing_who_attached_ends_the_input_and_not_the_job(directory: Path) -> None:
    start(shell(directory, "cat; echo gone; sleep 1000", stdin=True, awaits_attach=True))
    with Client(directory, "attach") as client:
        client.send(FrameKind.STDIN, b"half")
        client.read(4)

    wait_until(lambda: output(directory) == "halfgone\n", "the end of the input")
    assert is_alive(directory)


def test_an_awaited_reader_misses_nothing_of_a_job_that_is_over(directory: Path) -> None:
    start(shell(directory, "echo out; echo err >&2; exit 9", awaits_attach=True))
    assert end(directory).exit_code == 9

    with Client(directory, "attach") as client:
        seen = client.collect()

    assert (seen[FrameKind.STDOUT], seen[FrameKind.STDERR]) == (b"out\n", b"err\n")
    assert json.loads(seen[FrameKind.EXITED])["exit_code"] == 9
    wait_until(lambda: not is_alive(directory), "the end of the shim")


def test_a_job_waits_for_its_awaited_reader_with_more_than_a_little(directory: Path) -> None:
    start(shell(directory, f"head -c {5 * MIB} /dev/zero", awaits_attach=True))
    wait_until(lambda: (directory / "stdout").stat().st_size > MIB // 2, "the first output")

    with Client(directory, "attach") as client:
        assert client.collect()[FrameKind.STDOUT] == bytes(5 * MIB)


@pytest.mark.slow
def test_a_job_does_not_wait_for_ever(directory: Path) -> None:
    ended = finish(
        shell(directory, f"cat; head -c {5 * MIB} /dev/zero", awaits_attach=True, stdin=True)
    )

    assert ended.exit_code == 0
    assert (directory / "stdout").stat().st_size == 5 * MIB


def test_who_attaches_late_sees_the_last_of_it(directory: Path) -> None:
    start(shell(directory, "seq 100000; echo err >&2; echo last; sleep 1000"))
    wait_until(lambda: output(directory).endswith("last\n"))

    with Client(directory, "attach") as client:
        shown = client.until(FrameKind.STDOUT)
        assert client.until(FrameKind.STDERR) == b"err\n"

    assert 60_000 < len(shown) <= 65_536
    assert shown.endswith(b"100000\nlast\n")


def test_a_signal_reaches_the_group_of_the_command(directory: Path) -> None:
    start(shell(directory, "trap 'echo caught' INT; echo up; while :; do sleep 1000; done"))
    with Client(directory, "attach") as client:
        client.until(FrameKind.STDOUT)
        client.send(FrameKind.SIGNAL, signal=int(signal.SIGINT))
        assert client.until(FrameKind.STDOUT) == b"caught\n"


def test_a_signal_passes_input_that_no_one_reads(directory: Path) -> None:
    start(shell(directory, "sleep 1000", stdin=True, awaits_attach=True))
    with Client(directory, "attach") as client, Client(directory, "watch") as aside:
        client.until(FrameKind.STARTED)
        client.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while True:
                client.send(FrameKind.STDIN, b"x" * 65536)
        aside.send(FrameKind.SIGNAL, signal=int(signal.SIGINT))
        assert json.loads(aside.until(FrameKind.EXITED))["signal"] == signal.SIGINT


def test_a_reader_may_take_its_time_after_the_end(directory: Path) -> None:
    start(shell(directory, f"head -c {MIB} /dev/zero", awaits_attach=True))
    with Client(directory, "attach") as client:
        assert end(directory).exit_code == 0
        assert client.collect()[FrameKind.STDOUT] == bytes(MIB)
    wait_until(lambda: not is_alive(directory), "the end of the shim")
