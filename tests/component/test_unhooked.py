"""Real processes that the hook holds, and real ones that it does not, as the observer sees them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import NOON, MemoryStore, hold_order, order
from goldens import mentions
from gpulease.domain.enforcement import HOOK, PATH, UncoveredProcess
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.host import hook_coverage
from gpulease.host.hook_coverage import HookCoverage, on_record
from gpulease.service.observation import Observation
from gpulease.service.ports import Event
from gpulease.shim.process_tree import program_of
from gpulease.worker.environment import HOOKS
from process_rig import run, wait_until

SLEEP = "import time; print(flush=True); time.sleep(1000)"
IN_THE_JOB = {"PATH": os.environ["PATH"], HOOK: "{}", PATH: str(HOOKS)}


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


class Rig:
    """One job, what its owner was told, and the processes that are seen on the GPUs."""

    def __init__(self, started: list["subprocess.Popen[bytes]"]) -> None:
        self._started = started
        self.told: list[tuple[JobId, str]] = []
        self.rungs = ("framework",)
        self.before: set[JobId] = set()
        self.store = MemoryStore()
        self.job: Job = replace(order().queued(JobId(1), NOON), state=State.ACTIVE)
        self.seen: dict[int, JobId] = {}
        self.unhooked = HookCoverage(
            lambda: [self.job],
            lambda: self.rungs,
            HOOKS,
            self.tell,
            lambda job: job in self.before or on_record(self.store, job),
            self.note,
        )
        self.noted: list[UncoveredProcess] = []

    async def note(self, job: Job, process: UncoveredProcess) -> None:
        assert job is self.job
        self.noted.append(process)

    async def tell(self, job: JobId, text: str) -> None:
        self.told.append((job, text))

    def start(self, *argv: str, **variables: str) -> int:
        """Start a process that is on a GPU from when it has said that it runs."""
        process = subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE)
        self._started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        self.seen[process.pid] = JobId(1)
        return process.pid

    def look(self) -> dict[int, str]:
        programs = {pid: program for pid in self.seen if (program := program_of(pid))}
        run(self.unhooked.look(Observation((), dict(self.seen), NOON, programs=programs)))
        return {each.pid: each.why for each in self.unhooked.of(JobId(1))}


@pytest.fixture
def rig(processes: list["subprocess.Popen[bytes]"]) -> Rig:
    return Rig(processes)


def test_only_what_the_hook_does_not_reach_is_shown_and_its_owner_is_told_once(rig: Rig) -> None:
    rig.start(sys.executable, "-c", SLEEP, **IN_THE_JOB)
    assert rig.look() == {}
    assert rig.told == []
    apart = rig.start(sys.executable, "-I", "-c", SLEEP, **IN_THE_JOB)
    bare = rig.start(sys.executable, "-c", SLEEP)
    other = rig.start("sh", "-c", "echo; while :; do sleep 1; done", **IN_THE_JOB)
    for _ in range(2):
        shown = rig.look()
        assert shown.keys() == {apart, bare, other}
        assert "-I" in shown[apart]
        assert "environment" in shown[bare]
        assert "Python" in shown[other]
    ((job, text),) = rig.told
    assert job == 1
    assert mentions(text, f"process {apart}", f"({sys.executable} -I -c ")


def test_a_process_is_judged_anew_when_it_has_become_another_program(rig: Rig) -> None:
    script = 'echo; read go; exec "$0" -c "$1"'
    stdin, ours = os.pipe()
    process = subprocess.Popen(
        ["sh", "-c", script, sys.executable, SLEEP],
        env=IN_THE_JOB, stdin=stdin, stdout=subprocess.PIPE,
    )  # fmt: skip
    os.close(stdin)
    assert process.stdout is not None
    process.stdout.readline()
    rig.seen[process.pid] = JobId(1)
    assert list(rig.look()) == [process.pid]
    os.write(ours, b"\n")
    os.close(ours)
    process.stdout.readline()
    assert rig.look() == {}
    process.kill()
    process.communicate()
    assert rig.look() == {}


def test_nothing_is_said_where_hooks_hold_nobody_nor_of_who_holds_a_lease_by_themselves(
    rig: Rig,
) -> None:
    rig.start(sys.executable, "-I", "-c", SLEEP, **IN_THE_JOB)
    rig.rungs = ()
    assert rig.look() == {}
    rig.rungs = ("framework",)
    rig.job = replace(hold_order().queued(JobId(1), NOON), state=State.ACTIVE)
    assert rig.look() == {}
    assert rig.told == []


def test_after_a_restart_the_owner_is_not_told_again(rig: Rig) -> None:
    rig.before.add(JobId(1))
    pid = rig.start(sys.executable, "-I", "-c", SLEEP, **IN_THE_JOB)
    assert rig.look().keys() == {pid}
    assert rig.told == []


def test_what_stands_on_record_is_not_told_a_second_time() -> None:
    store = MemoryStore()
    with store.write() as tx:
        job = tx.add(order(), NOON)
        tx.save(job, Event(NOON, "notice", "it is over its lease"))
    assert not on_record(store, job.id)
    with store.write() as tx:
        tx.save(
            job,
            Event(NOON, "notice", str(UncoveredProcess(7, "python -I x.py", "it runs with -I"))),
        )
    assert on_record(store, job.id)


def test_a_program_with_python_built_in_is_python(tmp_path: Path) -> None:
    library = Path("/usr/lib/x86_64-linux-gnu").glob("libpython3*.so*")
    if (built_in := next(library, None)) is None:
        pytest.skip("no shared libpython here")
    mapped = subprocess.Popen(
        ["sh", "-c", "echo; while :; do sleep 1; done"],
        env={"LD_PRELOAD": str(built_in), "PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert mapped.stdout is not None
        mapped.stdout.readline()
        wait_until(lambda: hook_coverage.started(mapped.pid).is_python, "its library is mapped")
    finally:
        mapped.kill()
        mapped.communicate()


def test_of_a_process_that_has_gone_nothing_is_known() -> None:
    gone = hook_coverage.started(2**22 + 1)
    assert gone.environment is None
    assert not gone.is_python
    assert program_of(2**22 + 1) == b""


def test_a_process_that_ends_after_it_was_seen_is_not_said_to_lack_the_hook(rig: Rig) -> None:
    pid = rig.start(sys.executable, "-c", SLEEP, **IN_THE_JOB)
    program = program_of(pid)
    os.kill(pid, signal.SIGKILL)  # not reaped, it shows an empty environment
    wait_until(lambda: not program_of(pid), "it has ended")
    run(rig.unhooked.look(Observation((), dict(rig.seen), NOON, programs={pid: program})))
    assert rig.unhooked.of(JobId(1)) == ()
    assert rig.told == []
