"""What is read of the RAM of this machine, and of jobs that lease some, from real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import NOON, G
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Claim
from gpulease.host.host_memory import HostProbe

M = 1 << 20
FILLS = """
import os, sys
held = bytearray(os.urandom(1 << 20) * 64)
for _ in range(3):
    if os.fork() == 0:
        break
os.write(1, b"filled\\n")
sys.stdin.read()
"""


@pytest.fixture
def filler() -> Iterator[subprocess.Popen[str]]:
    """A process with 64 MiB, which its three children share."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FILLS], text=True, **pipes) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == "filled\n"
        yield process
        process.communicate()


def leasing(pid: int) -> Job:
    claim = Claim(G, ram=G)
    return replace(Job(JobId(1), Owner(0, 0, "root"), "job", "true", claim, NOON), shim_pid=pid)


def probe(**fields: object) -> HostProbe:
    return HostProbe(lambda job: job.shim_pid, lambda _: False, **fields)  # type: ignore[arg-type]


def test_what_processes_share_counts_once(filler: subprocess.Popen[str]) -> None:
    seen = probe().read([leasing(filler.pid)])
    assert 64 * M <= seen.used[JobId(1)] < 110 * M
    without = replace(leasing(filler.pid), claim=Claim(G))
    assert not probe().read([without]).used, "only jobs that lease RAM are read"


def test_the_ram_and_the_cores_are_those_of_the_machine() -> None:
    seen = probe().read([])
    assert seen.ram == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert seen.available is not None and 0 < seen.available < seen.ram
    assert seen.cores == len(os.sched_getaffinity(0))
    assert seen.used_by_others == seen.ram - seen.available


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    seen = probe(meminfo=str(tmp_path / "none")).read([leasing(1 << 22)])
    assert (seen.ram, seen.available, seen.used_by_others) == (None, None, None)
    lost = HostProbe(lambda _: None, lambda _: False).read([leasing(1)])
    assert not lost.used, "its use counts as that of others"
