"""A job with --cpus runs on cores of its own, which a restarted daemon still knows."""

import os

import pytest

from daemon_rig import Daemon, wait_for
from gpulease.host.cores import cores_of

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two cores")


def test_a_job_sees_its_cores_alone_and_starts_as_many_threads(daemon: Daemon) -> None:
    line = ("--mem", "1G", "--cpus", "1", "--", "sh", "-c")
    assert daemon.run("run", *line, "nproc; echo $NUMEXPR_NUM_THREADS").stdout == "1\n1\n"
    own = os.environ | {"OMP_NUM_THREADS": "7"}
    assert daemon.run("run", *line, "echo $OMP_NUM_THREADS", env=own).stdout == "7\n"
    everything = daemon.run("run", "--mem", "1G", "--", "nproc").stdout
    assert int(everything) == len(os.sched_getaffinity(0))


def test_no_two_jobs_have_the_same_cores_though_the_daemon_is_killed(daemon: Daemon) -> None:
    line = ("--mem", "1G", "--cpus", "1", "--", "sleep", "600")
    first = daemon.submit(*line)
    pid = daemon.wait_until(first, "active")["pid"]
    daemon.kill()
    daemon.start()
    second = daemon.submit(*line)
    other = daemon.wait_until(second, "active")["pid"]
    held, taken = os.sched_getaffinity(pid), os.sched_getaffinity(other)
    assert len(held) == len(taken) == 1 and held.isdisjoint(taken)
    assert set(cores_of(daemon.state / f"jobs/{second}")) == taken

    daemon.cancel(first)
    daemon.wait_until(first, "ended")
    third = daemon.submit(*line)
    pid = wait_for("it runs", lambda: daemon.job(third)["pid"])
    assert os.sched_getaffinity(pid) == held
