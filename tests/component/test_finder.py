"""Whose a process is, where leases are held: real processes, and leases by hand."""

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import NOON, hold_order, order
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Holder, Job, Owner, Process
from gpulease.host.cgroups import in_initial_pid_namespace
from gpulease.host.process_finder import Finder, has_ended, living
from gpulease.host.processes import MARKER, ProcessTable
from process_rig import wait_until

ME = Owner(os.getuid(), os.getgid(), "me")
PREFIX = "here"
MPS = "nvidia-cuda-mps-server"
# Tells the pids of two children: one with the marker that it is given, one without.
_TWO = f"{MARKER}=$1 sleep 1000 & echo $!; unset {MARKER}; sleep 1000 & echo $!; wait"


@pytest.fixture
def finder() -> Finder:
    return Finder(ProcessTable(), PREFIX)


@pytest.fixture
def family() -> Iterator[tuple[int, int, int]]:
    """A shell, its child with the marker of job 1, and its child without one."""
    shell = subprocess.Popen(
        ["sh", "-c", _TWO, "sh", f"{PREFIX}/1"], stdout=subprocess.PIPE, process_group=0
    )
    assert shell.stdout is not None
    children = int(shell.stdout.readline()), int(shell.stdout.readline())
    for child in children:
        comm = Path(f"/proc/{child}/comm")
        wait_until(lambda comm=comm: comm.read_text() == "sleep\n", "the child is what it will be")
    yield shell.pid, *children
    os.killpg(shell.pid, 9)
    shell.communicate()


def process(pid: int) -> Process:
    found = living(pid)
    assert found is not None
    return found.process


def servers(finder: Finder, pids: Collection[int]) -> frozenset[int]:
    found = finder.listed(pids, [])
    assert found is not None
    return found.servers


def held(number: int, by: Process) -> Job:
    wanted = replace(hold_order(owner=ME), holder=Holder(by, None))
    return wanted.queued(JobId(number), NOON)


def test_the_holder_and_all_below_it_belong_to_the_lease(
    finder: Finder, family: tuple[int, int, int]
) -> None:
    shell, marked, plain = family
    hold = held(7, process(shell))
    assert finder.jobs_of([shell, marked, plain, os.getpid()], [hold]) == {
        shell: 7,
        marked: 7,
        plain: 7,
    }


def test_of_two_leases_of_one_holder_a_process_belongs_to_the_one_it_was_started_in(
    finder: Finder, family: tuple[int, int, int]
) -> None:
    shell, marked, plain = family
    both = [held(1, process(shell)), held(7, process(shell))]
    assert finder.jobs_of([marked, plain], both) == {marked: 1, plain: 7}


def test_the_nearest_holder_counts(finder: Finder, family: tuple[int, int, int]) -> None:
    shell, marked, plain = family
    jobs = [held(3, process(shell)), held(4, process(plain))]
    assert finder.jobs_of([marked, plain], jobs) == {marked: 3, plain: 4}


def test_a_lease_taken_within_a_job_takes_nothing_from_the_jobs_account(
    finder: Finder, family: tuple[int, int, int]
) -> None:
    shell, marked, plain = family
    run = replace(order(owner=ME).queued(JobId(9), NOON), shim_pid=shell)
    for holder in (plain, shell):
        jobs = [run, held(2, process(holder))]
        assert finder.jobs_of([shell, marked, plain], jobs) == dict.fromkeys(family, 9)


def test_a_job_below_the_holder_of_a_lease_is_a_job_of_its_own(
    finder: Finder, family: tuple[int, int, int]
) -> None:
    shell, marked, plain = family
    run = replace(order(owner=ME).queued(JobId(9), NOON), shim_pid=plain)
    jobs = [run, held(2, process(shell))]
    assert finder.jobs_of([shell, marked, plain], jobs) == {shell: 2, marked: 2, plain: 9}


def test_a_process_that_only_has_the_pid_of_a_holder_is_a_stranger(
    finder: Finder, family: tuple[int, int, int]
) -> None:
    shell, _, plain = family
    there = process(shell)
    for other in (replace(there, started=there.started - 1), replace(there, boot="another")):
        assert has_ended(other)
        assert finder.jobs_of([shell, plain], [held(7, other)]) == {}


def test_a_marker_counts_no_longer_than_its_lease(
    finder: Finder, family: tuple[int, int, int]
) -> None:
    _, marked, _ = family
    assert finder.jobs_of([marked], [held(1, process(os.getpid()))]) == {marked: 1}
    assert finder.jobs_of([marked], []) == {}


def test_a_mere_thread_and_what_is_not_there_are_no_processes() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    assert living(thread.native_id) is None
    over.set()
    thread.join()
    assert living(0) is None
    assert living(-1) is None
    highest = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert living(highest + 1) is None
    seen = living(os.getpid())
    assert seen is not None
    assert (seen.uid, seen.process.pid) == (os.getuid(), os.getpid())


