"""Faults of GPUs, from NVML's events to who is told, on the daemon as it runs."""

import json

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions
from nvml_stand_in import Card, StandIn

from .conftest import OnCards

G = 1024**3


@pytest.fixture
def machine(on_cards: OnCards) -> tuple[Daemon, StandIn]:
    """Return a daemon on two GPUs, one larger, that takes a second for a quiet time."""
    daemon, stand_in = on_cards(Card(total=8 * G), Card(total=16 * G), health_quiet="1s")
    wait_for("events are listened to", lambda: registered(stand_in) >= 2)
    return daemon, stand_in


def registered(stand_in: StandIn) -> int:
    return sum(call.startswith("nvmlDeviceRegisterEvents") for call in stand_in.calls())


def state(daemon: Daemon, index: int) -> str:
    found: str = daemon.status()["gpus"][index]["state"]
    return found


def test_a_hardware_fault_drains_its_gpu_until_a_check_finds_it_well(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    # The error alone would be gone at the next check. The daemon reads the two in any order.
    stand_in.change(0, xids=[95], pages_pending=True)
    wait_for(
        "both are known",
        lambda: (
            {"xid 95", "faulty"} <= {each["kind"] for each in daemon.status()["gpus"][0]["events"]}
        ),
    )
    assert state(daemon, 0) == "drained"
    assert "gpulease" in daemon.status()["gpus"][0]["detail"]
    assert "XID 95" in daemon.run("status").stdout
    doctor = daemon.run("doctor", check=False).stdout
    assert "XID 95" in doctor
    job = daemon.submit("--mem", "1G", "--", "sleep", "600")
    there = daemon.wait_until(job, "active")["leases"][0]["gpu"]
    assert there == StandIn.uuid(1)
    daemon.kill()
    daemon.start()
    assert state(daemon, 0) == "drained", "over a restart"
    stand_in.change(0, pages_pending=False)
    wait_for("it is well again", lambda: state(daemon, 0) == "available")
    assert daemon.status()["gpus"][0]["events"][-1]["kind"] == "recovered"


def test_a_gpu_that_its_driver_wants_reset_is_drained_and_one_with_a_row_to_replace_is_not(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    stand_in.change(0, recovery=1)
    stand_in.change(1, remap_pending=True, xids=[63])
    wait_for("it is drained", lambda: state(daemon, 0) == "drained")
    kinds = {"xid 63", "remap_pending"}
    wait_for(
        "the row is on record",
        lambda: kinds <= {each["kind"] for each in daemon.status()["gpus"][1]["events"]},
    )
    assert state(daemon, 1) == "available"
    checks = json.loads(daemon.run("doctor", "--json", check=False).stdout)["checks"]
    found = {check["name"]: check for check in checks}
    assert mentions(found["GPU 0 health"]["message"], "reset")
    assert found["GPU 1 health"]["state"] == "warning"
    assert "systemctl stop gpuleased" in str(checks)
