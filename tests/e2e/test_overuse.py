"""The watch, on real resident memory: told, stopped after the grace, and neighbours unharmed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from daemon_rig import Daemon, alive, wait_for
from goldens import mentions
from nvml_stand_in import Card, StandIn

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


def used(daemon: Daemon, job: int) -> int:
    return sum(lease["used"] or 0 for lease in daemon.job(job)["leases"]) >> 20


def over_for_s(daemon: Daemon, job: int) -> float:
    """Return for how many seconds the lease of a job has been over."""
    since = daemon.job(job)["leases"][0]["over_since_at"]
    return 0.0 if since is None else time.time() - datetime.fromisoformat(since).timestamp()


def log(daemon: Daemon, job: int, stream: str = "stderr") -> str:
    return (daemon.state / f"jobs/{job}/{stream}").read_text()


def ended(daemon: Daemon, job: int) -> dict[str, Any]:
    return daemon.wait_until(job, "ended")


def test_two_gib_in_a_lease_of_one_are_told_and_stopped_and_the_neighbour_goes_on(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(simulate="1x8G", settings=WATCHED | {"overuse_grace": "8s"}).start()
    appetite = Appetite(tmp_path)
    beside = tmp_path / "beside"
    beside.mkdir()
    quiet = Appetite(beside, 300)
    neighbour = daemon.submit("--mem", "1G", *quiet.command())
    wait_for("the neighbour holds its share", lambda: used(daemon, neighbour) >= 300)
    running = daemon.open(
        "run", "--mem", "1G", *appetite.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    job = daemon.wait_until(neighbour + 1, "active")["id"]
    wait_for("it has written its first line", lambda: "holds 10" in log(daemon, job, "stdout"))
    appetite.set(2048)

    end = ended(daemon, job)
    out, err = running.communicate(timeout=60)

    assert (end["outcome"], end["exit_status"], running.returncode) == ("over_lease", 124, 124)
    assert mentions(end["reason"], "1G", "8s")
    assert "--mem " in end["hint"]
    assert end["leases"][0]["peak"] >> 20 > 1024
    told, stopped = err.decode().splitlines()  # once of the use, and once of the end
    assert told.startswith(f"gpulease: job {job} ") and mentions(told, "1G", "8s")
    assert stopped.startswith(f"gpulease: job {job} ")
    assert out.decode().splitlines() == ["holds 10", "holds 2048"], "its own output stays its own"
    kinds = [each["kind"] for each in end["events"]]
    assert kinds.index("notice") < kinds.index("revoke") < kinds.index("worker_exited")

    assert daemon.job(neighbour)["state"] == "active"
    assert notices(daemon, neighbour) == []
    assert log(daemon, neighbour) == ""


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
    wait_for("it is told", lambda: notices(daemon, job))
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


def test_elastic_lets_a_job_be_until_somebody_waits(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(simulate="1x1G", settings=WATCHED | {"elastic": "true"}).start()
    appetite = Appetite(tmp_path, 500)
    job = daemon.submit("--mem", "300M", *appetite.command())
    wait_for("it is over", lambda: used(daemon, job) >= 500)
    before = daemon.status()["at"]
    wait_for("some looks later", lambda: daemon.status()["at"][:19] > before[:19])
    assert notices(daemon, job) == []

    waiting = daemon.submit("--mem", "600M", "--", "true")
    end = ended(daemon, job)
    assert end["outcome"] == "over_lease"
    assert len(notices(daemon, job)) == 1
    assert ended(daemon, waiting)["exit_status"] == 0


def test_a_daemon_killed_between_the_warning_and_the_stop_goes_on_where_it_was(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    settings = WATCHED | {"overuse_grace": "15s"}
    daemon = make_daemon(simulate="1x8G", settings=settings).start()
    appetite = Appetite(tmp_path, 400)
    job = daemon.submit("--mem", "300M", *appetite.command())
    wait_for("it is told", lambda: notices(daemon, job))
    wait_for("it was over for a while", lambda: over_for_s(daemon, job) > 4)
    daemon.kill()
    daemon.start()

    end = ended(daemon, job)
    assert end["outcome"] == "over_lease"
    assert len(notices(daemon, job)) == 1, "it is not told the same again"
    assert log(daemon, job).count("gpulease: job 1 ") == 2, "told once, and once of the end"


def test_through_the_real_abi_a_figure_that_is_missing_is_no_overuse_and_one_that_comes_is(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    stand_in = StandIn(tmp_path, gpus=[Card(total=8 * G)])
    daemon = make_daemon(
        simulate=None, environment=stand_in.environment(), settings=WATCHED
    ).start()
    job = daemon.submit("--mem", "1G", "--", "sleep", "600")
    pid = daemon.wait_until(job, "active")["pid"]
    stand_in.change(0, used=3 * G, processes=[(pid, None)])
    wait_for("it is seen", lambda: daemon.status()["gpus"][0]["memory"]["used"] == 3 * G)
    before = daemon.status()["at"]
    wait_for("some looks later", lambda: daemon.status()["at"][:18] > before[:18])
    assert daemon.job(job)["leases"][0]["over_since_at"] is None
    # After some seconds on a GPU its owner learns that no hook limits `sleep`.
    assert all("framework hook" in each for each in notices(daemon, job))

    stand_in.change(0, used=3 * G, processes=[(pid, 3 * G)])
    end = ended(daemon, job)
    assert end["outcome"] == "over_lease"
    assert mentions(end["reason"], "3G", "GPU 0", "1G")
    assert "1s" in log(daemon, job)
