"""Faults of GPUs, from NVML's events to who is told, on the daemon as it runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions
from nvml_stand_in import Card, StandIn

G = 1024**3


@pytest.fixture
def machine(make_daemon: Callable[..., Daemon], tmp_path: Path) -> tuple[Daemon, StandIn]:
    """Return a daemon on two GPUs, one larger, that takes a second for a quiet time."""
    stand_in = StandIn(tmp_path, gpus=[Card(total=8 * G), Card(total=16 * G)])
    made: Daemon = make_daemon(
        simulate=None,
        environment=stand_in.environment(),
        settings={"grace": "1s", "health_quiet": "1s"},
    )
    daemon = made.start()
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


def test_a_gpu_that_a_person_drained_stays_drained_when_its_health_is_good_again(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    daemon.run("drain", "1", "--why", "fan")
    stand_in.change(1, xids=[74])
    wait_for(
        "the fault came and went",
        lambda: [each["kind"] for each in daemon.status()["gpus"][1]["events"]][-1] == "recovered",
    )
    assert mentions(daemon.status()["gpus"][1]["detail"], "root", "fan")


def test_a_persons_word_counts_more_than_a_lasting_fault(machine: tuple[Daemon, StandIn]) -> None:
    daemon, stand_in = machine
    stand_in.change(0, remap_failed=True)
    wait_for("it is drained", lambda: state(daemon, 0) == "drained")
    assert "GPU 0 " in daemon.run("resume", "0").stdout
    daemon.kill()
    daemon.start()
    before = len([call for call in stand_in.calls() if "GetRemappedRows" in call])
    wait_for(
        "it was looked at again",
        lambda: len([call for call in stand_in.calls() if "GetRemappedRows" in call]) > before + 2,
    )
    assert state(daemon, 0) == "available"


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


def test_the_fault_of_a_program_drains_nothing_and_is_kept_and_shown(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    stand_in.change(0, xids=[31] * 40)
    wait_for(
        "it is on record",
        lambda: sum(each["count"] for each in daemon.status()["gpus"][0]["events"]) == 40,
    )
    assert state(daemon, 0) == "available"
    assert [each["kind"] for each in daemon.status()["gpus"][0]["events"]] == ["xid 31"]


def test_a_hardware_fault_behind_a_storm_of_a_programs_faults_drains_its_gpu(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    stand_in.change(0, xids=[13] * 10_000 + [79])

    def drained() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = daemon.status()["gpus"][0]["events"]
        return events if any(each["kind"] == "faulty" for each in events) else []

    events = wait_for("it was drained", drained)
    counts = {each["kind"]: each["count"] for each in events}
    assert (counts["xid 13"], counts["xid 79"]) == (10_000, 1)
    assert len(events) <= 4, "a storm is one entry"


def test_an_xid_that_nobody_can_judge_is_told_to_the_admin_and_drains_nothing(
    machine: tuple[Daemon, StandIn],
) -> None:
    daemon, stand_in = machine
    stand_in.change(0, xids=[121])
    stand_in.change(1, xids=[69])

    def kinds() -> list[str]:
        return [each["kind"] for gpu in daemon.status()["gpus"] for each in gpu["events"]]

    wait_for("both are on record", lambda: set(kinds()) == {"xid 121", "xid 69"})
    assert [gpu["state"] for gpu in daemon.status()["gpus"]] == ["available", "available"]
    checks = json.loads(daemon.run("doctor", "--json", check=False).stdout)["checks"]
    states = {check["name"]: check["state"] for check in checks}
    assert (states["GPU 0 health"], states["GPU 1 health"]) == ("warning", "ok")
