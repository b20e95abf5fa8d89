"""Jobs held from outside: the driver's limit, device rules and the scope, on a booted systemd."""

import json

from daemon_rig import wait_for
from nvml_stand_in import StandIn

from .conftest import MAJOR, NODES, SERVICE, Gpulease
from .machine import Machine

M, G = 1024**2, 1024**3
_OPEN = "import os; os.open('/dev/nvidia1', os.O_RDWR)"
CGROUPS = "/sys/fs/cgroup/gpulease.slice"


def held_by(gpulease: Gpulease, job: int) -> dict[str, object]:
    """Return the one lease of a job without its use, which no driver tells in this container."""
    (lease,) = gpulease.job(job)["leases"]
    return {name: value for name, value in lease.items() if name != "used"}


def test_a_job_is_held_by_the_driver_and_to_its_own_gpu_also_after_a_restart(
    gpulease: Gpulease, stand_in: StandIn
) -> None:
    checks = json.loads(gpulease.run("doctor", "--json", check=False))["checks"]
    said = {check["message"].partition(":")[0] for check in checks}
    assert {"enforced by driver", "enforced by framework", "enforced by devices"} <= said
    script = f'python3 -c "{_OPEN}" 2>&1 | tail -n 1; sleep 600'
    job = gpulease.submit("--mem", "3000M", "--", "sh", "-c", script)
    gpulease.wait_until(job, "active")

    lease = held_by(gpulease, job)
    assert lease["gpu"] == StandIn.uuid(0)
    # No framework runs in it.
    assert lease["enforced_by"] == ["driver", "watch", "devices"]
    assert lease["driver_limit"] == 2816 * M
    scope = f"{CGROUPS}/gpulease-job-{job}.scope"
    assert stand_in.limits() == {(lease["gpu"], scope): (0, 2816 * M)}
    refused = wait_for("it has tried", lambda: gpulease.run("logs", str(job)))
    assert "Operation not permitted" in refused

    before = gpulease.pid()
    gpulease.machine.run("kill", "-KILL", str(before))
    gpulease.wait_until_back(before)
    assert held_by(gpulease, job) == lease

    # As if the driver had dropped it meanwhile.
    gpulease.machine.run("systemctl", "stop", SERVICE)
    stand_in.forget_limits()
    gpulease.machine.run("systemctl", "start", SERVICE)
    assert stand_in.limits() == {(lease["gpu"], scope): (0, 2816 * M)}
    assert held_by(gpulease, job) == lease
    assert "GPU" in gpulease.job(job)["events"][-1]["detail"]


def test_where_the_driver_does_not_keep_its_limit_the_other_rungs_stay_and_the_job_says_so(
    gpulease: Gpulease, stand_in: StandIn
) -> None:
    stand_in.change(0, step=0)
    job = gpulease.submit("--mem", "3000M", "--", "sleep", "600")
    shown = gpulease.wait_until(job, "active")
    (lease,) = shown["leases"]
    assert lease["enforced_by"] == ["watch", "devices"]
    assert lease["driver_limit"] is None
    (event,) = [event for event in shown["events"] if event["kind"] == "enclosed"]
    assert "driver" in event["detail"]
    # Of this job: what the one before had may have gone with its cgroup, which nobody tells here.
    scope = f"{CGROUPS}/gpulease-job-{job}.scope"
    assert scope not in {path for _, path in stand_in.limits()}


def test_a_process_that_dropped_all_that_marked_it_is_its_jobs_and_goes_with_it(
    gpulease: Gpulease, stand_in: StandIn
) -> None:
    machine = gpulease.machine
    script = "env -i setsid sleep 611 & sleep 600"
    job = gpulease.submit("--mem", "3G", "--", "sh", "-c", script)
    gpulease.wait_until(job, "active")
    fled = wait_for("it is there", lambda: _pid(machine, "sleep 611"))
    stand_in.change(0, used=G, processes=[(fled, G)])
    wait_for("its memory is its job's", lambda: gpulease.job(job)["leases"][0]["used"] == G)

    machine.run("kill", "-KILL", str(_pid(machine, f"gpulease-shim: job {job}")))

    ended = gpulease.wait_until(job, "ended")
    assert ended["outcome"] == "lost"
    assert _pid(machine, "sleep 611") is None


def _pid(machine: Machine, command: str) -> int | None:
    found = machine.run("pgrep", "-x", "-f", command, check=False).stdout.split()
    return int(found[0]) if found else None


def test_with_numbers_a_job_counts_the_gpus_that_it_can_open(
    gpulease: Gpulease, stand_in: StandIn
) -> None:
    first = gpulease.submit("--mem", "1G", "--exclusive", "--", "sleep", "600")
    gpulease.wait_until(first, "active")
    show = "echo $CUDA_VISIBLE_DEVICES"
    job = gpulease.submit("--mem", "1G", "--visible", "index", "--", "sh", "-c", show)
    (lease,) = gpulease.wait_until(job, "ended")["leases"]
    assert lease["gpu"] == StandIn.uuid(1)
    assert "devices" in lease["enforced_by"]
    assert gpulease.run("logs", str(job)) == "0\n"


def test_without_the_node_of_cuda_jobs_wait_and_none_can_open_every_gpu(
    gpulease: Gpulease, stand_in: StandIn
) -> None:
    machine = gpulease.machine
    # As after a boot, before anything has used CUDA.
    machine.run("rm", "/dev/nvidia-uvm")
    try_both = "for n in 0 1; do (: < /dev/nvidia$n) 2>&1 | grep -c 'not permitted'; done"
    job = gpulease.submit("--mem", "3G", "--", "sh", "-c", try_both)
    wait_for("it waits", lambda: "nvidia-uvm" in gpulease.run("show", str(job)))
    assert gpulease.job(job)["state"] == "queued"
    assert "nvidia-modprobe" in gpulease.run("doctor", check=False)

    (nvidia_modprobe := machine.root / "usr/bin/nvidia-modprobe").write_text(
        f"#!/bin/sh\nmknod -m 666 /dev/nvidia-uvm c {MAJOR} {NODES['nvidia-uvm']}\n"
    )
    nvidia_modprobe.chmod(0o755)
    try:
        # It is tried at once after a start, and otherwise once a minute.
        machine.run("systemctl", "restart", SERVICE)
        (lease,) = gpulease.wait_until(job, "ended")["leases"]
    finally:
        nvidia_modprobe.unlink()
    assert "devices" in lease["enforced_by"]
    assert gpulease.run("logs", str(job)) == "0\n1\n", "the other GPU alone is refused"
