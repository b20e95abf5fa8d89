"""The web page as a service: what it serves, and what its sandbox keeps from it."""

import json
from collections.abc import Iterator

import pytest

from daemon_rig import wait_for
from goldens import mentions

from .conftest import SERVICE, SETUP, WEB, Gpulease
from .machine import Machine
from .root import ENVIRONMENT

PAGE = "http://127.0.0.1:8080/"
_GET = (
    "import sys, urllib.request as it; print(it.urlopen(sys.argv[1], timeout=120).read().decode())"
)
# As in netdevice(7): SIOCSIFADDR on an alias of the loopback interface.
_ADD_ADDRESS = """
import fcntl, socket, struct
address = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton("10.9.9.9"))
fcntl.ioctl(socket.socket(), 0x8916, b"lo:1".ljust(16, b"\\0") + address)
"""
_CONNECT = "import socket; socket.create_connection(('10.9.9.9', 8080), timeout=3)"
PACKAGES = f"{ENVIRONMENT}/lib/python3.11/site-packages"


@pytest.fixture
def machine(gpulease: Gpulease) -> Iterator[Machine]:
    """Yield the machine; what a test did to the web server is undone after."""
    yield gpulease.machine
    gpulease.drop_in("", WEB)
    (gpulease.machine.root / "etc/gpulease/web.env").unlink(missing_ok=True)
    gpulease.machine.run("systemctl", "reset-failed", WEB, check=False)
    gpulease.machine.run("systemctl", "restart", WEB)


def get(machine: Machine, url: str, user: str = "alice") -> str:
    """Return what a user of the machine gets; it fails unless the status is 200."""
    return machine.run("/usr/bin/python3", "-c", _GET, url, user=user).stdout


def pid(machine: Machine) -> int:
    return int(machine.unit(WEB, "MainPID")["MainPID"])


def test_a_user_gets_the_page_and_the_metrics(machine: Machine, gpulease: Gpulease) -> None:
    job = gpulease.submit("--mem", "3G", "--name", "seen-on-the-page", "--", "sleep", "600")
    gpulease.wait_until(job, "active")
    wait_for("the job is shown", lambda: "seen-on-the-page" in get(machine, PAGE))
    wait_for(
        "the lease is counted",
        lambda: (
            'gpulease_user_memory_leased_bytes{user="alice"} 3.221225472e+09'
            in get(machine, f"{PAGE}metrics")
        ),
    )


def test_it_outlives_the_daemon_and_says_that_it_is_away(machine: Machine) -> None:
    before = pid(machine)
    machine.run("systemctl", "stop", SERVICE)
    away = "gpulease_daemon_up 0.0"
    wait_for("it is noticed", lambda: away in get(machine, f"{PAGE}metrics"))
    machine.run("systemctl", "start", SERVICE)
    wait_for("it is back", lambda: "gpulease_daemon_up 1.0" in get(machine, f"{PAGE}metrics"))
    assert pid(machine) == before


