"""A job with --ram where no cgroup holds it: its shim adds up its processes, kills the largest."""

import sys
from collections.abc import Callable

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions

MIB = 1 << 20
HOG = f"""
import os, sys, time
kept = bytearray(os.urandom({MIB}) * int(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        break
print("filled", flush=True)
time.sleep(600)
"""
PARENT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]) and 3)"


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    made: Daemon = make_daemon(settings={"grace": "2s", "overuse_grace": "1s"})
    return made.start()


def hog(mib: int, children: int = 0) -> list[str]:
    return [sys.executable, "-c", HOG, str(mib), str(children)]


def test_a_job_above_its_ram_is_told_and_loses_its_largest_process(daemon: Daemon) -> None:
    job = daemon.submit("--mem", "2G", "--ram", "100M", "--", *hog(200))
    shown = daemon.wait_until(job, "ended")
    assert (shown["outcome"], shown["exit_status"]) == ("signaled", 137)
    assert mentions(shown["reason"], "all of its 100M of RAM", "gpulease killed")
    assert mentions(shown["hint"], "--ram")
    assert shown["ram_peak"] > 200 * MIB
    said = (daemon.state / f"jobs/{job}/stderr").read_text()
    assert mentions(said, "leases 100M", "killed in 1s")


def test_only_the_largest_process_is_killed(daemon: Daemon) -> None:
    command = [sys.executable, "-c", PARENT, "-c", HOG, "200", "0"]
    job = daemon.submit("--mem", "2G", "--ram", "100M", "--", *command)
    # The command lives to say how its child has ended.
    assert daemon.wait_until(job, "ended")["exit_status"] == 3


def test_what_processes_share_counts_once(daemon: Daemon) -> None:
    # Four times 60M as the kernel shows them one by one.
    job = daemon.submit("--mem", "2G", "--ram", "150M", "--", *hog(60, 3))
    log = daemon.state / f"jobs/{job}/stdout"
    wait_for("all have it", lambda: log.exists() and log.read_text().count("filled") == 4)
    wait_for("it was looked at", lambda: (daemon.job(job)["processes"] or 0) >= 4)
    assert (daemon.state / f"jobs/{job}/stderr").read_text() == ""
    shown = daemon.job(job)
    assert (shown["state"], shown["ram_held_by"]) == ("active", "watch")
