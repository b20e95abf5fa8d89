"""The unit files by themselves, and what installing and removing them leaves behind."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from daemon_rig import wait_for
from goldens import mentions

from .conftest import CONFIG, SERVICE, SETUP, WEB, Gpulease
from .machine import Machine
from .root import ENVIRONMENT, USERS

UNITS = "/usr/local/lib/systemd/system"
MOST_EXPOSED = {SERVICE: 77, WEB: 11}
"""In tenths, as systemd-analyze wants it: where the unit files stand now."""


def test_the_units_are_sound(installed: Gpulease) -> None:
    units = [f"{UNITS}/{unit}" for unit in (SERVICE, WEB, "gpulease.slice")]
    done = installed.machine.run("systemd-analyze", "verify", "--man=no", *units)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("unit", MOST_EXPOSED)
def test_a_service_is_not_more_exposed_than_it_was(
    installed: Gpulease, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = f"--threshold={MOST_EXPOSED[unit]}"
    done = installed.machine.run(*_security(limit, unit=unit), check=False)
    with capsys.disabled():
        print(f"\n{done.stdout.splitlines()[-1]}")  # noqa: T201
    assert done.returncode == 0, done.stdout


def test_every_exposure_that_is_left_has_its_reason_in_the_unit_file(installed: Gpulease) -> None:
    rows = json.loads(installed.machine.run(*_security("--json=short")).stdout)
    unit = installed.machine.run("cat", f"{UNITS}/{SERVICE}").stdout
    reasons = "\n".join(line for line in unit.splitlines() if line.startswith("#"))
    left = [row["name"] for row in rows if row["exposure"] and not row["set"]]
    assert len(left) > 10
    assert [name for name in left if not any(it in reasons for it in _words(name))] == []


def _security(*options: str, unit: str = SERVICE) -> tuple[str, ...]:
    return "systemd-analyze", "security", "--offline=1", *options, f"{UNITS}/{unit}"


def _words(exposure: str) -> list[str]:
    """Return what names an exposure: a capability, a group of system calls, or a setting."""
    setting, _, value = exposure.partition("=")
    if value.startswith("~@"):
        return [value[1:]]
    if setting == "CapabilityBoundingSet":
        return [f"CAP_{it}".rstrip("*") for it in re.sub(r"~CAP_|[()]", "", value).split("|")]
    return [f"{it}=" for it in re.findall(r"[A-Z]\w+(?==)", exposure)]


def test_each_program_is_on_the_path_and_says_which_build_it_is(installed: Gpulease) -> None:
    stamp = r"0\.\d+\.\d+ \((commit [0-9a-f]{10}( with changes)?, )?built 20\d\d-[-0-9: UTC]+"
    for program in ("gpulease", "gpuleased", "gpulease-setup", "gpulease-web"):
        said = installed.machine.run(program, "--version").stdout
        assert re.match(f"{program} {stamp}", said), said


def test_installing_again_changes_nothing(installed: Gpulease) -> None:
    before = installed.pid()
    said = installed.machine.run(SETUP, "install").stdout
    assert said.count("unchanged /") == 9
    assert installed.pid() == before


@pytest.fixture
def other_machine(disk: Sequence[Path], tmp_path: Path) -> Iterator[Machine]:
    """Yield a machine where nothing but pip has been yet."""
    machine = Machine(tmp_path, disk)
    try:
        machine.boot()
        yield machine
    finally:
        machine.remove()


def test_what_was_installed_can_be_removed_without_a_trace(other_machine: Machine) -> None:
    before = other_machine.files()
    groups = other_machine.run("getent", "group").stdout
    gpulease = Gpulease(other_machine)
    gpulease.configure(CONFIG)
    gpulease.drop_in("[Service]\nWatchdogSec=50s\n")
    said = other_machine.run(SETUP, "install", "--web", "--now").stdout
    assert said.count("installed /") == 9
    assert other_machine.unit(WEB, "ActiveState") == {"ActiveState": "active"}
    assert "gpulease" in other_machine.run("getent", "group", "gpulease").stdout
    job = gpulease.submit("--mem", "1G", "--", "sleep", "600")
    gpulease.wait_until(job, "active")

    refused = other_machine.run(SETUP, "remove", check=False)
    assert "job 1 " in refused.stderr
    gpulease.end_all()

    other_machine.run(SETUP, "remove")
    left = {path for path in other_machine.files() - before if path.count("/") < 4}
    assert left == {"/etc/gpulease", "/etc/gpulease/config.toml", "/var/lib/gpulease"}
    assert _has_a_daemon_of_their_own(other_machine)
    other_machine.run(SETUP, "install", "--now")
    assert gpulease.job(job)["state"] == "ended", "the record was kept"

    # There is no terminal to ask on.
    refused = other_machine.run(SETUP, "remove", "--purge", check=False)
    assert mentions(refused.stderr, "0 queued", "0 holds", "0 running", "1 ended")
    assert "hint: " in refused.stderr
    assert gpulease.job(job)["state"] == "ended", "nothing was changed"
    other_machine.run(SETUP, "remove", "--purge", "--yes")
    assert other_machine.files() == before
    assert other_machine.run("getent", "group").stdout == groups
    for unit in (SERVICE, WEB):
        assert other_machine.unit(unit, "LoadState") == {"LoadState": "not-found"}
    assert other_machine.run("pgrep", "--full", "^/opt/gpulease", check=False).stdout == ""


def _has_a_daemon_of_their_own(machine: Machine) -> bool:
    """Tell whether bob gets one that is started for him; all of it is gone afterwards."""
    command = (f"{ENVIRONMENT}/bin/gpulease", "run", "--mem", "1G", "--", "echo", "ran")
    done = machine.run(*command, user="bob", environment={"GPULEASE_SIMULATE": "1x2G"})
    machine.run("pkill", "--uid", "bob")
    wait_for("it has left", lambda: not machine.run("pgrep", "-u", "bob", check=False).stdout)
    machine.run("rm", "-r", f"/tmp/gpulease-{USERS['bob']}", "/home/bob/.local")
    return done.stdout == "ran\n" and done.stderr.startswith("gpulease: ")


def test_nothing_is_installed_that_a_user_could_change_under_root(installed: Gpulease) -> None:
    run = installed.machine.run
    run("chown", "alice", "/opt/gpulease")
    try:
        refused = run(SETUP, "install", check=False)
    finally:
        run("chown", "root", "/opt/gpulease")
    assert refused.returncode == 125
    assert mentions(refused.stderr, "/opt/gpulease", "2001")
    refused = run(SETUP, "install", user="alice", check=False)
    assert "root" in refused.stderr