def test_it_has_no_rights(machine: Machine) -> None:
    status = machine.run("cat", f"/proc/{pid(machine)}/status").stdout
    found = dict(line.split(":\t", 1) for line in status.splitlines())
    assert {found[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    uids, groups = set(found["Uid"].split()), found["Groups"].split()
    assert len(uids) == 1
    assert int(uids.pop()) >= 61184, "a dynamic user, see systemd.exec(5)"
    assert set(groups) <= set(found["Gid"].split())


def test_it_can_write_nothing_but_its_own_directory(machine: Machine) -> None:
    # Root would be kept out by the mounts alone.
    inside = ("nsenter", f"--target={pid(machine)}", "--mount", "--", "sh", "-c")
    places = (
        "/ /etc /usr /opt/gpulease /var/lib /var/lib/gpulease /run /run/gpulease /run/lock /sys "
        "/dev/shm /dev/mqueue"
    )
    script = f"for it in {places}; do touch $it/written 2>/dev/null && echo $it; done; true"
    assert machine.run(*inside, script).stdout == ""
    assert machine.run(*inside, "ls /home /root").stdout.split() == ["/home:", "/root:"]
    devices = set(machine.run(*inside, "ls /dev").stdout.split())
    assert "null" in devices
    assert not {each for each in devices if each.startswith(("nvidia", "sd", "mem", "kmsg"))}
    mine = machine.run("ls", "-ld", "--time-style=+", "/run/gpulease-web").stdout
    assert mine.startswith("drwxr-xr-x")


def test_other_machines_reach_it_only_if_the_unit_allows_them(
    machine: Machine, gpulease: Gpulease
) -> None:
    machine.run("/usr/bin/python3", "-c", _ADD_ADDRESS)
    listen = '[Service]\nEnvironment="GPULEASE_WEB_OPTIONS=--listen 0.0.0.0:8080"\n'
    gpulease.drop_in(listen, WEB)
    machine.run("systemctl", "restart", WEB)
    assert "gpulease_daemon_up 1.0" in get(machine, f"{PAGE}metrics")
    # Connections from the address to itself have it at both ends.
    refused = machine.run("/usr/bin/python3", "-c", _CONNECT, check=False)
    assert "timed out" in refused.stderr
    gpulease.drop_in(f"{listen}IPAddressAllow=10.0.0.0/8\n", WEB)
    machine.run("systemctl", "restart", WEB)
    machine.run("/usr/bin/python3", "-c", _CONNECT)


def test_its_memory_and_processes_are_limited(machine: Machine) -> None:
    limits = machine.unit(WEB, "MemoryMax", "TasksMax")
    assert limits == {"MemoryMax": str(512 << 20), "TasksMax": "64"}


def test_a_file_changes_its_options_and_it_may_listen_on_a_socket(
    machine: Machine, gpulease: Gpulease
) -> None:
    options = machine.root / "etc/gpulease/web.env"
    options.write_text('GPULEASE_WEB_OPTIONS="--listen 127.0.0.1:9000 --metrics-jobs"\n')
    machine.run("systemctl", "restart", WEB)
    job = gpulease.submit("--mem", "1G", "--", "sleep", "600")
    gpulease.wait_until(job, "active")
    wait_for(
        "jobs are labels",
        lambda: f'job="{job}"' in get(machine, "http://127.0.0.1:9000/metrics"),
    )
    options.write_text("GPULEASE_WEB_OPTIONS=--listen unix:/run/gpulease-web/socket\n")
    machine.run("systemctl", "restart", WEB)
    found = machine.run("stat", "--format=%F %A", "/run/gpulease-web/socket").stdout
    assert found == "socket srw-rw-rw-\n"


def test_options_that_cannot_be_used_are_not_tried_again_and_again(machine: Machine) -> None:
    (machine.root / "etc/gpulease/web.env").write_text("GPULEASE_WEB_OPTIONS=--nonsense\n")
    machine.run("systemctl", "restart", WEB, check=False)
    found = machine.wait_for_unit(WEB, ActiveState="failed", ExecMainStatus="2")
    assert found
    assert machine.unit(WEB, "NRestarts") == {"NRestarts": "0"}


def test_it_is_back_after_a_kill(machine: Machine) -> None:
    before = pid(machine)
    machine.run("kill", "-9", str(before))
    wait_for("another one serves", lambda: pid(machine) not in (0, before))
    machine.wait_for_unit(WEB, ActiveState="active", SubState="running")
    assert "gpulease_daemon_up 1.0" in get(machine, f"{PAGE}metrics")


def test_it_stays_with_upgrades_and_leaves_on_request(machine: Machine) -> None:
    assert machine.run(SETUP, "install").stdout.count("unchanged /") == 9
    said = machine.run(SETUP, "install", "--no-web").stdout
    assert f"removed /usr/local/lib/systemd/system/{WEB}" in said
    assert machine.unit(WEB, "LoadState", "ActiveState")["ActiveState"] == "inactive"
    assert WEB not in machine.run(SETUP, "install").stdout
    machine.run(SETUP, "install", "--web", "--now")
    assert "gpulease_daemon_up 1.0" in get(machine, f"{PAGE}metrics")


def test_it_is_not_installed_without_its_packages(machine: Machine) -> None:
    package = f"{PACKAGES}/prometheus_client"
    machine.run("mv", package, f"{package}-away")
    try:
        refused = machine.run(SETUP, "install", "--web", check=False)
    finally:
        machine.run("mv", f"{package}-away", package)
    assert refused.returncode == 125
    assert mentions(refused.stderr, "web page", f"{ENVIRONMENT}/bin/pip install", "web")
    assert json.loads(machine.run("gpulease", "status", "--json").stdout)["gpus"]
