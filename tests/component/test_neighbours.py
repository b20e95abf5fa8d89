"""Personal daemons of several users on the same GPUs: what they announce, read and grant.

Each user is a process of its own with a uid of its own, as the kernel sees them.
"""

import ctypes
import json
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon_rig import open_folder, wait_for
from gpulease.domain.gpu import GpuReading, GpuUuid, NeighbourLease, ProcessReading, build_ledger
from gpulease.host.neighbours import NeighbourFiles
from gpulease.host.proc_reader import real_uid
from gpulease.service.sharing import Sharing

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users takes root")
CONTEXT = multiprocessing.get_context("fork")
GPU = GpuUuid("GPU-a")
UIDS = (47_201, 47_202, 47_203, 47_204)
_NEW_MOUNTS, _PRIVATE = 0x20000, 1 << 18 | 1 << 14
"""CLONE_NEWNS; MS_PRIVATE and MS_REC."""
SIZE = 24
"""Bytes of the GPU; leases are of some of them."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder like /dev/shm, which all users may write to."""
    with open_folder() as made:
        made.chmod(0o1777)
        yield made


def as_user(
    uid: int, program: Callable[..., None], *arguments: Any, before: Callable[[], None] = int
) -> Any:
    """Start a process of this user; it calls `before` while it is root's."""

    def become() -> None:
        before()
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.umask(0o077)
        program(*arguments)

    process = CONTEXT.Process(target=become, daemon=True)
    process.start()
    return process


@pytest.fixture
def bob(folder: Path) -> Iterator[Any]:
    """Yield a living daemon of another user that leases 8 bytes for process 100."""

    def announce() -> None:
        leases = (NeighbourLease(os.getuid(), GPU, 8, frozenset({100})),)
        NeighbourFiles(folder).announce(leases)
        time.sleep(600)

    process = as_user(UIDS[0], announce)
    file = folder / f"gpulease-{UIDS[0]}" / "leases"
    wait_for("bob's daemon has announced its leases", file.exists)
    yield process
    process.kill()


@needs_root
def test_the_lease_of_another_user_is_seen_while_the_daemon_lives(folder: Path, bob: Any) -> None:
    mine = NeighbourFiles(folder)
    assert mine.leases() == [NeighbourLease(UIDS[0], GPU, 8, frozenset({100}))]
    bob.kill()
    bob.join()
    assert mine.leases() == []


