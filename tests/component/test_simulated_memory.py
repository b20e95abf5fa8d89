"""Simulated GPUs show the memory of the real processes that name them."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL

import pytest

from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.gpu.simulated import SimulatedGpus, parse_simulation

M = 1024**2
_SLACK = 40 * M
"""What a Python interpreter holds of its own."""
_PATIENCE = 20.0
_HOLD = "held = bytearray(int({size})); print('ready', flush=True); input()"


@pytest.fixture
def gpus() -> SimulatedGpus:
    return SimulatedGpus(parse_simulation("8G,24G"), seed=uuid.uuid4().hex)


@contextmanager
def running(program: str, visible: str | None, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program until it has said that it is ready, and end it with its group."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible or ""}
    if visible is None:
        del environment["CUDA_VISIBLE_DEVICES"]
    process = subprocess.Popen(
        [*before, sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)
        process.wait(_PATIENCE)
        process.stdin.close()
        process.stdout.close()


def uuids(gpus: SimulatedGpus) -> tuple[str, str]:
    """Return the UUIDs of the two GPUs."""
    first, second = gpus.gpus
    return first, second


def held(reading: GpuReading) -> dict[int, int]:
    """Return the bytes that each process holds."""
    assert reading.processes is not None
    return {each.pid: each.memory or 0 for each in reading.processes}


def read_until(
    gpus: SimulatedGpus, good: Callable[[tuple[GpuReading, ...]], bool]
) -> tuple[GpuReading, ...]:
    """Read until the GPUs are as they should be, and return that reading."""
    give_up_at = time.monotonic() + _PATIENCE
    while not good(readings := gpus.read()):
        assert time.monotonic() < give_up_at, readings
    return readings


def test_a_process_counts_on_the_gpu_that_its_environment_names(gpus: SimulatedGpus) -> None:
    first, _ = uuids(gpus)
    with running(_HOLD.format(size=300 * M), first) as process:
        one, other = gpus.read()

    assert held(one).keys() == {process.pid}
    assert 300 * M <= held(one)[process.pid] <= 300 * M + _SLACK
    assert one.used == held(one)[process.pid]
    assert (other.used, other.processes) == (0, ())
    assert gpus.read()[0].used == 0, "it has gone"


def test_a_process_that_names_two_gpus_counts_on_each(gpus: SimulatedGpus) -> None:
    with running(_HOLD.format(size=100 * M), ",".join(uuids(gpus))) as process:
        one, other = gpus.read()

    assert held(one) == held(other)
    assert held(one).keys() == {process.pid}


@pytest.mark.parametrize("visible", [None, "", "0", "0,1", "GPU-somewhere-else", "all"])
def test_a_process_that_names_no_gpu_here_does_not_count(
    gpus: SimulatedGpus, visible: str | None
) -> None:
    with running(_HOLD.format(size=M), visible):
        assert [reading.used for reading in gpus.read()] == [0, 0]


def test_memory_is_followed_as_it_grows_and_is_given_back(gpus: SimulatedGpus) -> None:
    first, _ = uuids(gpus)
    program = (
        "print('ready', flush=True); input(); held = bytearray(200 << 20); "
        "print('grown', flush=True); input(); del held; print('shrunk', flush=True); input()"
    )
    with running(program, first) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        used = [gpus.read()[0].used or 0]
        for answer in ("grown\n", "shrunk\n"):
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == answer
            used.append(gpus.read()[0].used or 0)

    assert used[1] - used[0] >= 199 * M
    assert abs(used[2] - used[0]) < 10 * M


def test_a_process_is_seen_by_the_environment_of_its_latest_exec(gpus: SimulatedGpus) -> None:
    """As a launcher does: one pid and one executable, and only then the job's environment."""
    first, second = uuids(gpus)
    program = (
        "import os, sys; print('ready', flush=True); input(); "
        "os.environ['CUDA_VISIBLE_DEVICES'] = sys.stdin.readline().strip(); "
        "os.execv(sys.executable, [sys.executable, '-c', 'input()'])"
    )
    with running(program, first) as process:
        assert process.stdin is not None
        assert held(gpus.read()[0]).keys() == {process.pid}
        process.stdin.write(f"\n{second}\n")
        process.stdin.flush()

        one, other = read_until(gpus, lambda readings: bool(readings[1].processes))

    assert one.processes == ()
    assert held(other).keys() == {process.pid}


