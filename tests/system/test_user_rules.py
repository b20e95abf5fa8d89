"""Ways around a job's device rules: the user's systemd, a login, cron; and how to close them."""

from collections.abc import Iterator

import pytest

from nvml_stand_in import StandIn

from .conftest import SETUP, Gpulease
from .machine import Machine
from .root import USERS

ALICE = USERS["alice"]
# No driver is there to answer, but whether the kernel would ask it shows.
OPEN, REFUSED = "No such device or address", "Operation not permitted"
TRY = "(: < /dev/nvidia%d) 2>&1 | sed 's/.*: //'"
CRON = f"""\
[Service]
Type=oneshot
ExecStart=sh -c "{TRY % 1} > /run/cron"
"""


@pytest.fixture
def machine(gpulease: Gpulease, stand_in: StandIn) -> Iterator[Machine]:
    """Yield the machine with two GPUs, on which alice has a systemd instance of her own."""
    machine = gpulease.machine
    (machine.root / "etc/systemd/system/cron.service").write_text(CRON)
    _begin_session(machine)
    yield machine
    machine.run(SETUP, "install", "--no-restrict-users")
    (machine.root / "etc/systemd/system/cron.service").unlink()
    _end_sessions(machine)


def _begin_session(machine: Machine) -> None:
    machine.run("loginctl", "enable-linger", "alice")
    machine.wait_for_unit(f"user@{ALICE}.service", ActiveState="active")


def _end_sessions(machine: Machine) -> None:
    machine.run("loginctl", "disable-linger", "alice")
    machine.run("loginctl", "terminate-user", "alice", check=False)
    machine.wait_for_unit(f"user-{ALICE}.slice", ActiveState="inactive")


def _said(machine: Machine) -> dict[str, str]:
    """Return what each way to open the second GPU says, which the job did not lease."""
    own, other = TRY % 0, TRY % 1
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{ALICE}"}
    run = ("gpulease", "run", "--mem", "1G", "--", "sh", "-c")

    def in_job(script: str) -> str:
        return machine.run(*run, script, user="alice", environment=environment).stdout.strip()

    def logged_in(user: str) -> str:
        session = ("systemd-run", "--pipe", "--quiet", "-p", "PAMName=login", "-p", f"User={user}")
        return machine.run(*session, "sh", "-c", other).stdout.strip()

    machine.run("systemctl", "start", "cron.service")
    return {
        "its own GPU": in_job(own),
        "the other GPU": in_job(other),
        "by systemd-run --user": in_job(f'systemd-run --user --pipe --quiet sh -c "{other}"'),
        "in a login session": logged_in("alice"),
        "by cron": machine.run("cat", "/run/cron").stdout.strip(),
        "in a login session of root": logged_in("root"),
    }


def test_a_job_can_open_other_gpus_by_way_of_its_users_systemd_until_users_are_restricted(
    machine: Machine,
) -> None:
    held = {"its own GPU": OPEN, "the other GPU": REFUSED}
    ways = ("by systemd-run --user", "in a login session", "by cron")
    root = {"in a login session of root": OPEN}
    assert _said(machine) == {**held, **dict.fromkeys(ways, OPEN), **root}

    said = machine.run(SETUP, "install", "--restrict-users").stdout
    assert "root" in said
    restricted = {**held, **dict.fromkeys(ways, REFUSED), **root}
    assert _said(machine) == restricted, "also in sessions that began before"
    # An upgrade keeps it.
    machine.run(SETUP, "install")
    _end_sessions(machine)
    _begin_session(machine)
    assert _said(machine) == restricted

    machine.run(SETUP, "install", "--no-restrict-users")
    _end_sessions(machine)
    _begin_session(machine)
    assert _said(machine) == {**held, **dict.fromkeys(ways, OPEN), **root}


def test_restricted_users_have_their_other_devices_and_one_of_them_can_be_excepted(
    machine: Machine,
) -> None:
    machine.run(SETUP, "install", "--restrict-users")
    use = "head -c 1 /dev/random > /dev/null; script --quiet --command true /dev/null"
    session = ("systemd-run", "--pipe", "--quiet", "-p", "PAMName=login", "-p", "User=alice")
    machine.run(*session, "sh", "-c", f"set -e; {use}")

    folder = machine.root / f"etc/systemd/system/user-{ALICE}.slice.d"
    folder.mkdir()
    (folder / "50-gpulease.conf").touch()
    try:
        machine.run("systemctl", "daemon-reload")
        _end_sessions(machine)
        _begin_session(machine)
        assert _said(machine)["by systemd-run --user"] == OPEN
    finally:
        (folder / "50-gpulease.conf").unlink()
        folder.rmdir()
