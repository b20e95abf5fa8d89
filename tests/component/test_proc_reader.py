"""A process may hold up whoever reads its environment; the others are read all the same.

A FIFO that nobody writes to stands in for the file of such a process: to open it waits for ever.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.host.proc_reader import ProcReader, command_of, name_of, real_uid
from process_rig import wait_until

PATIENCE_S = 0.2


class Crowd:
    """Real processes, and a folder of files that are said to be theirs."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.processes: list[subprocess.Popen[bytes]] = []

    def honest(self, **options: int) -> int:
        folder = self._one(**options)
        (folder / "environ").write_bytes(b"A=1\0")
        return int(folder.name)

    def hostile(self, **options: int) -> int:
        folder = self._one(**options)
        os.mkfifo(folder / "environ")
        return int(folder.name)

    def let_go(self, pid: int) -> None:
        """Answer whoever waits for the process."""
        with (self.proc / str(pid) / "environ").open("wb") as writer:
            writer.write(b"B=2\0")

    def _one(self, **options: int) -> Path:
        process = subprocess.Popen(["sleep", "600"], **options)  # type: ignore[call-overload]
        self.processes.append(process)
        folder = self.proc / str(process.pid)
        folder.mkdir()
        return folder


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    made = Crowd(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def test_who_holds_a_read_up_is_unreadable_and_keeps_nothing_from_others(crowd: Crowd) -> None:
    reader = ProcReader(crowd.proc, PATIENCE_S)
    hostile, honest = crowd.hostile(), crowd.honest()
    assert reader.read(hostile, "environ", 100) is None
    # Other processes of a user who blocks a read have little time, on a busy machine too little.
    wait_until(lambda: reader.read(honest, "environ", 100) == b"A=1\0")
    wait_until(lambda: reader.read(honest, "environ", 2) == b"A=")


def test_one_that_holds_up_a_read_is_not_tried_again_before_it_lets_go(crowd: Crowd) -> None:
    reader = ProcReader(crowd.proc, PATIENCE_S)
    hostile = crowd.hostile()
    before = threading.active_count()
    for _ in range(50):
        assert reader.read(hostile, "environ", 100) is None
    assert threading.active_count() == before + 1
    crowd.let_go(hostile)
    # Its thread can be used again, and so can the process.
    (crowd.proc / str(hostile) / "environ").unlink()
    (crowd.proc / str(hostile) / "environ").write_bytes(b"C=3\0")
    wait_until(lambda: reader.read(hostile, "environ", 100) == b"C=3\0", "it is read again")
    assert threading.active_count() <= before + 2


def test_a_user_keeps_a_few_threads_and_others_are_read_on(crowd: Crowd) -> None:
    if os.geteuid() != 0:
        pytest.skip("processes of another user take root")
    reader = ProcReader(crowd.proc, PATIENCE_S)
    theirs = [crowd.hostile(user=65534) for _ in range(12)]
    before = threading.active_count()
    assert [reader.read(pid, "environ", 100) for pid in theirs] == [None] * 12
    assert threading.active_count() - before == 4
    assert reader.read(crowd.honest(user=65534), "environ", 100) is None
    honest = crowd.honest()
    wait_until(lambda: reader.read(honest, "environ", 100) == b"A=1\0")


def test_who_is_gone_or_has_no_such_file_is_no_error(crowd: Crowd) -> None:
    reader = ProcReader(crowd.proc, PATIENCE_S)
    pid = crowd.honest()
    assert reader.read(pid, "maps", 100) is None
    crowd.processes[0].kill()
    crowd.processes[0].wait()
    shutil.rmtree(crowd.proc / str(pid))
    assert reader.read(pid, "environ", 100) is None


def test_what_the_kernel_tells_of_a_process_is_read_as_it_is() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            # In the midst of its exec a process has no arguments.
            wait_until(lambda: command_of(process.pid) == ("sleep", "600"))
            assert name_of(process.pid) == "sleep"
            assert real_uid(process.pid) == os.getuid()
        finally:
            process.kill()
    assert command_of(2) in ((), None)  # a kernel thread, where it can be seen
