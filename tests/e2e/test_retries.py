"""Jobs that are tried again after they have failed, as their users see it."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from daemon_rig import Daemon, wait_for
from goldens import mentions

SOON = ("--retry-delay", "1s")


def fails(ledger: Path, times: int, code: int = 3) -> tuple[str, ...]:
    """Return a command that notes each start, and fails so many times."""
    script = f"echo $GPULEASE_JOB >>{ledger}; test $(wc -l <{ledger}) -gt {times} || exit {code}"
    return "--", "sh", "-c", script


def test_run_follows_each_try_and_exits_as_the_last_one_does(
    daemon: Daemon, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    done = daemon.run("run", "--mem", "1G", "--retries", "3", *SOON, *fails(ledger, 2))
    assert mentions(done.stderr, "exited with 3; job 2 is try 2 of 4", "job 3 is try 3 of 4")
    assert [job["exit_status"] for job in daemon.tries(1)] == [3, 3, 0]
    assert ledger.read_text().split() == ["1", "2", "3"]

    page = daemon.run("show", "2").stdout.split("\n")
    rows = {words[0]: " ".join(words[1:]) for words in map(str.split, page) if len(words) > 1}
    assert (rows["try"], rows["continues"], rows["continued"]) == ("2 of 4", "job 1", "as job 3")
    assert rows["state"].startswith("exited with 3; job 3 is try 3 of 4")

    ledger.unlink()
    words = ("--retries", "1", "--retry-on", "75,3", *SOON)
    assert daemon.run("run", *words, *fails(ledger, 9), check=False).returncode == 3
    assert ledger.read_text().split() == ["4", "5"]
    ledger.unlink()
    words = ("--retries", "1", "--retry-on", "75", *SOON)
    assert daemon.run("run", *words, *fails(ledger, 9), check=False).returncode == 3
    assert ledger.read_text().split() == ["6"]
    killed = daemon.submit("--retries", "1", "--", "sh", "-c", "kill -9 $$")
    following = daemon.wait_until(killed, "ended")["retried_as"]
    shown = daemon.run("show", str(killed)).stdout
    assert mentions(shown, f"signaled by 9 (SIGKILL); job {following} is try 2 of 2")


def test_a_try_says_what_it_waits_for_and_can_be_brought_forward_or_given_up(
    daemon: Daemon, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    job = daemon.submit("--mem", "1G", "--retries", "3", "--retry-delay", "1h", *fails(ledger, 1))
    after = int(daemon.run("run", "-d", "--mem", "1G", "--after", str(job), "true").stdout)
    waiting = daemon.wait_until(job, "ended")["retried_as"]

    shown = json.loads(daemon.run("show", "--json", str(waiting)).stdout)
    assert (shown["queue"]["blocked_by"], shown["retry_of"]) == ("begin", job)
    asked = {key: shown["queue"][key] for key in ("retries", "retried", "retry_on", "retry_delay")}
    assert asked == {"retries": 3, "retried": 1, "retry_on": [], "retry_delay": 3600.0}
    assert mentions(shown["reason"], "failed", "try 2")
    assert mentions(daemon.run("status").stdout, "try 2 not before")
    assert daemon.job(after)["queue"]["after"] == [f"{waiting}:ok"], "it waits for the last try"

    assert mentions(daemon.run("edit", str(waiting), "--retries", "5").stdout, "retries 3 to 5")
    daemon.run("edit", str(waiting), "--begin", "now")
    assert daemon.wait_until(after, "ended")["exit_status"] == 0
    assert [each["exit_status"] for each in daemon.tries(job)] == [3, 0]


def test_a_dependency_is_met_once_and_not_with_each_try(daemon: Daemon, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"until test -e {gate}; do sleep 0.05; done; test $GPULEASE_JOB -gt 2"
    words = ("--mem", "1G", "--retries", "1", *SOON, "--", "sh", "-c", script)
    job = daemon.submit(*words)
    after = int(daemon.run("run", "-d", "--mem", "1G", "--after", str(job), "true").stdout)
    gate.touch()
    daemon.wait_until(after, "ended")
    kinds = [each["kind"] for each in daemon.job(after)["events"]]
    found = [kind for kind in kinds if kind.startswith("dependency")]
    assert found == ["dependency_tried_again", "dependency_met"]


def test_each_element_of_an_array_is_tried_again_for_itself(daemon: Daemon, tmp_path: Path) -> None:
    script = f"echo >>{tmp_path}/$GPULEASE_ARRAY_INDEX; test $GPULEASE_ARRAY_INDEX -eq 1"
    script += f" || test $(wc -l <{tmp_path}/$GPULEASE_ARRAY_INDEX) -gt 1"
    options = ("--array", "0-2", "--retries", "1", *SOON)
    daemon.run("run", "--mem", "1G", *options, "--", "sh", "-c", script)
    assert daemon.run("wait", "1").returncode == 0
    starts = [(tmp_path / f"{index}").read_text().count("\n") for index in range(3)]
    assert starts == [2, 1, 2]
    labels = sorted(job["label"] for job in daemon.jobs() if job["retry_of"])
    assert labels == ["1_0", "1_2"]


@pytest.mark.parametrize("is_ended_first", [True, False])
def test_a_crash_of_the_daemon_loses_no_try_and_makes_none_twice(
    daemon: Daemon, tmp_path: Path, is_ended_first: bool
) -> None:
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"
    script = f"echo $GPULEASE_JOB >>{ledger}; until test -e {gate}; do sleep 0.05; done; exit 3"
    job = daemon.submit(
        "--mem", "1G", "--retries", "1", "--retry-delay", "1h", "--", "sh", "-c", script
    )
    daemon.wait_until(job, "active")
    record = daemon.state / "jobs" / str(job) / "record"
    if is_ended_first:
        gate.touch()
        daemon.wait_until(job, "ended")
    daemon.kill()
    gate.touch()
    wait_for("its shim noted the end", lambda: b'"exited"' in record.read_bytes())
    daemon.start()
    waiting = daemon.wait_until(job, "ended")["retried_as"]
    daemon.kill()
    daemon.start()
    assert [each["id"] for each in daemon.jobs() if each["retry_of"] == job] == [waiting]

    daemon.run("edit", str(waiting), "--begin", "now")
    assert [each["exit_status"] for each in daemon.tries(job)] == [3, 3]
    assert ledger.read_text().split() == [str(job), str(waiting)]


def test_what_the_user_interrupts_is_not_tried_again(daemon: Daemon) -> None:
    script = "trap 'exit 1' INT TERM; echo up; while :; do sleep 0.05; done"
    for number in (signal.SIGINT, signal.SIGTERM):
        words = ("run", "--mem", "1G", "--retries", "3", *SOON, "--", "sh", "-c", script)
        run = daemon.open(*words, stdout=subprocess.PIPE)
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        run.send_signal(number)
        run.communicate(timeout=60)
        assert run.returncode == 1
    assert [(job["exit_status"], job["retried_as"]) for job in daemon.jobs()] == [(1, None)] * 2


def test_ctrl_c_gives_up_the_tries_that_are_left(daemon: Daemon, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    words = ("run", "--mem", "1G", "--retries", "3", *fails(ledger, 9))
    run = daemon.open(*words, stderr=subprocess.PIPE)
    daemon.wait_until(1, "ended")
    daemon.wait_until(2, "queued")
    wait_for("it is followed", lambda: daemon.job(2)["queue"]["blocked_by"] == "begin")
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert (run.returncode, daemon.wait_until(2, "ended")["outcome"]) == (-2, "cancelled")
