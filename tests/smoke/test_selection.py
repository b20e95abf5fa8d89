"""Jobs that are named otherwise than by number, and scripts that change while their job waits."""

import json
import os
import sys
from pathlib import Path

from daemon_rig import Daemon
from goldens import mentions


def test_jobs_are_named_by_name_by_pattern_and_as_the_last(daemon: Daemon) -> None:
    ended = daemon.submit("--mem", "1G", "--name", "sweep-0", "--", "echo", "first")
    daemon.wait_until(ended, "ended")
    live = [
        daemon.submit("--mem", "1G", "--name", f"sweep-{number}", "--", "sleep", "600")
        for number in (1, 2)
    ]
    other = daemon.submit("--mem", "1G", "--name", "other", "--", "sleep", "600")
    for job in (*live, other):
        daemon.wait_until(job, "active")

    assert daemon.run("logs", "sweep-0").stdout == "first\n"
    assert json.loads(daemon.run("show", "--json", "last").stdout)["id"] == other
    assert daemon.run("keep", "other", "sweep-1").stdout.count("\n") == 2
    done = daemon.run("cancel", "--grace", "0s", "--name", "sweep*")
    assert mentions(done.stderr, "sweep-1", "sweep-2")
    assert mentions(done.stdout, *map(str, live))
    for job in live:
        daemon.wait_until(job, "ended")
    assert daemon.job(other)["state"] == "active"
    daemon.run("cancel", "--all")
    daemon.wait_until(other, "ended")
    assert daemon.run("cancel", "--all", check=False).returncode == 0


def test_last_is_what_was_submitted_last_and_a_range_spares_other_jobs(daemon: Daemon) -> None:
    first, second = (daemon.submit("--mem", "1G", "--", "sleep", "600") for _ in range(2))
    daemon.wait_until(first, "active")
    daemon.run("requeue", str(first))
    daemon.wait_until(first, "ended")
    continued = daemon.job(first)["retried_as"]
    assert continued > second
    assert json.loads(daemon.run("show", "--json").stdout)["id"] == second
    daemon.run("requeue", str(second))
    daemon.wait_until(second, "ended")
    again = daemon.job(second)["retried_as"]
    daemon.run("cancel", "last")
    daemon.wait_until(again, "ended")
    assert daemon.job(continued)["state"] != "ended"

    assert daemon.run("cancel", f"1-{continued - 1}", check=False).returncode != 0
    said = daemon.run("cancel", f"{first}-{again}")
    assert mentions(said.stderr, f"{continued} (sleep)")
    daemon.wait_until(continued, "ended")


def test_a_snapshot_runs_as_it_was_submitted_and_an_edit_is_shown(
    daemon: Daemon, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import neighbour; print(neighbour.WORD, 'first')")
    (tmp_path / "neighbour.py").write_text("WORD = 'hello'")
    variables = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": f"{Path(sys.executable).parent}",
    }
    daemon.submit("--exclusive", "--gpus", "2", "--mem", "1G", "--", "sleep", "600")

    def submit(*options: str) -> int:
        line = ("run", "-d", "--mem", "1G", *options, "train.py")
        return int(daemon.run(*line, cwd=tmp_path, env=variables).stdout)

    refused = daemon.run(
        "run", "--dry-run", "--snapshot-dir", "/nowhere", "true", cwd=tmp_path, check=False
    )
    assert refused.returncode == 2, "also where nothing is copied"
    plain, snapshot, copied = submit(), submit("--snapshot"), submit("--snapshot-dir", ".")
    # Files have the time of a clock that is a little behind.
    script.write_text("print('second')")
    (tmp_path / "neighbour.py").write_text("WORD = 'good bye'")
    later = script.stat().st_mtime + 60
    os.utime(script, (later, later))
    assert "changed since submission" in daemon.run("show", str(plain)).stdout
    assert "changed since submission" not in daemon.run("show", str(snapshot)).stdout

    daemon.run("cancel", "--name", "sleep")
    for job in (plain, snapshot, copied):
        daemon.wait_until(job, "ended")
    assert daemon.run("logs", str(plain)).stdout == "second\n"
    assert daemon.run("logs", str(snapshot)).stdout == "good bye first\n", "only the script"
    assert daemon.run("logs", str(copied)).stdout == "hello first\n"
