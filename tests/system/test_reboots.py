"""Reboots under load: every job that waits runs once afterwards, within its device rules.

GPULEASE_TEST_REBOOTS says how many reboots; two, if it is not set.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import wait_for
from nvml_stand_in import Card, StandIn

from .conftest import DRIVER, MAJOR, NODES, SERVICE, SETUP, Gpulease
from .machine import Machine
from .root import ENVIRONMENT

REBOOTS = int(os.environ.get("GPULEASE_TEST_REBOOTS", "2"))
JOBS_PER_BOOT = 40
G = 1024**3
# /dev is made anew at each boot, and here no driver makes these nodes.
MAKE_NODES = "[Service]\n" + "".join(
    f"ExecStartPre=+-/bin/mknod -m 666 /dev/{name} c {MAJOR} {minor}\n"
    for name, minor in NODES.items()
)
# Each job notes that it ran, in which boot, and how many of the two GPUs the kernel refuses to it.
JOB = r"""
refused=0
for gpu in 0 1; do
  case "$(exec 2>&1; : < /dev/nvidia$gpu)" in
    *"Operation not permitted"*) refused=$((refused + 1));;
  esac
done
echo "$GPULEASE_JOB $(cat /proc/sys/kernel/random/boot_id) $refused" >> ran
sleep 0.$1
echo "$GPULEASE_JOB done" >> ran
"""
SUBMIT = """
import sys
from gpulease.client import Client
from gpulease.wire.requests import ClaimRequest, SubmitRequest

client = Client()
for number in range(int(sys.argv[1])):
    argv = ["sh", "job", str(number % 10)]
    request = SubmitRequest(
        argv=argv, cwd="/home/alice", environment={"PATH": "/usr/bin:/bin"},
        umask=0o022, claim=ClaimRequest(memory=2 * 1024**3),
    )
    print(client.submit(request).id)
