"""Each job in a scope of its own, which may open the GPUs of its leases and no others."""

from collections.abc import Iterator

import pytest

from daemon_rig import wait_for

from .conftest import SERVICE, Gpulease
from .machine import Machine
from .root import ENVIRONMENT

_NVIDIA = 195
"""The major number of /dev/nvidia0 and its like: linux/Documentation/admin-guide/devices.txt."""
_ENCLOSED = """
import asyncio, os, subprocess, sys
from datetime import timedelta
from gpulease.host.scopes import Scope, create

job, *gpus = sys.argv[1:]
command = ["sh", "-c", "read go; exec sleep 600 > /dev/null 2>&1"]
waiting = subprocess.Popen(command, stdin=subprocess.PIPE)
asyncio.run(create(waiting.pid, Scope(int(job), "alice", timedelta(seconds=1), gpus)))
waiting.stdin.close()
print(waiting.pid)
"""


def scope(job: int) -> str:
    return f"gpulease-job-{job}.scope"


def test_all_of_a_job_is_in_its_scope_and_the_scope_goes_with_it(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    job = gpulease.submit("--mem", "1G", "--", "sh", "-c", "setsid sleep 601 & sleep 602")
    gpulease.wait_until(job, "active")
    shown = machine.unit(scope(job), "ActiveState", "OOMPolicy", "Slice", "Description")
    assert shown == {
        "ActiveState": "active",
        "OOMPolicy": "continue",  # what the kernel kills for lack of RAM ends nothing else
        "Slice": "gpulease.slice",
        "Description": f"gpulease job {job} of alice",
    }
    cgroup = f"/sys/fs/cgroup/gpulease.slice/{scope(job)}/cgroup.procs"
    pids = wait_for("all three are there", lambda: _at_least(3, machine.run("cat", cgroup).stdout))
    names = {machine.run("cat", f"/proc/{pid}/comm").stdout.strip() for pid in pids}
    assert names == {"gpulease-shim", "sh", "sleep"}
    gpulease.run("cancel", str(job))
    gpulease.wait_until(job, "ended")
    machine.wait_for_unit(scope(job), LoadState="not-found")


def _at_least(number: int, text: str) -> list[str]:
    return text.split() if len(text.split()) >= number else []


def test_a_service_that_is_stopped_leaves_nothing_of_its_own_and_all_of_the_jobs(
    gpulease: Gpulease,
) -> None:
    job = gpulease.submit("--mem", "1G", "--", "sleep", "600")
    pid = gpulease.wait_until(job, "active")["pid"]
    gpulease.machine.run("systemctl", "stop", SERVICE)
    assert gpulease.machine.unit(scope(job), "ActiveState") == {"ActiveState": "active"}
    own = f"/sys/fs/cgroup/system.slice/{SERVICE}/cgroup.procs"
    assert gpulease.machine.run("cat", own, check=False).stdout == ""
    gpulease.machine.run("systemctl", "start", SERVICE)
    assert gpulease.job(job)["pid"] == pid
    left_over = gpulease.machine.journal("-u", SERVICE, "--grep=left-over")
    assert left_over == []


def test_stopping_the_slice_ends_the_jobs_and_their_ends_are_known(gpulease: Gpulease) -> None:
    job = gpulease.submit("--mem", "1G", "--", "sleep", "600")
    gpulease.wait_until(job, "active")
    gpulease.machine.run("systemctl", "stop", "gpulease.slice")
    assert gpulease.wait_until(job, "ended")["exit_status"] == 143


def test_a_job_that_asked_for_an_hour_is_not_waited_for_at_a_shutdown(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    script = "trap '' TERM; echo up; while :; do sleep 1; done"
    job = gpulease.submit("--mem", "1G", "--grace", "1h", "--", "sh", "-c", script)
    wait_for("it ignores SIGTERM", lambda: gpulease.run("logs", str(job)) == "up\n")
    # The daemon's grace here is two seconds, and ten are for the shim.
    assert machine.unit(scope(job), "TimeoutStopUSec") == {"TimeoutStopUSec": "12s"}
    machine.run("systemctl", "stop", scope(job))
    assert gpulease.wait_until(job, "ended")["outcome"] == "lost"


def test_without_a_bus_jobs_run_all_the_same_and_the_log_says_so(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    machine.run("systemctl", "stop", "dbus.socket", "dbus.service")
    try:
        assert gpulease.run("run", "--mem", "1G", "--", "echo", "ran") == "ran\n"
    finally:
        machine.run("systemctl", "start", "dbus.socket")
    warned = machine.journal("-u", SERVICE, "--priority=warning", "--grep=cannot create a scope")
    assert warned


@pytest.fixture
def gpus(gpulease: Gpulease) -> Iterator[Machine]:
    """Yield the machine with the nodes of two GPUs, behind which there is no driver."""
    machine = gpulease.machine
    nodes = {"nvidia0": 0, "nvidia1": 1, "nvidiactl": 255}
    for name, minor in nodes.items():
        machine.run("mknod", "-m", "666", f"/dev/{name}", "c", str(_NVIDIA), str(minor))
    yield machine
    machine.run("rm", *(f"/dev/{name}" for name in nodes))


def test_only_the_leased_gpu_can_be_opened_also_after_a_reload_of_systemd(gpus: Machine) -> None:
    pid = gpus.run(f"{ENVIRONMENT}/bin/python", "-c", _ENCLOSED, "901", "/dev/nvidia1").stdout
    assert gpus.unit(scope(901), "ActiveState") == {"ActiveState": "active"}
    for _ in range(2):
        said = {name: _opened(gpus, name) for name in ("nvidia0", "nvidia1", "nvidiactl", "null")}
        # No driver is there to answer, but whether the kernel would ask it shows.
        assert said["nvidia0"] == "Operation not permitted"
        assert said["nvidia1"] == said["nvidiactl"] == "No such device or address"
        assert said["null"] == "opened"
        gpus.run("systemctl", "daemon-reload")
    gpus.run("kill", pid.strip())


def _opened(machine: Machine, name: str) -> str:
    """Return what happens to who opens a device from within the scope."""
    script = (
        f"echo $$ > /sys/fs/cgroup/gpulease.slice/{scope(901)}/cgroup.procs;"
        f"exec python3 -c 'import os; os.open(\"/dev/{name}\", os.O_RDWR)'"
    )
    done = machine.run("sh", "-c", script, check=False)
    if done.returncode == 0:
        return "opened"
    return done.stderr.splitlines()[-1].partition("] ")[2].partition(":")[0]


def test_jobs_run_once_though_the_daemon_is_killed_while_it_starts_them(
    gpulease: Gpulease,
) -> None:
    machine, many = gpulease.machine, 12
    machine.run("rm", "-f", "ran", user="alice")
    before = gpulease.pid()
    one = "gpulease run -d --mem 300M -- sh -c 'echo ran >> ran; sleep 1'"
    hurry = f"for n in $(seq {many}); do {one} & done; wait"
    submitting = machine.open("sh", "-c", hurry, user="alice")
    scopes = ("ls", "/run/systemd/transient")
    wait_for("some have started", lambda: machine.run(*scopes, check=False).stdout)
    machine.run("kill", "-KILL", str(before))
    said = submitting.communicate(timeout=120)[0]
    submitted = said.split()
    gpulease.wait_until_back(before)
    for job in submitted:
        assert gpulease.wait_until(int(job), "ended")["exit_status"] == 0
    ran = machine.run("cat", "ran", user="alice").stdout.splitlines()
    # A submission whose answer was lost with the daemon may have been taken all the same.
    assert len(submitted) <= len(ran) <= many
