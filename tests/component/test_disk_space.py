"""How free space is kept on the disk of the record: whose output makes way, and the reserve."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon.job_output import Log, shortened
from gpulease.domain.gpu import JobId
from gpulease.shim.output import LEAST_KEPT, JobLog, shorten_log
from gpulease.store.database_file import DiskReserve

MIB = 1 << 20
ALICE, BOB = 1001, 1002


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    made = tmp_path / "disk"
    made.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(made)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield made
    subprocess.run(["umount", "--lazy", str(made)], check=True)


def free(disk: Path) -> int:
    return shutil.disk_usage(disk).free


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def log(size: int, job: int, uid: int) -> Log:
    return Log(size, JobId(job), "stdout", uid)


def test_the_longest_log_of_the_user_who_keeps_most_is_shortened_first() -> None:
    flood, small, others = log(40 * MIB, 1, ALICE), log(3 * MIB, 2, ALICE), log(30 * MIB, 3, BOB)
    assert shortened([flood, small, others], 15 * MIB) == {flood: 20 * MIB}
    assert shortened([flood, small, others], 0) == {}


def test_the_newest_part_of_each_log_is_never_removed() -> None:
    logs = [log(40 * MIB, 1, ALICE), log(3 * MIB, 2, BOB), log(LEAST_KEPT, 3, BOB)]
    left = shortened(logs, 1 << 40)
    assert set(left) == set(logs[:2])
    assert all(LEAST_KEPT <= size < 2 * LEAST_KEPT for size in left.values())


def test_a_log_leaves_the_disk_free_space_and_keeps_its_newest_part(disk: Path) -> None:
    made = JobLog(opened(disk / "stdout"), 1 << 40, keep_free=4 * MIB)
    for number in range(1, 200_001):
        made.write(b"%0255d\n" % number)
        if number % 1000 == 0:
            assert free(disk) >= 4 * MIB
    made.finish()
    kept = (disk / "stdout").read_bytes().lstrip(b"\0").splitlines()
    assert kept[-1].startswith(b"[gpulease: ")
    numbers = [int(line) for line in kept[1:-1] if line.isdigit()]
    assert numbers == list(range(numbers[0], 200_001))
    assert len(numbers) * 256 >= LEAST_KEPT


def test_a_short_log_goes_on_where_others_have_filled_the_disk(disk: Path) -> None:
    (disk / "ballast").write_bytes(b"x" * (14 * MIB))
    made = JobLog(opened(disk / "stdout"), 1 << 40, keep_free=4 * MIB)
    for _ in range(100):
        made.write(b"x" * 65536)
    made.write(b"last\n")
    assert made.tail(5) == b"last\n"
    assert (disk / "stdout").stat().st_blocks * 512 < MIB


def test_on_a_full_disk_the_oldest_output_makes_way_for_the_newest(disk: Path) -> None:
    made = JobLog(opened(disk / "stdout"), 1 << 40)
    for _ in range(400):
        made.write(b"x" * 65536)
    made.write(b"last\n")
    assert made.tail(5) == b"last\n"


def test_shortening_follows_no_link_and_touches_nothing_but_a_log(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"x" * MIB)
    job = tmp_path / "job"
    job.mkdir()
    (job / "stdout").symlink_to(mine)
    os.mkfifo(job / "stderr")
    directory = os.open(job, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError, match="symbolic links"):
            shorten_log(directory, "stdout", 0)
        shorten_log(directory, "stderr", 0)
    finally:
        os.close(directory)
    assert mine.read_bytes() == b"x" * MIB


def test_the_reserve_is_given_back_in_need_and_laid_again_when_there_is_space(disk: Path) -> None:
    reserve = DiskReserve(disk / "gpulease.db")
    reserve.refill(leave=2 * MIB)
    assert reserve.missing == 0
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"\0" * 4096)
    reserve.release_if_needed()
    assert free(disk) >= MIB // 2
    assert reserve.missing == MIB
    reserve.refill(leave=2 * MIB)
    assert reserve.missing == MIB, "others need that space more"
    ballast.unlink()
    reserve.release_if_needed()
    reserve.refill(leave=2 * MIB)
    assert reserve.missing == 0
