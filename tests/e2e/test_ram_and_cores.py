"""The queue counts RAM and cores: what does not fit waits, says why, and starts when it does."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from daemon_rig import Daemon, wait_for
from gpulease.units import format_size

M = 1 << 20
SLEEP = ("--", "sleep", "600")


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("MemAvailable"))


def most_of_it() -> str:
    """Return over a half of what is free now, as an option."""
    return f"{int(available() * 0.55) // M}M"


def test_a_job_waits_for_ram_and_starts_when_another_has_ended(daemon: Daemon) -> None:
    size = most_of_it()
    first = daemon.submit("--mem", "1G", "--ram", size, *SLEEP)
    daemon.wait_until(first, "active")
    second = daemon.submit("--mem", "1G", "--ram", size, *SLEEP)
    plain = daemon.submit("--mem", "1G", *SLEEP)
    daemon.wait_until(plain, "active")
    why = wait_for("a reason", lambda: daemon.job(second)["reason"])
    assert "of RAM, and at most " in why
    assert daemon.job(second)["waits_for"] == [first]

    page = daemon.run("show", str(second)).stdout
    assert f", ram {format_size(daemon.job(second)['claim']['ram'])}" in page
    status = daemon.run("status").stdout
    assert "RAM: " in status and "cores: 0 of " in status
    dry = daemon.run("run", "--dry-run", "--mem", "1G", "--ram", size, *SLEEP, check=False)
    assert dry.returncode == 75 and "of RAM" in dry.stdout and "--ram " in dry.stdout
    now = daemon.run("run", "--no-wait", "--mem", "1G", "--ram", size, *SLEEP, check=False)
    assert now.returncode == 75 and "of RAM" in now.stderr

    assert "RAM" in daemon.run("edit", str(second), "--ram", "64M").stdout
    daemon.wait_until(second, "active")
    third = daemon.submit("--mem", "1G", "--ram", size, *SLEEP)
    daemon.cancel(first)
    daemon.wait_until(third, "active")


def test_more_than_the_machine_has_is_refused(daemon: Daemon) -> None:
    cores = len(os.sched_getaffinity(0)) + 1
    for option, value in (("--ram", "900T"), ("--cpus", str(cores))):
        refused = daemon.run("run", "--mem", "1G", option, value, *SLEEP, check=False)
        assert refused.returncode == 125 and "this machine has" in refused.stderr, refused.stderr


def test_holds_lease_ram_and_cores_too_and_the_api_says_so(daemon: Daemon) -> None:
    held = daemon.run(
        "hold", "--mem", "1G", "--ram", "64M", "--cpus", "1", "--for", "1h", "--json",
        "--pid", str(os.getpid()),
    )  # fmt: skip
    job = json.loads(held.stdout)["job"]
    claim = daemon.job(job["id"])["claim"]
    assert (claim["ram"], claim["cpus"]) == (64 * M, 1)
    found = daemon.status()["resources"]
    assert (found["ram_leased"], found["cores_leased"]) == (64 * M, 1)
    assert found["cores_free"] == found["cores"] - 1
    daemon.cancel(job["id"])
    wait_for("it is released", lambda: daemon.status()["resources"] is None or None)


def test_the_reserve_of_the_settings_is_never_leased(
    make_daemon: Callable[..., Daemon],
) -> None:
    most = len(os.sched_getaffinity(0))
    tables = f'[host]\nreserved_ram = "99%"\nreserved_cpus = {most}\n'
    daemon = make_daemon(settings={"grace": "2s"}, tables=tables).start()
    refused = daemon.run("run", "--mem", "1G", "--ram", most_of_it(), *SLEEP, check=False)
    assert "cannot lease" in refused.stderr and "of RAM" in refused.stderr
    refused = daemon.run("run", "--mem", "1G", "--cpus", "1", *SLEEP, check=False)
    assert "this machine has 0 to lease" in refused.stderr
    assert daemon.run("run", "--mem", "1G", "--", "echo", "as before").stdout == "as before\n"
