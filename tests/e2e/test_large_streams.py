"""Megabytes through a job arrive as they were, whatever the ends of the streams are."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for

SIZE = 24 << 20
RUN = ("run", "--mem", "1G", "--")
THE_MIDDLE = "head -c 9000000; sleep 0.3; cat"
"""A job that copies, and is not always as quick to read."""


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(os.urandom(SIZE))
    return path


def read_off(fd: int, into: Path) -> None:
    with into.open("wb") as copy:
        subprocess.run(["cat"], stdin=fd, stdout=copy, check=True)


@contextlib.contextmanager
def ends(source: str, target: str, big: Path, copy: Path) -> Iterator[tuple[int, int]]:
    """What `run` gets as its stdin and stdout."""
    with contextlib.ExitStack() as stack:
        if source == "file":
            stdin = stack.enter_context(big.open("rb")).fileno()
        else:
            feeder = stack.enter_context(subprocess.Popen(["cat", big], stdout=subprocess.PIPE))
            assert feeder.stdout is not None
            stdin = feeder.stdout.fileno()
        if target != "pipe":
            mode = "ab" if target == "append" else "wb"
            yield stdin, stack.enter_context(copy.open(mode)).fileno()
            return
        reader, writer = os.pipe()
        reading = threading.Thread(target=read_off, args=(reader, copy))
        reading.start()
        try:
            yield stdin, writer
        finally:
            os.close(writer)
            reading.join()
            os.close(reader)


@pytest.mark.parametrize(
    ("source", "target"), [("file", "append"), ("file", "pipe"), ("pipe", "file")]
)
def test_megabytes_arrive_as_they_were(
    daemon: Daemon, tmp_path: Path, big: Path, source: str, target: str
) -> None:
    copy = tmp_path / "copy"
    before = b"before" if target == "append" else b""
    copy.write_bytes(before)
    with ends(source, target, big, copy) as (stdin, stdout):
        process = daemon.open(*RUN, "bash", "-c", THE_MIDDLE, stdin=stdin, stdout=stdout)
        assert process.wait() == 0
    assert copy.read_bytes() == before + big.read_bytes()
    log = daemon.run("logs", "1", text=False).stdout
    assert log == big.read_bytes(), "what was shown is what was kept"


def test_a_file_that_is_written_from_its_middle_is_written_on_from_there(
    daemon: Daemon, tmp_path: Path, big: Path
) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(b"head" + b"-" * (SIZE + 4))
    with big.open("rb") as source, copy.open("r+b") as target:
        source.seek(SIZE // 2)
        os.lseek(target.fileno(), 4, os.SEEK_SET)
        daemon.open(*RUN, "cat", stdin=source, stdout=target).wait()
        assert os.lseek(target.fileno(), 0, os.SEEK_CUR) == 4 + SIZE // 2
    middle = big.read_bytes()[SIZE // 2 :]
    assert copy.read_bytes() == b"head" + middle + b"-" * (SIZE // 2 + 4)


def test_a_run_that_is_killed_in_the_middle_leaves_the_log_whole(
    daemon: Daemon, tmp_path: Path, big: Path
) -> None:
    copy = tmp_path / "copy"
    with copy.open("wb") as stdout:
        process = daemon.open(*RUN, "bash", "-c", f"cat {big}; sleep 1; cat {big}", stdout=stdout)
        grown(copy, 1 << 20)
        process.kill()
        process.wait()
    daemon.wait_until(1, "ended")
    assert daemon.run("logs", "1", text=False).stdout == 2 * big.read_bytes()


def grown(copy: Path, size: int) -> None:
    there: Callable[[], bool] = lambda: copy.stat().st_size >= size  # noqa: E731
    wait_for(f"{size} bytes have come", there)
