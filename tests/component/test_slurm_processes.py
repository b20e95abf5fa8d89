"""Which job of Slurm a process belongs to: real cgroups of both versions, and real processes."""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import cgroup_by_hand as by_hand
from fakes import NOON, order
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Holder, Job, Owner, SlurmJob
from gpulease.host import cgroups
from gpulease.host.process_finder import Finder, living
from gpulease.host.processes import MARKER, ProcessTable
from gpulease.shim.process_tree import entry
from gpulease.slurm.node.processes import SlurmProcesses, directory_of
from process_rig import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")

NOBODY = 65534
Start = Callable[..., "subprocess.Popen[str]"]
RunStep = Callable[..., tuple[int, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a process, which ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def popen(*argv: str, **options: object) -> "subprocess.Popen[str]":
        started.append(subprocess.Popen(argv, text=True, **options))  # type: ignore[call-overload]
        return started[-1]

    yield popen
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def number() -> int:
    """Return the number of a job of Slurm that nobody else has."""
    return 10**9 + secrets.randbelow(10**9)


def first_version(number: int) -> Path:
    return Path(f"/sys/fs/cgroup/freezer/slurm_gpulease-test/uid_{NOBODY}/job_{number}")


def second_version(number: int) -> Path:
    return by_hand.unified() / f"system.slice/gpulease-test_slurmstepd.scope/job_{number}"


@pytest.fixture(params=[first_version, second_version])
def group(request: pytest.FixtureRequest, number: int) -> Iterator[Path]:
    """Yield the cgroup of a job's step, as Slurm makes it."""
    job: Path = request.param(number)
    if request.param is first_version and not Path("/sys/fs/cgroup/freezer/tasks").exists():
        pytest.skip("no cgroups of version 1")
    step = job / "step_0" / "user"
    try:
        step.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cannot make cgroups here: {error}")
    cgroups._mounts.cache_clear()
    yield step
    for each in (step, step.parent, job, job.parent, job.parent.parent):
        with suppress(OSError):
            wait_until(lambda each=each: not (each / "cgroup.procs").read_text())
            each.rmdir()


def leased(number: int, id_: int = 1) -> Job:
    owner = Owner(NOBODY, NOBODY, "nobody")
    return replace(order(owner=owner).queued(JobId(id_), NOON), slurm=SlurmJob(number, "n1"))


def finder() -> Finder:
    return Finder(ProcessTable(), "here")


def test_a_process_in_the_cgroup_of_a_job_is_the_jobs(
    group: Path, number: int, start: Start
) -> None:
    inside = start("sleep", "1000", user=NOBODY, env={MARKER: "here/7"})
    outside = start("sleep", "1000", user=NOBODY)
    by_hand.put(inside.pid, group)
    found = finder().jobs_of([inside.pid, outside.pid], [leased(number)])
    assert found == {inside.pid: 1}
    assert {each.pid for each in SlurmProcesses().of_job(number)} == {inside.pid}
    inside.kill()


def test_a_cgroup_that_a_user_has_made_does_not_count(
    group: Path, number: int, start: Start
) -> None:
    inside = start("sleep", "1000", user=NOBODY)
    by_hand.put(inside.pid, group)
    os.chown(group.parents[1], NOBODY, NOBODY)
    assert SlurmProcesses().job_of(inside.pid) is None
    inside.kill()


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/slurm/uid_1000/job_17/step_0/task_0", 17),
        ("/slurm_n1/uid_1000/job_17/step_batch", 17),
        ("/system.slice/slurmstepd.scope/job_17/step_0/user/task_0", 17),
        ("/lxc/5/system.slice/slurmstepd.scope/job_17/step_0", 17),
        ("/system.slice/slurmstepd.scope/system", None),
        ("/system.slice/slurmd.service", None),
        ("/slurm/uid_1000/job_0", None),
        ("/slurm/uid_1000/job_17a", None),
        ("/my-slurm/uid_1000/job_17", None),
    ],
)
def test_paths_of_slurms_cgroups(path: str, number: int | None) -> None:
    found = cgroups._SLURM.match(path)
    assert (int(found[2]) if found else None) == number


