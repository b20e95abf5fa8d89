"""A daemon of one's own: one, however many ask, and its own words when it cannot be."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpulease.client import answers
from gpulease.errors import NoDaemon
from gpulease.personal import ensure

LISTENER = """
import os, socket, sys, time
here = os.open(os.path.dirname(sys.argv[1]), os.O_PATH)
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"/proc/self/fd/{here}/" + os.path.basename(sys.argv[1]))
listener.listen(64)
open(sys.argv[2], "a").write(f"{os.getpid()}\\n")
while True:
    listener.accept()[0].close()
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pids"
    path.touch()
    yield path
    for pid in path.read_text().split():
        subprocess.run(["kill", f"-{signal.SIGKILL.value}", pid], check=False)


def test_twenty_at_once_end_with_one(tmp_path: Path, pids: Path) -> None:
    at, log = tmp_path / "run" / "s", tmp_path / "state" / "log"
    command = [sys.executable, "-c", LISTENER, str(at), str(pids)]
    with ThreadPoolExecutor(20) as pool:
        started = list(pool.map(lambda _: ensure(at, log, answers, command, 30.0), range(20)))
    assert sum(started) == 1
    assert len(pids.read_text().split()) == 1
    assert at.parent.stat().st_mode & 0o777 == 0o700


def test_what_a_daemon_says_as_it_leaves_is_the_error(tmp_path: Path) -> None:
    said = "cannot read the GPUs: there is no driver\n\nhint: install it"
    log = tmp_path / "log"
    log.write_text("cannot start: an older reason\n\nhint: none\n")
    command = [sys.executable, "-c", f"import sys; print('INFO x'); sys.exit({said!r})"]
    with pytest.raises(NoDaemon) as raised:
        ensure(tmp_path / "run" / "s", log, answers, command, 30.0)
    assert raised.value.message.endswith("for you: cannot read the GPUs: there is no driver")
    assert raised.value.hint == "install it"


def test_one_that_leaves_without_a_word_is_said_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(NoDaemon, match="without a word") as raised:
        ensure(tmp_path / "s", log, answers, [sys.executable, "-c", ""], 30.0)
    assert str(log) in (raised.value.hint or "")


def test_one_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(NoDaemon, match="does not answer"):
        ensure(tmp_path / "s", tmp_path / "log", answers, command, 1.0)
