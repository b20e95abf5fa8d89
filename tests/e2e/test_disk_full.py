"""The disk that the record is on is full, and later it is not: nothing is lost, and it is said."""

import subprocess
from pathlib import Path

from daemon_rig import Daemon, fill, wait_for

from .test_overuse import WATCHED, Appetite


def fill_for_good(daemon: Daemon, disk: Path) -> Path:
    """Fill the disk of a daemon, and use up what its database keeps for itself."""
    refused = 0
    while refused < 3:
        ballast = fill(disk)
        done = daemon.run("run", "-d", "--mem", "8G", "--gpus", "2", "--", "true", check=False)
        refused = refused + 1 if done.returncode else 0
    return ballast


def test_what_runs_is_cancelled_on_a_full_disk_and_what_waits_is_not(
    small_disk: Path, on_small_disk: Daemon
) -> None:
    daemon = on_small_disk.start()
    running = daemon.submit("--mem", "6G", "--", "sleep", "1000")
    waiting = daemon.submit("--mem", "6G", "--gpus", "2", "--", "true")
    pid = daemon.wait_until(running, "active")["pid"]
    ballast = fill_for_good(daemon, small_disk)
    done = daemon.run("cancel", str(running))
    assert f"job {running} " in done.stdout + done.stderr
    wait_for("the job has ended", lambda: not Path(f"/proc/{pid}").exists())
    assert daemon.run("cancel", str(waiting), check=False).returncode == 125
    ballast.unlink()
    ended = daemon.wait_until(running, "ended")
    assert ended["outcome"] == "cancelled"
    assert ended["user"] in daemon.run("show", str(running)).stdout
    assert daemon.wait_until(waiting, "ended")["exit_status"] == 0
    assert "Traceback" not in daemon.log


def test_what_is_over_its_lease_is_told_and_stopped_on_a_full_disk(
    small_disk: Path, on_small_disk: Daemon, tmp_path: Path
) -> None:
    daemon = on_small_disk
    daemon.settings = WATCHED
    daemon.start()
    appetite = Appetite(tmp_path)
    # Its output is read from elsewhere: the log, on the full disk, takes no line.
    said = tmp_path / "said"
    with said.open("wb") as file:
        job = daemon.open(
            "run", "--mem", "300M", *appetite.command(),
            stdout=subprocess.DEVNULL, stderr=file,
        )  # fmt: skip
        daemon.wait_until(1, "active")
        ballast = fill_for_good(daemon, small_disk)
        appetite.set(800)
        assert job.wait(120) == 124, (said.read_text(), daemon.log)
    assert said.read_text().count("gpulease: job 1 ") == 2, "told once, and once of the end"
    ballast.unlink()
    ended = daemon.wait_until(1, "ended")
    assert ended["outcome"] == "over_lease"
    assert "300M" in daemon.run("show", "1").stdout
    assert "Traceback" not in daemon.log
