"""Past jobs: what `gpulease history` shows of them, and that `gpulease replay` reads its export."""

import csv
import getpass
import json
import time
from pathlib import Path

import pytest

from daemon_rig import Daemon
from goldens import mentions
from gpulease.client.client import Client
from gpulease.errors import BadValue
from gpulease.units import GIB


def test_the_history_of_a_daemon_can_be_replayed(daemon: Daemon, tmp_path: Path) -> None:
    kept = [daemon.submit("--mem", "2G", "--name", f"past-{n}", "true") for n in range(3)]
    wide = daemon.submit("--mem", "1G", "--gpus", "2", "--time", "1h", "--name", "wide", "true")
    for job in (*kept, wide):
        daemon.wait_until(job, "ended")

    shown = daemon.run("history", "--limit", "4")
    exported = daemon.run("history", "--csv")

    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [str(job) for job in (wide, *kept[::-1])]
    assert mentions(lines[1], "wide", "2 x 1G", "exited")
    rows = {int(row["job"]): row for row in csv.DictReader(exported.stdout.splitlines())}
    assert (rows[wide]["gpus"], rows[wide]["memory_mib"]) == ("2", "1024")
    assert (rows[wide]["time_limit_s"], rows[kept[0]]["time_limit_s"]) == ("3600", "")
    # Runs of the same command have the same digests, which do not contain it.
    assert rows[kept[0]]["command"] == rows[kept[1]]["command"]
    assert "true" not in rows[wide]["command"]
    assert abs(float(rows[wide]["submit_s"]) - time.time()) < 600
    trace = tmp_path / "trace.csv"
    trace.write_text(exported.stdout)
    replayed = daemon.run("replay", str(trace), "--servers", "2x8G", "--json")
    assert json.loads(replayed.stdout)["results"][0]["figures"]["jobs"] == len(rows)


def test_a_job_that_never_held_memory_is_shown_and_not_exported(daemon: Daemon) -> None:
    holder = daemon.submit("--mem", "8G", "--gpus", "2", "sleep", "60")
    daemon.wait_until(holder, "active")
    waiter = daemon.submit("--mem", "8G", "--name", "waiter", "true")
    daemon.cancel(waiter, holder)
    daemon.wait_until(holder, "ended")

    shown = json.loads(daemon.run("history", "--json", "--since", "1h").stdout)
    exported = daemon.run("history", "--csv").stdout

    past = {job["id"]: job for job in shown["jobs"]}
    assert (past[waiter]["granted_at"], past[waiter]["outcome"]) == (None, "cancelled")
    assert str(waiter) not in [line.split(",")[0] for line in exported.splitlines()]


def test_the_history_is_filtered_by_name_state_and_time(daemon: Daemon) -> None:
    good = daemon.submit("--mem", "1G", "--name", "filter-good", "true")
    bad = daemon.submit("--mem", "1G", "--name", "filter-bad", "false")
    for job in (good, bad):
        daemon.wait_until(job, "ended")

    def found(*options: str) -> list[int]:
        shown = daemon.run("history", "--json", "--name", "filter-*", *options).stdout
        return [job["id"] for job in json.loads(shown)["jobs"]]

    assert found() == [bad, good]
    assert found("--state", "failed") == [bad]
    assert found("--state", "exited", "--since", "1h", "--limit", "1") == [bad]
    assert found("--state", "lost") == []
    assert [job.id for job in daemon.client.history(name="filter-g*").jobs] == [good]
    rows = daemon.run("history", "--csv", "--name", "filter-bad").stdout.splitlines()
    assert [row.partition(",")[0] for row in rows] == ["job", str(bad)]


def test_what_cannot_be_listed_is_refused(daemon: Daemon) -> None:
    both = daemon.run("history", "--csv", "--json", check=False)
    nobody = daemon.run("history", "--user", "nobody-of-this-name", check=False)

    assert (both.returncode, nobody.returncode) == (2, 2)
    assert "nobody-of-this-name" in nobody.stderr


def test_shares_say_who_holds_memory_and_whose_turn_it_is(daemon: Daemon) -> None:
    holder = daemon.submit("--mem", "8G", "--gpus", "2", "sleep", "60")
    daemon.wait_until(holder, "active")
    waiters = [daemon.submit("--mem", "8G", "true") for _ in range(2)]

    view = daemon.client.shares()
    (user,) = view.users
    shown = daemon.run("report", "--shares").stdout

    assert (view.policy, user.user) == ("fair", getpass.getuser())
    assert (user.held, user.running, user.waiting) == (16 * GIB, 1, 2)
    assert (user.turn, user.next_job, round(user.share, 6)) == (1, str(waiters[0]), 1.0)
    assert user.started >= 1
    assert mentions(shown, getpass.getuser(), "16G", str(waiters[0]))
    reported = json.loads(daemon.run("report", "--shares", "--json", "--user", "nobody").stdout)
    assert reported["users"] == []


def test_bad_numbers_are_refused_by_the_name_that_the_user_gave_them(daemon: Daemon) -> None:
    """The command and the API, as the ranges are checked in different places."""
    for line in (
        ("history", "--limit", "0"),
        ("list", "--limit", "99999"),
        ("list", "--last", "x"),
    ):
        refused = daemon.run(*line, check=False)
        assert refused.returncode == 2
        assert f"cannot use {line[1]}" in refused.stderr
        assert f"gpulease {line[0]}" in refused.stderr
    with pytest.raises(BadValue, match="cannot use limit 99999"):
        Client(daemon.socket).jobs(limit=99999)
