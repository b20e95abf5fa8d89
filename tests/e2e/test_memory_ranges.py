"""A job with a range of memory, on real memory: it grows, gives back, or is stopped."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from daemon_rig import Daemon, wait_for
from goldens import mentions

from .test_overuse import Appetite, ended, notices

M, PID = 1 << 20, str(os.getpid())
SETTINGS = {"grace": "2s", "overuse_tolerance": "32M", "overuse_grace": "6s", "margin": "0"}
ENDS = ("", "_GUARANTEED", "_FRACTION")
SHOW = f"import os; print(*(os.environ['GPULEASE_MEMORY' + end] for end in {ENDS}))"


def used(daemon: Daemon, job: int) -> int:
    return int(daemon.job(job)["leases"][0]["used"] or 0)


def holds(daemon: Daemon, job: int, appetite: Appetite, mib: int) -> None:
    """Let a job hold so many MiB, and wait until the daemon has seen it."""
    appetite.set(mib)
    wait_for("it is seen", lambda: mib * M <= used(daemon, job) <= (mib + 100) * M)


def test_a_job_uses_what_nobody_waits_for_and_gives_it_back_or_is_stopped(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(simulate="1x1200M", settings=SETTINGS).start()
    appetite = Appetite(tmp_path)
    job = daemon.submit("--mem", "300M..1000M", *appetite.command())
    daemon.wait_until(job, "active")
    lease = daemon.job(job)["leases"][0]
    assert (lease["memory"], lease["memory_bound"]) == (300 * M, 1000 * M)
    assert mentions(daemon.run("status").stdout, "300M..1000M")
    assert mentions(daemon.run("show", str(job)).stdout, "300M..1000M")
    holds(daemon, job, appetite, 700)
    until = time.monotonic() + 8
    while time.monotonic() < until:
        assert daemon.job(job)["state"] == "active"
        time.sleep(0.2)
    assert notices(daemon, job) == []

    waiter = daemon.submit("--mem", "800M", "--", "sleep", "1000")
    wait_for("the notice is there", lambda: notices(daemon, job))
    assert mentions(daemon.run("show", str(job)).stdout, "asked back", "stopped in")
    assert mentions(notices(daemon, job)[0], "300M are guaranteed", "gives back")
    assert mentions(daemon.job(waiter)["reason"], f"job {job} to give back")
    appetite.set(50)
    daemon.wait_until(waiter, "active")
    assert daemon.job(job)["state"] == "active"
    daemon.run("cancel", str(waiter))
    ended(daemon, waiter)

    # It may grow again, and keeps its lease and the time over it while no daemon runs.
    holds(daemon, job, appetite, 700)
    waiter = daemon.submit("--mem", "800M", "--", "sleep", "1000")
    wait_for("it counts", lambda: daemon.job(job)["leases"][0]["over_since_at"])
    daemon.kill()
    daemon.start()
    assert daemon.job(job)["leases"][0]["memory_bound"] == 1000 * M
    end = ended(daemon, job)
    assert (end["outcome"], end["exit_status"]) == ("over_lease", 124)
    assert mentions(end["hint"], "to keep as much")
    daemon.wait_until(waiter, "active")


def test_above_its_bound_a_job_is_stopped_without_a_waiter(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    settings = SETTINGS | {"overuse_grace": "1s"}
    daemon = make_daemon(simulate="1x1200M", settings=settings).start()
    job = daemon.submit("--mem", "300M..500M", *Appetite(tmp_path, 800).command())
    end = ended(daemon, job)
    assert end["outcome"] == "over_lease"
    assert mentions(end["hint"], "--mem 300M..")


def test_every_way_to_ask_takes_a_range_and_programs_find_both_ends(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(simulate="1x1200M", settings=SETTINGS).start()
    script, both = tmp_path / "train.py", [str(600 * M), str(300 * M), "0.500000"]
    script.write_text(f"# gpulease: --mem 300M..50%\n{SHOW}\n")
    assert daemon.run("run", str(script)).stdout.split() == both
    held = json.loads(
        daemon.run("hold", "--mem", "300M..600M", "--for", "1m", "--json", "--pid", PID).stdout
    )
    assert [held["set"][f"GPULEASE_MEMORY{end}"] for end in ENDS] == both
    daemon.run("cancel", str(held["job"]["id"]))
    job = daemon.submit("--mem", "300M..2G", "--held", "--", "true")
    daemon.run("edit", str(job), "--mem", "30%..500M")
    claim = daemon.job(job)["claim"]
    assert (claim["share"], claim["memory_bound"]) == (30, 500 * M)
    daemon.run("edit", str(job), "--mem", "350M")
    claim = daemon.job(job)["claim"]
    assert (claim["memory"], claim["memory_bound"], claim["share_bound"]) == (350 * M, None, None)
    refused = daemon.run("run", "--mem", "400M..300M", "--", "true", check=False)
    assert mentions(refused.stderr, "below", "4G..10G")
