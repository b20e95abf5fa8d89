"""The processes of a job in `gpulease top`: read from /proc, as a tree, in rows."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from daemon_stand_in import views
from gpulease.cli.render import own_name
from gpulease.cli.top.lines import plain
from gpulease.cli.top.processes import (
    Process,
    ProcessReader,
    ProcessTable,
    Reading,
    Result,
    Use,
    read_all,
    read_environment,
    read_process,
    tree,
    uses_of,
)
from gpulease.errors import GpuleaseError
from gpulease.units import GIB
from gpulease.wire.machine import ProcessView


def process(pid: int, parent: int = 0, **changed: object) -> Process:
    return replace(Process(pid, parent, 1, "ana", f"train.py {pid}", 0.0, GIB), **changed)


def by_pid(*found: Process) -> dict[int, Process]:
    return {each.pid: each for each in found}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process whose environment is known."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    made = subprocess.Popen(
        [sys.executable, "-c", code, "\x1b]0;owned\x07\u202e"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"B": "\x1b[31m", "A": "1"},
    )  # fmt: skip
    assert made.stdout is not None
    made.stdout.readline()
    yield made
    made.kill()
    made.communicate()


def test_children_stand_below_their_parents() -> None:
    found = by_pid(process(9), process(30, 9), process(12, 9), process(31, 12), process(5, 1))
    assert tree(found, found) == [(5, 0), (9, 0), (12, 1), (31, 2), (30, 1)]


def test_processes_that_cannot_be_read_are_listed_too() -> None:
    assert tree([3, 2, 9], by_pid(process(9, 2))) == [(2, 0), (9, 1), (3, 0)]


def test_each_process_is_listed_once_even_if_reused_pids_look_like_a_circle() -> None:
    found = by_pid(process(1, 2), process(2, 1), process(3, 3))
    assert sorted(pid for pid, _ in tree(found, found)) == [1, 2, 3]


def test_a_chain_of_a_thousand_processes_is_no_deeper_than_the_screen_can_show() -> None:
    found = by_pid(*(process(pid, pid - 1) for pid in range(2, 1002)))
    rows = tree(found, found)
    assert len(rows) == 1000
    table = ProcessTable(Reading(0, found), {}, 80)
    assert "train.py" in plain(table.line(*rows[-1]))


@pytest.mark.parametrize("width", [20, 50, 80, 200])
def test_rows_have_the_width_and_name_the_process(width: int) -> None:
    uses = {7: Use(ProcessView(7, "ana", "x", "x", GIB, 1), ["0", "1"], [GIB, GIB], [30, 50])}
    table = ProcessTable(Reading(0, by_pid(process(7)), {7: 250.0}), uses, width)
    lines = [plain(table.heading()), plain(table.line(7, 0))]
    assert all(len(line) <= max(width, 35) for line in lines)
    assert "7" in lines[1]
    if width >= 80:
        assert lines[1].split() == ["7", "ana", "0,1", "2G", "40%", "250%", "1G", "train.py", "7"]


def test_what_the_kernel_hides_is_shown_as_far_as_the_daemon_says_it() -> None:
    view = ProcessView(7, "bob", "python", "python3 x.py", GIB, 1)
    table = ProcessTable(Reading(), {7: Use(view, ["0"], [GIB], [])}, 80)
    assert plain(table.line(7, 0)).split() == ["7", "bob", "0", "1G", "x.py"]
    assert plain(table.line(8, 1)).split() == ["8", "?", "\\_", "?"]


def test_the_use_of_a_process_is_that_of_its_job_and_counted_once() -> None:
    mine = ProcessView(7, "ana", "python", "python x.py", GIB, 12, utilization=40)
    other = ProcessView(8, "bob", "python", "python x.py", GIB, 13)
    gpus = [
        views.gpu(0, views.FIRST, processes=[mine, other], state="divided"),
        views.gpu(1, views.SECOND, processes=[mine, other], label="0:1"),
    ]
    found = uses_of(views.running(12), views.status(gpus=gpus))
    assert found == {7: Use(mine, ["0:1"], [GIB], [40])}


def test_a_process_is_read_as_the_kernel_describes_it(child: subprocess.Popen[bytes]) -> None:
    found = read_process(child.pid)
    assert found is not None
    assert found.parent == os.getpid()
    assert found.user == own_name()
    assert found.ram > 1 << 20
    assert "?]0;owned??" in found.command


def test_there_is_nothing_to_read_of_a_process_that_has_ended() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert read_process(done.pid) is None


def test_an_environment_is_sorted_and_harmless(child: subprocess.Popen[bytes]) -> None:
    found = read_process(child.pid)
    assert found is not None
    variables = [each for each in read_environment(found) if not each.startswith("LC_CTYPE")]
    assert variables == ["A=1", "B=?[31m"]


def test_the_environment_of_a_later_process_with_the_same_pid_is_not_shown(
    child: subprocess.Popen[bytes],
) -> None:
    found = read_process(child.pid)
    assert found is not None
    with pytest.raises(GpuleaseError, match="it has ended"):
        read_environment(replace(found, started=found.started - 1))
    child.kill()
    child.wait()
    with pytest.raises(GpuleaseError, match="it has ended"):
        read_environment(found)


def test_cpu_time_counts_from_the_last_reading_of_the_same_process() -> None:
    own = os.getpid()
    first = read_all([own], Reading())
    assert first.busy == {}
    begun, until = time.monotonic(), time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    busy = read_all([own], first).busy[own]
    # The kernel counts hundredths of a second, and other processes may take most of the time.
    assert busy > 50 * 0.05 / (time.monotonic() - begun)
    another = replace(first.processes[own], started=1)
    assert read_all([own], Reading(first.at, {own: another})).busy == {}


def test_many_processes_are_read_less_often() -> None:
    """Reading a thousand processes twenty times a minute would cost two seconds of CPU."""
    results: list[Result] = []
    reader = ProcessReader(results.append)
    pids = [os.getpid()] * 2000
    reader.read(pids)
    deadline = time.monotonic() + 20
    while not results and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(50):
        reader.read(pids)
    found = read_process(os.getpid())
    assert found is not None
    reader.read(found)
    while len(results) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    reader.stop()
    assert [type(each) for each in results] == [Reading, tuple]
