"""What a shim reads at the end of its job of what the kernel has counted for it."""

from pathlib import Path

import pytest

from gpulease.shim.accounting import HostUse, host_use

MIB, GIB = 1 << 20, 1 << 30
"""Peaks are in GiB: no child that the tests have had was so large, which would be a lower bound."""
SCOPE = "gpulease.slice/gpulease-job-7.scope"
OWN_LIMIT = "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n"
OTHERS = "low 0\nhigh 0\nmax 0\noom 0\noom_kill 1\noom_group_kill 0\n"


class Kernel:
    """The files of one process and of its cgroups."""

    def __init__(self, folder: Path, line: str) -> None:
        self.own = folder / "cgroup"
        self.own.write_text(f"1:name=systemd:/\n{line}\n")
        self.root = folder / "fs"

    def write(self, directory: str, **files: object) -> None:
        place = self.root / directory
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (place / name.replace("__", ".")).write_text(f"{content}\n")

    def use(self, job: int = 7) -> HostUse:
        return host_use(job, str(self.own), str(self.root))


@pytest.fixture
def version_2(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path, f"0::/{SCOPE}")
    kernel.write(
        SCOPE, memory__peak=900 * GIB, memory__max="max", memory__events=OTHERS,
        memory__stat=f"anon 0\nfile {600 * GIB}\nshmem {100 * GIB}", cpu__stat="usage_usec 2500000",
    )  # fmt: skip
    return kernel


def test_files_that_the_kernel_keeps_are_not_what_a_job_used(version_2: Kernel) -> None:
    # 900 of which 500 are of files; what is left in /dev/shm is the job's.
    used = version_2.use()
    assert (used.ram_peak, used.cpu_s) == (400 * GIB, 2.5)


def test_without_a_limit_of_its_own_it_was_the_machine_that_ran_out(version_2: Kernel) -> None:
    assert (version_2.use().oom_kills, version_2.use().ram_limit) == (1, None)
    version_2.write(SCOPE, memory__max=192 * MIB)
    assert version_2.use().ram_limit is None  # it has one, and has not met it


def test_a_job_that_was_killed_at_its_limit_says_which(version_2: Kernel) -> None:
    version_2.write(SCOPE, memory__max=192 * MIB, memory__events=OWN_LIMIT)
    assert (version_2.use().oom_kills, version_2.use().ram_limit) == (3, 192 * MIB)


def test_the_scope_of_another_job_says_nothing(version_2: Kernel) -> None:
    # A job of a personal daemon that itself runs in a job.
    assert (version_2.use(8).ram_peak, version_2.use(8).oom_kills) == (None, 0)


def test_an_older_kernel_knows_no_peak_and_none_is_not_zero(version_2: Kernel) -> None:
    (version_2.root / SCOPE / "memory.peak").unlink()  # it came with Linux 5.19
    used = version_2.use()
    assert (used.ram_peak, used.oom_kills, used.cpu_s) == (None, 1, 2.5)


def test_version_1_has_the_same(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, f"4:memory:/{SCOPE}\n0::/{SCOPE}")
    kernel.write(
        f"memory/{SCOPE}", memory__max_usage_in_bytes=900 * GIB, memory__failcnt=5,
        memory__limit_in_bytes=9223372036854771712, memory__oom_control="oom_kill 1",
        memory__stat=f"cache 0\ntotal_cache {600 * GIB}\ntotal_shmem {100 * GIB}",
    )  # fmt: skip
    used = kernel.use()
    assert (used.ram_peak, used.oom_kills, used.ram_limit) == (400 * GIB, 1, None)
    kernel.write(f"memory/{SCOPE}", memory__limit_in_bytes=900 * GIB)
    assert kernel.use().ram_limit == 900 * GIB
