"""Whatever is said to a shim on its socket, the job goes on and others are served."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.wire.frames import HEADER, LARGEST_FRAME, FrameKind, frame
from process_rig import Client, end, is_alive, job_directory, shell, start, wait_until

GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\0" * 100,
    os.urandom(4096).replace(b"\x10", b"\xff"),
    HEADER.pack(FrameKind.HELLO, LARGEST_FRAME + 1),
    HEADER.pack(FrameKind.HELLO, 4) + b"null",
    HEADER.pack(FrameKind.HELLO, 4) + b"\xff\xff\xff\xff",
    frame(FrameKind.HELLO, b'{"role": "king"}'),
    frame(FrameKind.HELLO, b"[" * 100_000),
    frame(FrameKind.HELLO, b"{}"),
    frame(FrameKind.STDIN, b"early"),
]
AFTER_HELLO = [
    frame(FrameKind.STDOUT, b"mine"),
    frame(FrameKind.EXITED, b'{"exit_code": 0}'),
    frame(FrameKind.SIGNAL, b"{}"),
    frame(FrameKind.SIGNAL, b'{"signal": 1e999}'),
    frame(FrameKind.SIGNAL, b'{"signal": 0}'),
    frame(FrameKind.SIGNAL, b'{"signal": "KILL"}'),
    frame(FrameKind.STOP, b"{}"),
    frame(FrameKind.STOP, b'{"reason": "x", "grace_s": "soon"}'),
    frame(FrameKind.STOP, b"[]"),
    frame(FrameKind.TIME_LIMIT, b'{"time_limit_s": []}'),
    frame(FrameKind.HELLO, b'{"role": "king"}'),
]


@pytest.fixture
def directory() -> Iterator[Path]:
    with job_directory() as made:
        answer = "trap 'echo hello' USR1; echo up >&2; while :; do sleep 1000 & wait; done"
        start(shell(made, answer))
        # Before, the signal of `answers` would end it.
        wait_until(lambda: (made / "stderr").read_bytes() == b"up\n")
        yield made


def answers(directory: Path) -> bool:
    """Tell whether job and shim are as they should be."""
    with Client(directory, "attach") as client:
        client.until(FrameKind.STARTED)
        client.send(FrameKind.SIGNAL, signal=10)
        return client.until(FrameKind.STDOUT).endswith(b"hello\n") and is_alive(directory)


def test_garbage_is_cut_off(directory: Path) -> None:
    for garbage in GARBAGE:
        with Client(directory) as client:
            client.socket.sendall(garbage)
            client.socket.shutdown(1)
            assert client.is_closed(), garbage
        assert answers(directory), garbage


def test_a_peer_that_becomes_senseless_is_cut_off(directory: Path) -> None:
    for garbage in AFTER_HELLO:
        with Client(directory, "control") as client:
            client.socket.sendall(garbage)
            assert client.is_closed(), garbage
        assert answers(directory), garbage


def test_the_silent_hold_up_no_one(directory: Path) -> None:
    silent = [Client(directory) for _ in range(40)]
    half = Client(directory)
    half.socket.sendall(frame(FrameKind.HELLO, b'{"role": "attach"}')[:-1])

    assert answers(directory)

    for client in (*silent, half):
        client.close()


def test_the_number_of_peers_is_bounded(directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(Client(directory)) for _ in range(80)]
        assert sum(_is_refused(client) for client in many) == 80 - 64

    def answers_again() -> bool:
        try:
            return answers(directory)
        except (ConnectionResetError, BrokenPipeError):
            return False  # the shim has yet to see that the others have gone

    assert wait_until(answers_again)


def _is_refused(client: Client) -> bool:
    try:
        client.send(FrameKind.HELLO, role="watch")
        first = client.next()
    except (ConnectionResetError, BrokenPipeError):
        return True
    return first is None or first[0] == FrameKind.REFUSED


def test_only_control_may_stop(directory: Path) -> None:
    for role in ("attach", "watch"):
        with Client(directory, role) as client:
            client.send(FrameKind.STOP, reason="cancelled", grace_s=0)
            assert b"the daemon" in client.until(FrameKind.REFUSED)

    assert answers(directory)


def test_a_peer_that_comes_late_is_told_what_was(directory: Path) -> None:
    with Client(directory, "control") as control, Client(directory, "watch") as watch:
        control.send(FrameKind.STOP, reason="cancelled", grace_s=1000)
        assert json.loads(watch.until(FrameKind.STOPPING))["reason"] == "cancelled"

    # The shell ignores neither signal; what is left of it says that it was asked.
    assert end(directory).reason == "cancelled"


def test_news_and_order_of_news(directory: Path) -> None:
    with Client(directory, "control") as control:
        control.send(FrameKind.STOP, reason="cancelled", grace_s=1000)
        kinds = []
        while (seen := control.next()) is not None:
            kinds.append(seen[0])

    # Whether its child was gone before the main process is a matter of luck.
    kinds = [kind for kind in kinds if kind != FrameKind.MAIN_EXITED]
    assert kinds == [FrameKind.STARTED, FrameKind.STOPPING, FrameKind.EXITED]


# A shim whose code is the repository's, but for one line.
_WITH_A_BUG = """
import sys
from pathlib import Path
from gpulease.wire.frames import FrameKind
from process_rig import Client, run, shell, start, stop, timedelta
directory = Path(sys.argv[1])
start(shell(directory, "while :; do sleep 1; done"))
with Client(directory, "watch") as client:
    client.send(FrameKind.SIGNAL, signal=10)
    assert client.is_closed()
with Client(directory, "attach") as other:
    other.until(FrameKind.STARTED)
run(stop(directory, "over", timedelta(0)))
"""


def test_an_error_of_the_shims_own_is_in_the_jobs_log_and_the_job_goes_on(tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    shutil.copytree(repository / "gpulease", tmp_path / "gpulease")
    broken = tmp_path / "gpulease" / "shim" / "process_tree.py"
    promise = "if number not in signal.valid_signals():"
    text = broken.read_text()
    assert promise in text
    broken.write_text(text.replace(promise, "if number not in self.misspelt:"))
    with job_directory() as directory:
        subprocess.run(
            [sys.executable, "-c", _WITH_A_BUG, str(directory)],
            check=True, timeout=60, cwd="/",
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{repository / 'tests'}"},
        )  # fmt: skip
        last = end(directory)
        log = (directory / "stderr").read_text()
    assert last.reason == "over"
    assert log.startswith("[gpulease: ")
    assert "AttributeError(" in log
    assert f"{broken}:" in log
    assert log.count("\n") == 1