@pytest.fixture
def named_by_sluid(number: int) -> Iterator[Path]:
    """Yield the cgroup of a step in that of its job, as Slurm 26.05 makes them."""
    job = second_version(number).with_name(f"s{number:X}")
    step = job / "step_0"
    try:
        for part in ("slurm", "user"):
            (step / part).mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cannot make cgroups here: {error}")
    cgroups._mounts.cache_clear()
    yield step
    for each in (step / "slurm", step / "user", step, job, job.parent):
        with suppress(OSError):
            wait_until(lambda each=each: not (each / "cgroup.procs").read_text())
            each.rmdir()


def test_a_cgroup_is_that_of_the_job_whose_slurmstepd_is_in_it(
    named_by_sluid: Path, number: int, start: Start, run_step: RunStep
) -> None:
    inside = start("sleep", "1000", user=NOBODY)
    by_hand.put(inside.pid, named_by_sluid / "user")
    assert SlurmProcesses().job_of(inside.pid) is None
    fake, _ = run_step(f"slurmstepd: [{number}.0]", user=NOBODY)
    by_hand.put(fake, named_by_sluid / "slurm")
    assert SlurmProcesses().job_of(inside.pid) is None
    step, child = run_step(f"slurmstepd: [{number}.0]")
    by_hand.put(step, named_by_sluid / "slurm")
    processes = SlurmProcesses()
    assert processes.job_of(inside.pid) == number
    assert inside.pid in {each.pid for each in processes.of_job(number)}
    assert directory_of(number) == named_by_sluid.parent
    for pid in (step, child, fake):
        os.kill(pid, 9)
    wait_until(lambda: str(step) not in (named_by_sluid / "slurm/cgroup.procs").read_text())
    assert processes.job_of(inside.pid) == number
    inside.kill()


_SCRIPT = "sleep 1000 & echo $!; wait\n"


@pytest.fixture
def run_step(start: Start) -> Iterator[RunStep]:
    """Return a function that starts a slurmstepd, and returns its pid and that of its child."""
    children: list[int] = []
    # Users cannot enter tmp_path.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)

    def run(title: str, name: str = "slurmstepd", **options: object) -> tuple[int, int]:
        program = folder / name
        if not program.exists():
            shutil.copy("/bin/sh", program)
        # A shell that reads its script has no arguments but its title.
        process = start(
            title, executable=str(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            **options,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_SCRIPT)
        process.stdin.flush()
        child = int(process.stdout.readline())
        children.append(child)
        # Until it runs sleep, it has the title of its parent, and counts as another slurmstepd.
        wait_until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
        return process.pid, child

    yield run
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
    shutil.rmtree(folder)


@pytest.mark.parametrize("step", ["0", "batch", "4294967291"])
def test_processes_below_slurmstepd_are_its_jobs(run_step: RunStep, number: int, step: str) -> None:
    pid, child = run_step(f"slurmstepd: [{number}.{step}]")
    processes = SlurmProcesses()
    assert finder().jobs_of([pid, child], [leased(number)]) == {pid: 1, child: 1}
    assert processes.steps()[pid] == number
    assert processes.with_steps({number}) >= {number}
    os.kill(pid, 9)
    wait_until(lambda: (found := entry(pid)) is None or found.zombie)
    assert number not in processes.with_steps({number})


def test_a_users_process_that_calls_itself_slurmstepd_does_not_count(
    run_step: RunStep, number: int
) -> None:
    pid, child = run_step(f"slurmstepd: [{number}.0]", user=NOBODY)
    assert SlurmProcesses().job_of(child) is None
    assert pid not in SlurmProcesses().steps()


def test_another_program_of_root_with_that_title_does_not_count(
    run_step: RunStep, number: int
) -> None:
    """As of sudo, which runs as root for users who choose its title."""
    _, child = run_step(f"slurmstepd: [{number}.0]", name="sudo")
    assert SlurmProcesses().job_of(child) is None


def test_a_holder_inside_a_job_of_slurm_does_not_count(run_step: RunStep, number: int) -> None:
    _, child = run_step(f"slurmstepd: [{number}.0]")
    found = living(child)
    assert found is not None
    hold = replace(leased(number, 2), slurm=None, holder=Holder(found.process, None))
    assert finder().jobs_of([child], [leased(number), hold]) == {child: 1}
