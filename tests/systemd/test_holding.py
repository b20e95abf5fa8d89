"""Jobs held from outside: the driver's limit, device rules and the scope, on a booted systemd."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvml_stand_in import Card, StandIn

from .conftest import CONFIG, SERVICE, WATCHDOG, Gpulease
from .machine import Machine, wait_for

M, G = 1024**2, 1024**3
DRIVER = "/opt/stand-in"
_NVIDIA = 195
_NODES = {"nvidia0": 0, "nvidia1": 1, "nvidiactl": 255, "nvidia-uvm": 250}
_OPEN = "import os; os.open('/dev/nvidia1', os.O_RDWR)"
CGROUPS = "/sys/fs/cgroup/gpulease.slice"


@pytest.fixture
def stand_in(gpulease: Gpulease) -> Iterator[StandIn]:
    """Yield the driver r615 of a machine with two GPUs, on which the daemon runs."""
    machine = gpulease.machine
    cards = [Card(minor=0), Card(minor=1)]
    made = StandIn(machine.root / DRIVER.lstrip("/"), cards, driver="615.10", seen_as=Path(DRIVER))
    for name, minor in _NODES.items():
        machine.run("mknod", "-m", "666", f"/dev/{name}", "c", str(_NVIDIA), str(minor))
    variables = "".join(f"Environment={name}={it}\n" for name, it in made.environment().items())
    gpulease.configure('grace = "2s"\n')
    gpulease.drop_in(f"{WATCHDOG}{variables}ReadWritePaths={DRIVER}\n")
    machine.run("systemctl", "restart", SERVICE)
    yield made
    gpulease.end_all()
    gpulease.configure(CONFIG)
    gpulease.drop_in(WATCHDOG)
    machine.run("systemctl", "restart", SERVICE)
    machine.run("rm", *(f"/dev/{name}" for name in _NODES))


def test_a_job_is_held_by_the_driver_and_to_its_own_gpu_also_after_a_restart(
    gpulease: Gpulease, stand_in: StandIn
) -> None:
    checks = json.loads(gpulease.run("doctor", "--json", check=False))["checks"]
    said = {check["message"].partition(":")[0] for check in checks}
    assert {"held by driver", "held by framework", "held by devices"} <= said
    script = f'python3 -c "{_OPEN}" 2>&1 | tail -n 1; sleep 600'
    job = gpulease.submit("--mem", "3000M", "--", "sh", "-c", script)
    gpulease.wait_until(job, "active")

    (lease,) = gpulease.job(job)["leases"]
    assert lease["gpu"] == StandIn.uuid(0)
    assert lease["enforced_by"] == ["driver", "framework", "watch", "devices"]
    assert lease["driver_limit"] == 2816 * M
    scope = f"{CGROUPS}/gpulease-job-{job}.scope"
    assert stand_in.limits() == {(lease["gpu"], scope): (0, 2816 * M)}
    refused = wait_for("it has tried", lambda: gpulease.run("logs", str(job)))
    assert "Operation not permitted" in refused

    before = gpulease.pid()
    gpulease.machine.run("kill", "-KILL", str(before))
    gpulease.wait_until_back(before)
    assert gpulease.job(job)["leases"] == [lease]

    # As if the driver had dropped it meanwhile.
    gpulease.machine.run("systemctl", "stop", SERVICE)
    stand_in.forget_limits()
    gpulease.machine.run("systemctl", "start", SERVICE)
    assert stand_in.limits() == {(lease["gpu"], scope): (0, 2816 * M)}
    assert gpulease.job(job)["leases"] == [lease]
    assert "set again" in gpulease.job(job)["events"][-1]["detail"]


def test_where_the_driver_does_not_keep_its_limit_the_other_rungs_stay_and_the_job_says_so(
    gpulease: Gpulease, stand_in: StandIn
) -> None:
    stand_in.change(0, step=0)
    job = gpulease.submit("--mem", "3000M", "--", "sleep", "600")
    shown = gpulease.wait_until(job, "active")
    (lease,) = shown["leases"]
    assert lease["enforced_by"] == ["framework", "watch", "devices"]
    assert lease["driver_limit"] is None
    (event,) = [event for event in shown["events"] if event["kind"] == "enclosed"]
    assert "the driver took the limit and does not keep it" in event["detail"]
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