"""


SLOW = """\
[Unit]
After=gpuleased.service
[Service]
ExecStart=sleep infinity
ExecStop=sh -c 'until test -e /run/go; do sleep .1; done'
"""


@pytest.fixture
def rebooted(disk: Sequence[Path], tmp_path: Path) -> Iterator[Gpulease]:
    """Yield gpulease on a machine with two GPUs, whose journal outlasts a reboot."""
    machine = Machine(tmp_path / "machine", disk)
    gpulease = Gpulease(machine)
    try:
        machine.boot()
        made = StandIn(
            machine.root / DRIVER.lstrip("/"),
            [Card(minor=0, total=8 * G), Card(minor=1, total=8 * G)],
            driver="580.10",
            seen_as=Path(DRIVER),
        )
        variables = "".join(f"Environment={name}={it}\n" for name, it in made.environment().items())
        gpulease.configure('grace = "2s"\nmargin = "0"\n')
        gpulease.drop_in(f"{MAKE_NODES}{variables}ReadWritePaths={DRIVER}\n")
        machine.run(SETUP, "install", "--now")
        (machine.root / "home/alice/job").write_text(JOB)
        (machine.root / "home/alice/submit").write_text(SUBMIT)
        yield gpulease
    finally:
        machine.remove()


@pytest.mark.timeout(240 + 90 * REBOOTS)
def test_a_reboot_loses_no_job_that_waits_and_runs_none_twice_or_without_device_rules(
    rebooted: Gpulease, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, submitted = rebooted.machine, list[int]()
    shutdowns: list[tuple[datetime, datetime]] = []
    submit = (f"{ENVIRONMENT}/bin/python", "submit", str(JOBS_PER_BOOT))
    for number in range(REBOOTS):
        submitted += map(int, machine.run(*submit, user="alice").stdout.split())
        first = submitted[-JOBS_PER_BOOT + 3]
        rebooted.wait_until(first, "ended")
        shutdowns.append(_reboot(machine, by_command=bool(number % 2)))
        rebooted.wait_until_back(0)
    wait_for("all have ended", lambda: not _live(rebooted), 300)

    jobs = [rebooted.job(job) for job in submitted]
    ran = [line.split() for line in (machine.root / "home/alice/ran").read_text().splitlines()]
    starts = Counter(int(words[0]) for words in ran if len(words) == 3)
    unruled = [int(words[0]) for words in ran if len(words) == 3 and words[2] != "1"]
    figures = {
        "reboots": REBOOTS,
        "jobs": len(jobs),
        "outcomes": Counter(job["outcome"] for job in jobs),
        "back in the queue after a reboot": len([job for job in jobs if _went_back(job)]),
        "granted within a shutdown and ended by it": [
            job["id"] for job in jobs if job["outcome"] != "exited" and _late(job, shutdowns)
        ],
        # SIGTERM may come before the first line of a job that was started just before.
        "ended without having begun": [
            job["id"] for job in jobs if job["outcome"] == "exited" and not starts[job["id"]]
        ],
        "begun twice": [job for job, count in starts.items() if count > 1],
        "begun with both GPUs open": unruled,
        "no device rules on record": [
            job["id"] for job in jobs if "devices" not in job["leases"][0]["enforced_by"]
        ],
        "scopes that were not had": [
            entry["MESSAGE"]
            for entry in machine.journal("-u", SERVICE, "--grep=cannot create a scope")
        ],
    }
    with capsys.disabled():
        print(f"\n{json.dumps(figures)}")  # noqa: T201
    outcomes = figures.pop("outcomes")
    assert set(outcomes) <= {"exited", "signaled"}, "a job that runs is ended by the shutdown"
    assert outcomes["exited"] > 0
    for promise, broken_by in list(figures.items())[3:]:
        assert broken_by == [], promise


def test_a_job_that_comes_during_a_shutdown_runs_after_it(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    # systemd stops it before it stops the daemon.
    slow = machine.root / "etc/systemd/system/slow.service"
    slow.write_text(SLOW)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "slow.service")
    submit = ("--mem", "6G", "--gpus", "2", "--", "sh", "-c", "echo $GPULEASE_JOB >> during")
    machine.run("systemctl", "--no-block", "start", "poweroff.target")
    running = ("systemctl", "is-system-running")
    wait_for("it stops", lambda: "stopping" in machine.run(*running, check=False).stdout)
    granted, queued = gpulease.submit(*submit), gpulease.submit(*submit)
    wait_for("its launch was tried", lambda: gpulease.machine.journal("--grep=shutting down"))
    assert gpulease.job(granted)["state"] == "granted"
    assert gpulease.job(queued)["state"] == "queued"
    slow.unlink()
    machine.run("touch", "/run/go")
    machine.power_off()
    assert not (machine.root / "home/alice/during").exists()

    machine.boot()
    gpulease.wait_until_back(0)
    for job in (granted, queued):
        assert gpulease.wait_until(job, "ended")["exit_status"] == 0
    ran = (machine.root / "home/alice/during").read_text()
    assert ran == f"{granted}\n{queued}\n"
    kinds = [each["kind"] for each in gpulease.job(granted)["events"]]
    assert kinds.count("grant") == 2
    assert kinds.count("launch_deferred") == 1


def test_no_job_is_started_once_a_shutdown_is_announced(gpulease: Gpulease) -> None:
    machine = gpulease.machine
    # logind announces the shutdown and then waits for this inhibitor, for five seconds.
    delay = ("systemd-inhibit", "--what=shutdown", "--mode=delay", "sleep", "600")
    with machine.open(*delay):
        listed = ("systemd-inhibit", "--list", "--no-legend")
        wait_for("the delay counts", lambda: "sleep" in machine.run(*listed).stdout)
        machine.run("systemctl", "poweroff", "--check-inhibitors=no", check=False)
        try:
            job = gpulease.submit("--mem", "1G", "--", "sh", "-c", "echo ran >> announced")
            gpulease.wait_until(job, "granted")
            said = "cannot start now: .* shutting down"
            wait_for("its launch was tried", lambda: machine.journal(f"--grep={said}"))
        except AssertionError:
            if machine.is_up():
                raise
            machine.boot()
            pytest.skip("this machine took more than five seconds for a submission")
        # Without it the shutdown would wait for the inhibitor itself, for a minute and a half.
        machine.run("pkill", "sleep", check=False)
        machine.power_off()
    machine.boot()
    gpulease.wait_until_back(0)
    assert gpulease.wait_until(job, "ended")["exit_status"] == 0
    assert (machine.root / "home/alice/announced").read_text() == "ran\n"


def _reboot(machine: Machine, *, by_command: bool) -> tuple[datetime, datetime]:
    """Reboot, and return from when to when the machine was stopping units."""
    asked_at = datetime.now(UTC)
    if by_command:
        machine.run("systemctl", "reboot", check=False)
    # The first of the two counts: systemd does not exchange one shutdown for another.
    machine.power_off()
    off_at = datetime.now(UTC)
    machine.boot()
    stops = machine.journal(
        f"--since=@{asked_at.timestamp()}", f"--until=@{off_at.timestamp()}",
        "_PID=1", "JOB_TYPE=stop",
    )  # fmt: skip
    began = datetime.fromtimestamp(int(stops[0]["__REALTIME_TIMESTAMP"]) / 1e6, UTC)
    return began, off_at


def _late(job: dict[str, Any], shutdowns: Sequence[tuple[datetime, datetime]]) -> bool:
    """Tell whether the last grant of a job was made within a shutdown."""
    grants = [each["at"] for each in job["events"] if each["kind"] == "grant"]
    granted_at = datetime.fromisoformat(grants[-1])
    return any(began <= granted_at <= off_at for began, off_at in shutdowns)


def _went_back(job: dict[str, Any]) -> bool:
    return any(each["kind"] == "launch_deferred" for each in job["events"])


def _live(gpulease: Gpulease) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gpulease.run("list", "--json", user="root"))["jobs"]
    return found
