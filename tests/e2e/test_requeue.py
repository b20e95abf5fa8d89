"""Jobs that are queued again: they lose nothing, and nothing is done twice."""

import os
import random
import re
import secrets
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions

BIG = ("--mem", "7G", "--gpus", "2")
"""A claim that fits once on the daemon of these tests."""


def saves(ledger: Path, gate: Path, within_s: float = 0) -> tuple[str, ...]:
    """Return a command that notes its start, and on SIGTERM what it saves."""
    script = (
        f"trap 'sleep {within_s}; echo saved >>{ledger}; exit 0' TERM; echo start >>{ledger}; "
        f"while ! test -e {gate}; do sleep 0.05; done; echo done >>{ledger}"
    )
    return "sh", "-c", script


def is_up(ledger: Path, starts: int = 1) -> None:
    wait_for("it is up", lambda: ledger.exists() and words(ledger).count("start") == starts)


def words(ledger: Path) -> list[str]:
    return ledger.read_text().split()


def test_a_preemptible_job_makes_way_saves_its_work_and_continues(
    daemon: Daemon, tmp_path: Path
) -> None:
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"
    spare = daemon.open(
        "run", *BIG, "--preemptible", "--", *saves(ledger, gate), stderr=subprocess.PIPE
    )
    is_up(ledger)
    (first,) = daemon.status()["jobs"]

    done = daemon.run("run", *BIG, "--", "sh", "-c", f"echo winner >>{ledger}")

    assert done.returncode == 0
    is_up(ledger, 2)
    gate.touch()
    said = spare.communicate(timeout=120)[1].decode()
    assert spare.returncode == 0
    assert words(ledger) == ["start", "saved", "winner", "start", "done"]
    assert mentions(said, f"job {first['id']} makes way for job", "requeued as job 3")
    jobs = daemon.tries(first["id"])
    assert [job["outcome"] for job in jobs] == ["preempted", "exited"]
    assert jobs[1]["queue"]["requeued"] == 1


def test_a_job_whose_shim_was_killed_is_queued_again_if_it_asked_for_that(
    daemon: Daemon, tmp_path: Path
) -> None:
    ledgers, gate = [tmp_path / "one", tmp_path / "other"], tmp_path / "gate"
    asked = daemon.submit("--mem", "1G", "--requeue", "--", *saves(ledgers[0], gate))
    other = daemon.submit("--mem", "1G", "--", *saves(ledgers[1], gate))
    for job, ledger in zip((asked, other), ledgers, strict=True):
        is_up(ledger)
        os.kill(_shim_of(daemon, job), signal.SIGKILL)

    is_up(ledgers[0], 2)
    gate.touch()

    jobs = daemon.tries(asked)
    assert [job["outcome"] for job in jobs] == ["lost", "exited"]
    assert mentions(jobs[0]["reason"], f"requeued as job {jobs[1]['id']}")
    assert daemon.tries(other)[-1]["outcome"] == "lost"


def test_a_shim_notes_the_sigterm_of_a_shutdown_and_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    """Without a reboot, the job has ended by itself: somebody sent the signal."""
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"
    job = daemon.submit("--mem", "1G", "--requeue", "--", *saves(ledger, gate))
    is_up(ledger)
    for pid in (_shim_of(daemon, job), daemon.wait_until(job, "active")["pid"]):
        os.kill(pid, signal.SIGTERM)
    ended = daemon.wait_until(job, "ended")
    assert (ended["outcome"], ended["exit_status"], ended["retried_as"]) == ("exited", 0, None)
    assert '"terminated":true' in (daemon.state / f"jobs/{job}/record").read_text()


def test_a_job_that_a_shutdown_ended_is_queued_again_after_the_boot(
    daemon: Daemon, tmp_path: Path
) -> None:
    """The machine cannot reboot here, so the job starts and ends before its last boot."""
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"
    job = daemon.submit("--mem", "1G", "--requeue", "--", *saves(ledger, gate))
    is_up(ledger)
    pids = _shim_of(daemon, job), daemon.wait_until(job, "active")["pid"]
    daemon.kill()
    with closing(sqlite3.connect(daemon.state / "gpulease.db")) as database, database:
        database.execute("UPDATE jobs SET started_at = 1")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    gate.touch()
    record = daemon.state / f"jobs/{job}/record"
    wait_for("its shim noted the end", lambda: '"ended_at"' in record.read_text())
    record.write_text(re.sub(r'("ended_at": ?")\d{4}', r"\g<1>2001", record.read_text()))

    daemon.start()

    jobs = daemon.tries(job)
    assert [job["outcome"] for job in jobs] == ["exited", "exited"]
    assert mentions(jobs[0]["reason"], "the machine was shut down; requeued as job 2")
    assert words(ledger) == ["start", "saved", "start", "done"]


def _shim_of(daemon: Daemon, job: int) -> int:
    record = (daemon.state / f"jobs/{job}/record").read_text()
    marker = '"shim_pid":'
    start = record.index(marker) + len(marker)
    return int(record[start:].split(",")[0].split("}")[0])


def test_a_job_that_made_way_while_no_daemon_ran_is_queued_again_once(
    daemon: Daemon, tmp_path: Path
) -> None:
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"
    spare = daemon.submit(*BIG, "--preemptible", "--", *saves(ledger, gate, 1))
    is_up(ledger)
    winner = daemon.submit(*BIG, "--", "sh", "-c", f"echo winner >>{ledger}")
    record = daemon.state / f"jobs/{spare}/record"
    wait_for("its shim stops it", lambda: '"stopping"' in record.read_text())
    daemon.kill()
    wait_for("its shim noted the end", lambda: '"exited"' in record.read_text())
    gate.touch()

    for _ in range(2):
        daemon.start()
        daemon.wait_until(winner, "ended")
        jobs = daemon.tries(spare)
        daemon.kill()

    assert [job["outcome"] for job in jobs] == ["preempted", "exited"]
    assert words(ledger).count("winner") == 1
    daemon.start()
    assert [job["id"] for job in daemon.jobs() if job["retry_of"]] == [jobs[1]["id"]]


@pytest.mark.parametrize("kills", [8])
def test_kills_in_the_middle_of_preemption_lose_nothing_and_do_nothing_twice(
    daemon: Daemon, tmp_path: Path, kills: int
) -> None:
    """Of each submitted job, exactly one of those that continue it ends by itself."""
    seed = secrets.randbits(32)
    chance = random.Random(seed)
    submitted: list[int] = []
    for number in range(kills):
        ledger = tmp_path / f"ledger{number}"
        work = f"echo start >>{ledger}; sleep 0.3; echo done >>{ledger}"
        spare = daemon.submit(*BIG, "--preemptible", "--requeue", "--", "sh", "-c", work)
        time.sleep(chance.uniform(0, 0.5))
        urgent = daemon.submit(*BIG, "--", "sh", "-c", f"echo done >>{ledger}.urgent")
        submitted += [spare, urgent]
        time.sleep(chance.uniform(0, 0.4))
        daemon.kill()
        daemon.start()

    ends = [daemon.tries(job) for job in submitted]

    assert [jobs[-1]["exit_status"] for jobs in ends] == [0] * len(submitted), f"seed {seed}"
    every = sorted(job["id"] for jobs in ends for job in jobs)
    assert every == sorted(job["id"] for job in daemon.jobs()), f"seed {seed}: a job too many"
    for number in range(kills):
        assert words(tmp_path / f"ledger{number}").count("done") == 1, f"seed {seed}"
        assert words(tmp_path / f"ledger{number}.urgent") == ["done"], f"seed {seed}"
