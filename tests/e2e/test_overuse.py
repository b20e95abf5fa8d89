"""The watch, on real memory: jobs over their lease get a warning, and are stopped later."""

import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from daemon_rig import Daemon, alive, wait_for
from goldens import mentions

G = 1024**3
HUNGRY = str(Path(__file__).with_name("hungry.py"))
WATCHED = {"grace": "2s", "overuse_tolerance": "32M", "overuse_grace": "1s"}


class Appetite:
    """A file that says how many MiB a job is to hold."""

    def __init__(self, folder: Path, mib: int = 10) -> None:
        self.path = folder / "appetite"
        self.set(mib)

    def set(self, mib: int) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(str(mib))
        fresh.rename(self.path)

    def command(self, *more: str) -> list[str]:
        return ["--", sys.executable, HUNGRY, str(self.path), *more]


def notices(daemon: Daemon, job: int) -> list[str]:
    return [each["detail"] for each in daemon.job(job)["events"] if each["kind"] == "notice"]


def over_for_s(daemon: Daemon, job: int) -> float:
    """Return for how many seconds the lease of a job has been over."""
    since = daemon.job(job)["leases"][0]["over_since_at"]
    return 0.0 if since is None else time.time() - datetime.fromisoformat(since).timestamp()


def log(daemon: Daemon, job: int, stream: str = "stderr") -> str:
    return (daemon.state / f"jobs/{job}/{stream}").read_text()


def ended(daemon: Daemon, job: int) -> dict[str, Any]:
    return daemon.wait_until(job, "ended")


def test_a_job_that_does_not_hear_is_killed_after_its_grace(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(simulate="1x8G", settings=WATCHED).start()
    appetite = Appetite(tmp_path, 400)
    job = daemon.submit("--mem", "300M", *appetite.command("deaf"))
    end = ended(daemon, job)

    assert (end["outcome"], end["exit_status"]) == ("over_lease", 124)
    assert "no\n" in log(daemon, job, "stdout"), "it was asked before it was made to"
    assert not alive([end["pid"]])
    # The next without a size gets no less than it was told to ask for.
    assert "--mem 512M" in end["hint"]
    appetite.set(10)
    again = daemon.run("run", "-d", *appetite.command("deaf"))
    assert mentions(again.stderr, "512M", "hungry.py")
    assert daemon.job(job + 1)["claim"]["memory"] == 512 << 20


def test_warn_never_stops_and_users_may_have_their_own_policy(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    user = tmp_path.owner()
    tables = f'[users.{user}]\noveruse = "warn"\n'
    daemon = make_daemon(simulate="1x8G", settings=WATCHED, tables=tables).start()
    appetite = Appetite(tmp_path, 400)
    job = daemon.submit("--mem", "300M", *appetite.command())
    wait_for("the notice is there", lambda: notices(daemon, job))
    assert "--mem" in notices(daemon, job)[0]
    lease = daemon.job(job)["leases"][0]
    assert lease["over_since_at"] and lease["stops_at"] is None
    # Over for many graces, and then the same lease under the general policy is not let be.
    wait_for("it was over for three graces", lambda: over_for_s(daemon, job) > 3)
    assert daemon.job(job)["state"] == "active"
    let_be = daemon.submit("--mem", "300M", "--", "true")
    assert ended(daemon, let_be)["leases"][0]["enforced_by"] == [], "nor did anything hold it"

    assert daemon.process is not None
    config = daemon.folder / "config.toml"
    config.write_text(config.read_text().replace(tables, ""))
    daemon.process.send_signal(signal.SIGHUP)
    end = ended(daemon, job)
    assert (end["outcome"], end["leases"][0]["enforced_by"]) == ("over_lease", ["watch"])
