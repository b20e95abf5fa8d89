"""The cores of jobs on this machine: noted on disk, and read from sysfs."""

import os
from pathlib import Path

from gpulease.host.cores import cores_of, local_cpus, take_cores


def test_the_cores_of_a_job_are_known_to_the_next_daemon(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    for each in (first, second):
        each.mkdir()
    taken = take_cores(1, first, [first, second], [])
    assert cores_of(first) == taken and set(taken) <= os.sched_getaffinity(0)
    if len(os.sched_getaffinity(0)) > 1:
        assert set(take_cores(1, second, [first, second], [])).isdisjoint(taken)
    # A launch that is tried again does not count its own earlier choice against itself.
    assert take_cores(1, first, [first], []) == taken
    assert cores_of(tmp_path / "3") == ()


def test_the_cores_near_a_gpu_are_those_of_its_pci_address(tmp_path: Path) -> None:
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "local_cpulist").write_text("0-3,16-17\n")
    assert local_cpus("00000000:3B:00.0", tmp_path) == (0, 1, 2, 3, 16, 17)
    assert local_cpus("00000000:5E:00.0", tmp_path) == ()