def hide_processes() -> None:
    """Let this process see those of its own user only, once it is no longer root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    private = libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _PRIVATE, None)
    if private or libc.mount(b"proc", b"/proc", b"proc", 0, b"hidepid=2"):
        raise OSError(ctypes.get_errno(), "cannot hide the processes of others")


@needs_root
def test_where_proc_hides_the_processes_of_others_a_lease_counts_while_its_pid_lives(
    folder: Path, bob: Any
) -> None:
    file = folder / f"gpulease-{UIDS[0]}" / "leases"
    sees = CONTEXT.Queue()

    def look() -> None:
        sees.put((Path(f"/proc/{bob.pid}").exists(), NeighbourFiles(folder).leases()))

    def seen() -> tuple[bool, list[NeighbourLease]]:
        process = as_user(UIDS[1], look, before=hide_processes)
        found: tuple[bool, list[NeighbourLease]] = sees.get(timeout=60)
        process.join()
        return found

    lease = NeighbourLease(UIDS[0], GPU, 8, frozenset({100}))
    assert seen() == (False, [lease])
    said = json.loads(file.read_bytes())
    # A pid that is now one of the reader's own processes is not that of the daemon.
    other = as_user(UIDS[1], time.sleep, 600)
    file.write_text(json.dumps({**said, "pid": other.pid}))
    wait_for("the process has changed its user", lambda: real_uid(other.pid) == UIDS[1])
    assert seen() == (False, [])
    other.kill()
    file.write_text(json.dumps(said))
    bob.kill()
    bob.join()
    assert seen() == (False, [])


@needs_root
def test_only_the_owner_named_by_the_file_is_believed(folder: Path, bob: Any) -> None:
    theirs = folder / f"gpulease-{UIDS[0]}"
    others = [folder / f"gpulease-{uid}" for uid in UIDS[1:]]
    others[0].mkdir()
    (others[0] / "leases").write_bytes((theirs / "leases").read_bytes())
    others[1].symlink_to(theirs)
    others[2].mkdir()
    os.mkfifo(others[2] / "leases")
    assert [each.uid for each in NeighbourFiles(folder).leases()] == [UIDS[0]]


@needs_root
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 60_000,
        b'{"pid": 1}',
        b'{"pid": "x", "started": 1, "leases": {}}',
        b'{"pid": PID, "started": STARTED, "leases": {"GPU-a": ["8", []]}}',
        b'{"pid": PID, "started": STARTED, "leases": {"GPU-a": [-8, []]}}',
        b'{"pid": PID, "started": 1, "leases": {"GPU-a": [8, []]}}',
        b'{"pid": 1, "started": 1, "leases": {"GPU-a": [8, []]}}',
        b'{"pid": 1e400}',
    ],
)
def test_a_file_that_no_living_daemon_wrote_counts_for_nothing(
    folder: Path, bob: Any, content: bytes
) -> None:
    file = folder / f"gpulease-{UIDS[0]}" / "leases"
    said = json.loads(file.read_bytes())
    for name, value in (("PID", said["pid"]), ("STARTED", said["started"])):
        content = content.replace(name.encode(), str(value).encode())
    file.write_bytes(content)
    assert NeighbourFiles(folder).leases() == []


def test_a_file_that_was_removed_is_written_again(folder: Path) -> None:
    files, mine = NeighbourFiles(folder), (NeighbourLease(os.getuid(), GPU, 8),)
    files.announce(mine)
    shutil.rmtree(folder / f"gpulease-{os.getuid()}")
    files.announce(mine)
    assert (folder / f"gpulease-{os.getuid()}" / "leases").exists()


def test_without_leases_there_is_no_file(folder: Path) -> None:
    files = NeighbourFiles(folder)
    files.announce((NeighbourLease(os.getuid(), GPU, 8),))
    assert list(folder.iterdir())
    files.announce(())
    assert not list(folder.iterdir())


def test_what_is_in_use_is_not_subtracted_twice() -> None:
    lease = NeighbourLease(UIDS[0], GPU, 16, frozenset({100}))
    reading = GpuReading(
        GPU, 0, "A", SIZE, used=6, processes=(ProcessReading(100, 6),), neighbours=(lease,)
    )
    assert build_ledger(reading, (), {}).headroom == SIZE - 16
    assert build_ledger(replace(reading, processes=None), (), {}).headroom == SIZE - 16 - 6


def compete(folder: Path, seed: int, leased: Any, granted: Any) -> None:
    """Lease and release at random, as the scheduler does; `leased` has a place for each user."""
    jobs: list[Any] = []
    store: Any = SimpleNamespace(holding=lambda: tuple(jobs))
    sharing = Sharing(NeighbourFiles(folder), store, os.getuid())
    place, dice = UIDS.index(os.getuid()), random.Random(seed)
    claim = SimpleNamespace(exclusive=False)
    bare = GpuReading(GPU, 0, "A", SIZE, used=0, processes=())
    ends_at = time.monotonic() + 3
    while time.monotonic() < ends_at:
        (reading,) = sharing.joined((bare,), {})
        wanted = dice.randint(1, 12)
        own = sum(lease.memory for job in jobs for lease in job.leases)
        free = (build_ledger(reading, (), {}).headroom or 0) - own
        if wanted <= free:
            job: Any = SimpleNamespace(
                claim=claim, leases=(SimpleNamespace(gpu=GPU, memory=wanted),)
            )
            placement: Any = SimpleNamespace(allocations=((GPU, wanted),))
            if sharing.admits([(job, placement)], {GPU: reading}):
                jobs.append(job)
                leased[place] = own + wanted
                granted[place] += 1
                with leased.get_lock():
                    assert sum(leased) <= SIZE, list(leased)
            sharing.settle()
        elif jobs:
            (ended,) = jobs.pop(dice.randrange(len(jobs))).leases
            leased[place] = own - ended.memory
            sharing.settle()
    leased[place] = 0  # what is announced counts no longer, either, once this process has ended


@needs_root
def test_users_who_compete_never_lease_more_than_the_gpu_has(folder: Path) -> None:
    leased, granted = CONTEXT.Array("i", len(UIDS)), CONTEXT.Array("i", len(UIDS))
    seed = random.randrange(1 << 30)
    processes = [
        as_user(uid, compete, folder, seed + place, leased, granted)
        for place, uid in enumerate(UIDS)
    ]
    for process in processes:
        process.join()
    assert [each.exitcode for each in processes] == [0] * len(UIDS), f"seed {seed}"
    assert min(granted) > 0