def test_children_that_name_the_gpu_count_too(gpus: SimulatedGpus) -> None:
    first, _ = uuids(gpus)
    program = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        "\"held = bytearray(100 << 20); print('ready', flush=True); input()\"]); child.wait()"
    )
    with running(program, first) as process:
        memory = held(gpus.read()[0])

    assert len(memory) == 2
    assert process.pid in memory
    assert sum(memory.values()) >= 100 * M


def test_a_command_of_gpulease_does_not_count_but_the_job_that_it_becomes_does(
    gpus: SimulatedGpus, tmp_path: Path
) -> None:
    first, _ = uuids(gpus)
    become = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'input()'])"
    command = tmp_path / "gpulease"
    command.write_text(f"print('ready', flush=True); input(); {become}")
    start = f"import os, sys; os.execv(sys.executable, [sys.executable, {str(command)!r}, 'run'])"
    with running(start, first) as process:
        assert process.stdin is not None
        assert gpus.read()[0].processes == ()
        process.stdin.write("\n")
        process.stdin.flush()
        assert held(read_until(gpus, lambda readings: bool(readings[0].processes))[0])


def test_what_a_fork_shares_with_its_parent_counts_once(gpus: SimulatedGpus) -> None:
    first, _ = uuids(gpus)
    program = (
        "import os; held = bytearray(200 << 20); ready, tell = os.pipe(); children = 3\n"
        "for _ in range(children):\n"
        "    if os.fork() == 0:\n"
        "        own = bytearray(50 << 20); os.write(tell, b'.'); input()\n"
        "while children: children -= len(os.read(ready, 1))\n"
        "print('ready', flush=True); input()"
    )
    with running(program, first):
        reading = gpus.read()[0]

    assert len(held(reading)) == 4
    assert 350 * M <= (reading.used or 0) <= 350 * M + 4 * _SLACK


def test_mapped_files_do_not_count(gpus: SimulatedGpus, tmp_path: Path) -> None:
    first, _ = uuids(gpus)
    data = tmp_path / "data"
    data.write_bytes(bytes(200 * M))
    program = (
        f"import mmap; file = open({str(data)!r}, 'rb'); "
        "data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); "
        "total = sum(data[::4096]); print('ready', flush=True); input()"
    )
    with running(program, first):
        assert (gpus.read()[0].used or 0) < _SLACK


def test_a_gpu_computes_as_far_as_the_processes_on_it_do(gpus: SimulatedGpus) -> None:
    first, second = uuids(gpus)
    still = "print('ready', flush=True); input()"
    busy = "print('ready', flush=True)\nwhile True: pass"
    with running(busy, first), running(still, second):
        assert [reading.utilization for reading in gpus.read()] == [None, None], "not yet known"
        computes, rests = read_until(gpus, lambda readings: bool(readings[0].utilization))
        assert 0 < (computes.utilization or 0) <= 100
        assert rests.utilization == 0


def test_a_process_that_leased_while_it_ran_counts_until_its_lease_is_over() -> None:
    leased: dict[int, set[GpuUuid]] = {}
    gpus = SimulatedGpus(parse_simulation("8G,24G"), str(uuid.uuid4()), lambda: leased)
    second = GpuUuid(uuids(gpus)[1])
    with running(_HOLD.format(size=200 * M), None) as process:
        assert not any(map(held, gpus.read())), "nothing names them"
        leased[process.pid] = {second}
        nothing, shown = gpus.read()
        assert held(nothing) == {}
        assert held(shown).keys() == {process.pid}
        assert 200 * M <= (shown.used or 0) < 200 * M + _SLACK
        leased.clear()
        assert not any(map(held, gpus.read())), "its lease is over"


def test_a_holder_that_has_loaded_nothing_is_on_no_gpu() -> None:
    leased: dict[int, list[GpuUuid]] = {}
    gpus = SimulatedGpus(parse_simulation("8G"), str(uuid.uuid4()), lambda: leased)
    with running("print('ready', flush=True); input()", None) as process:
        leased[process.pid] = [GpuUuid(next(iter(gpus.gpus)))]
        assert held(gpus.read()[0]) == {}
