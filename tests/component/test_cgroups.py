"""Whose a process is by its cgroup: real cgroups of version 2, and real processes in them."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import cgroup_by_hand as by_hand
from fakes import NOON, hold_order, order
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Holder, Job, Owner
from gpulease.host import cgroups
from gpulease.host.cgroups import SLICE, scope_name
from gpulease.host.process_finder import Finder, living
from gpulease.host.processes import MARKER, ProcessTable, marker
from process_rig import is_running, pids, run, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")

ME = Owner(os.getuid(), os.getgid(), "me")
CONTAINER = "0123456789abcdef" * 4


@pytest.fixture
def scope() -> Iterator[tuple[int, Path]]:
    with by_hand.scope() as made:
        yield made


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleeper(started: list[subprocess.Popen[bytes]], path: Path | None, **variables: str) -> int:
    """Start a process that has dropped its environment and made a session of its own."""
    started.append(subprocess.Popen(["sleep", "1000"], env=variables, start_new_session=True))
    if path is not None:
        by_hand.put(started[-1].pid, path)
    return started[-1].pid


def job(number: int, **changes: object) -> Job:
    return replace(order(owner=ME).queued(JobId(number), NOON), **changes)  # type: ignore[arg-type]


def finder(*enclosed: int) -> Finder:
    """Return the finder of a daemon that has put these jobs into scopes."""
    return Finder(ProcessTable(), "here", lambda _: True, lambda number: number in enclosed)


def test_who_is_in_the_scope_of_a_job_is_of_the_job_whatever_else_it_says(
    scope: tuple[int, Path], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    number, path = scope
    nested = path / "inner"
    nested.mkdir()
    bare = sleeper(sleepers, path)
    deep = sleeper(sleepers, nested)
    says_another = sleeper(sleepers, path, **{MARKER: "here/7"})
    outside = sleeper(sleepers, None)

    jobs = [job(number), job(7)]
    found = finder(number).jobs_of([bare, deep, says_another, outside], jobs)

    assert found == {bare: number, deep: number, says_another: number}
    assert cgroups.members(number) == {bare, deep, says_another}


def test_a_scope_that_we_did_not_make_is_another_daemons(
    scope: tuple[int, Path], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    number, path = scope
    pid = sleeper(sleepers, path)
    assert finder().jobs_of([pid], [job(number)]) == {}
    assert finder(number).jobs_of([pid], []) == {}, "its job has ended"


@pytest.mark.parametrize(
    "above", ["user.slice/user-1000.slice/user@1000.service", "gpulease.slice/x"]
)
def test_a_slice_of_the_same_name_below_a_users_own_is_no_ones_scope(
    above: str, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    top = by_hand.unified() / f"gpulease-test-{secrets.token_hex(4)}"
    with by_hand.directory(top), by_hand.scope() as (number, _):
        forged = top / above / SLICE / scope_name(number)
        forged.mkdir(parents=True)
        pid = sleeper(sleepers, forged)
        assert cgroups.scope_of(pid) is None
        assert finder(number).jobs_of([pid], [job(number)]) == {}


def test_a_holder_within_a_job_is_the_job_s_own_and_takes_nothing_from_its_account(
    scope: tuple[int, Path], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    number, path = scope
    pid = sleeper(sleepers, path)
    holder = living(pid)
    assert holder is not None
    held = replace(hold_order(owner=ME), holder=Holder(holder.process, None))
    jobs = [job(number), held.queued(JobId(8), NOON)]
    assert finder(number).jobs_of([pid], jobs) == {pid: number}


def test_a_job_has_as_many_processes_as_its_scope_also_when_its_shim_is_dead(
    scope: tuple[int, Path], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    number, path = scope
    shim = sleeper(sleepers, path)
    other = sleeper(sleepers, path)
    assert finder(number).pids_of(job(number, shim_pid=shim)) == {other}
    gone = Finder(ProcessTable(), "here", lambda _: False, lambda _: True)
    assert gone.pids_of(job(number, shim_pid=None)) == {shim, other}


def test_what_a_dead_shim_leaves_in_the_scope_is_ended_whatever_it_has_dropped(
    scope: tuple[int, Path], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    number, path = scope
    bare = sleeper(sleepers, path)
    marker, nobody = f"{secrets.token_hex(4)}/1", os.getuid() + 1
    table = ProcessTable()
    assert table.survivors(marker, nobody) == set()
    assert pids(table.survivors(marker, nobody, None, JobId(number))) == {bare}

    run(table.end_survivors(marker, timedelta(minutes=10), nobody, None, JobId(number)))

    assert not is_running(bare)
    assert cgroups.members(number) == set()


@pytest.mark.parametrize(
    "name",
    [
        f"system.slice/docker-{CONTAINER}.scope",
        f"docker/{CONTAINER}",
        f"machine.slice/libpod-{CONTAINER}.scope/container",
        f"kubepods.slice/kubepods-pod1.slice/cri-containerd-{CONTAINER}.scope",
    ],
)
def test_a_container_is_known_by_the_cgroup_that_its_runtime_made(
    name: str, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    top = by_hand.unified() / f"gpulease-test-{secrets.token_hex(4)}"
    with by_hand.directory(top):
        (top / name).mkdir(parents=True)
        # By its marker it is still found, if it was given one and is its owner's.
        pid = sleeper(sleepers, top / name, **{MARKER: "here/7"})
        wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        assert cgroups.container_of(pid) == CONTAINER[:12]
        assert finder().jobs_of([pid], [job(7)]) == {pid: 7}
        stranger = finder().identify(pid)
        assert stranger is not None and stranger.container == CONTAINER[:12]


def test_a_marker_counts_for_another_uid_only_in_a_container_that_root_has_made(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    top = by_hand.unified() / f"gpulease-test-{secrets.token_hex(4)}"
    owner = replace(ME, uid=os.getuid() + 1)
    with by_hand.directory(top):
        container = top / f"docker-{CONTAINER}.scope"
        container.mkdir()
        mark = marker("here", JobId(7), "")
        inside = sleeper(sleepers, container, **{MARKER: mark})
        outside = sleeper(sleepers, top, **{MARKER: mark})
        forged = sleeper(sleepers, container, **{MARKER: marker("here", JobId(7), "a guess")})
        old = sleeper(sleepers, container, **{MARKER: "here/7"})
        for pid in (inside, outside, forged, old):
            wait_until(lambda pid=pid: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        of_another = job(7, owner=owner)

        assert finder().jobs_of([inside, outside, forged, old], [of_another]) == {inside: 7}
        assert finder().jobs_of([old], [job(7)]) == {old: 7}, "its owner's, from before an upgrade"
        assert pids(ProcessTable().in_containers(mark, owner.uid)) == {inside}
        assert ProcessTable().in_containers(marker("here", JobId(8), ""), owner.uid) == set()

        os.chown(container, owner.uid, -1)
        assert finder().jobs_of([inside, outside], [of_another]) == {}, "a user can forge that"


def test_a_young_process_is_found_after_it_was_moved_into_a_container(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    top = by_hand.unified() / f"gpulease-test-{secrets.token_hex(4)}"
    with by_hand.directory(top):
        container = top / f"docker-{CONTAINER}.scope"
        container.mkdir()
        processes = cgroups.ContainerProcesses()
        pid = sleeper(sleepers, top)
        assert pid not in processes.look()
        by_hand.put(pid, container)
        assert pid in processes.look()
        assert pid in processes.look()


def test_a_look_for_containers_opens_no_file_of_an_old_process(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    processes = cgroups.ContainerProcesses(settled_s=0.0)
    old = sleeper(sleepers, None)
    wait_until(lambda: not opened(processes, old))
    new = sleeper(sleepers, None)
    files = opened(processes, new)
    assert files, "a new process is looked at"
    assert not opened(processes, old)


def opened(processes: cgroups.ContainerProcesses, pid: int) -> list[str]:
    """Return the files of a process that a look opens."""
    files: list[str] = []
    _open_files.append(files)
    processes.look()
    _open_files.remove(files)
    return [each for each in files if each.startswith(f"/proc/{pid}/")]


_open_files: list[list[str]] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        for files in _open_files:
            files.append(str(arguments[0]))


sys.addaudithook(_note)


def test_the_monitor_of_a_container_and_other_processes_are_in_none(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    top = by_hand.unified() / f"gpulease-test-{secrets.token_hex(4)}"
    with by_hand.directory(top):
        conmon = top / f"libpod-conmon-{CONTAINER}.scope"
        conmon.mkdir()
        assert cgroups.container_of(sleeper(sleepers, conmon)) is None
    assert cgroups.container_of(os.getpid()) is None
    assert cgroups.container_of(2**22 + 1) is None
    assert cgroups.scope_of(2**22 + 1) is None