@pytest.fixture
def mps_folder() -> Iterator[Path]:
    """Return a folder of ours that others may look into, as programs are installed."""
    with tempfile.TemporaryDirectory(prefix="gpulease-mps-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        shutil.copy("/bin/sleep", Path(name) / MPS)
        yield Path(name)


def test_an_mps_server_is_known_by_its_name_and_by_where_its_file_is(
    finder: Finder, mps_folder: Path
) -> None:
    # Users' programs are served by a server of theirs.
    user = {"user": 65534, "group": 65534} if os.geteuid() == 0 else {}
    server = mps_folder / MPS
    real = subprocess.Popen([server, "600"], **user)
    plain = subprocess.Popen(["sleep", "600"])
    try:
        wait_until(lambda: Path(f"/proc/{real.pid}/exe").readlink() == server)
        pids = [real.pid, plain.pid, os.getpid(), 2**22 - 1]
        assert servers(finder, pids) == {real.pid}
        mps_folder.chmod(0o1777)
        assert servers(finder, pids) == frozenset(), "anybody could have put it there"
        mps_folder.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(server, 65534, 65534)
            assert servers(finder, pids) == frozenset(), "a user's own program is none"
            os.chown(server, 0, 0)
        assert servers(finder, pids) == {real.pid}
        server.rename(mps_folder / "gone")
        shutil.copy("/bin/sleep", server)
        assert servers(finder, pids) == frozenset(), "another file is there now"
    finally:
        for process in (real, plain):
            process.kill()
            process.wait()


def test_a_program_that_was_mounted_under_that_name_elsewhere_is_no_mps_server(
    finder: Finder, mps_folder: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run something as somebody else")
    folder = Path(tempfile.mkdtemp(prefix="gpulease-mps-", dir="/tmp"))
    os.chown(folder, 65534, 65534)
    script = f'touch "$0/{MPS}" && mount --bind /bin/sleep "$0/{MPS}" && exec sleep 600'
    somebody = {"user": 65534, "group": 65534}
    inside = subprocess.Popen(["unshare", "-Urm", "sh", "-c", script, folder], **somebody)
    fake = None
    try:
        try:
            wait_until(lambda: str(folder) in Path(f"/proc/{inside.pid}/mounts").read_text())
        except (AssertionError, OSError):
            pytest.skip("this machine lets nobody have a user namespace")
        # From outside, in the namespace where users are who they are.
        program = f"/proc/{inside.pid}/root{folder}/{MPS}"
        fake = subprocess.Popen(["sh", "-c", 'exec "$0" 600', program], **somebody)
        wait_until(lambda: Path(f"/proc/{fake.pid}/exe").readlink().name == MPS)
        assert servers(finder, [fake.pid]) == frozenset()
    finally:
        for process in (fake, inside):
            if process is not None:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_program_that_is_called_so_in_a_namespace_of_its_users_is_no_mps_server(
    finder: Finder, tmp_path: Path
) -> None:
    server = tmp_path / MPS
    server.touch()
    # The file is root's, and of that name, as long as one looks from in there.
    script = 'mount --bind /bin/sleep "$0" && exec "$0" 600'
    fake = subprocess.Popen(["unshare", "-Urm", "sh", "-c", script, server])
    try:
        try:
            wait_until(lambda: Path(f"/proc/{fake.pid}/exe").readlink().name == server.name)
        except (AssertionError, OSError):
            pytest.skip("this machine lets nobody have a user namespace")
        assert servers(finder, [fake.pid]) == frozenset()
    finally:
        fake.kill()
        fake.wait()


def test_in_a_namespace_of_its_own_pids_are_known_when_a_jobs_is_listed() -> None:
    nobody = 2**22 - 1
    finder = Finder(ProcessTable(), "here", own_pids=False)
    mine, other = os.getpid(), os.getppid()
    assert not finder.knows_pids([], [])
    assert not finder.knows_pids([other], []), "of no job"
    assert not finder.knows_pids([mine, nobody], [mine]), "the same number by chance"
    assert finder.knows_pids([mine, other], [mine])
    assert finder.knows_pids([other], []), "from then on"
    assert finder.knows_pids([nobody], []), "it may just have ended"
    assert not finder.knows_pids([nobody], []), "until one is not here, and stays listed"
    assert not finder.knows_pids([mine, nobody], [mine])
    assert finder.knows_pids([mine], [mine])
    assert Finder(ProcessTable(), "here").knows_pids([nobody], []), "the host's own namespace"


def test_the_first_pid_namespace_is_known_by_its_inode(tmp_path: Path) -> None:
    link = tmp_path / "pid"
    assert in_initial_pid_namespace(link), "nobody says"
    link.touch()
    assert not in_initial_pid_namespace(link)
    told = str(Path("/proc/self/ns/pid").readlink()) == "pid:[4026531836]"
    assert in_initial_pid_namespace() is told
