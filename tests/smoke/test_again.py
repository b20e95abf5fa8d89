"""A job that has ended runs once more, with its command and options in the caller's environment."""

import json
import os
from pathlib import Path

import pytest

from daemon_rig import Daemon

SAY = "import os, sys; print(os.environ.get('GREETING'), os.getcwd(), *sys.argv[1:])"


@pytest.fixture
def ended(daemon: Daemon, tmp_path: Path) -> int:
    line = ("--mem", "1G", "--time", "1h", "--name", "once", "--growth", "python3", "-c", SAY, "x")
    done = daemon.run("run", *line, cwd=tmp_path, env={**os.environ, "GREETING": "one"})
    assert done.stdout == f"one {tmp_path} x\n"
    return int(daemon.jobs()[-1]["id"])


def test_the_command_runs_again_with_the_environment_of_the_caller(
    daemon: Daemon, ended: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "GREETING": "two"}
    done = daemon.run("again", str(ended), "--mem", "2G", cwd="/", env=environment)
    assert done.stdout == f"two {tmp_path} x\n"
    before, after = (daemon.job(each) for each in (ended, int(daemon.jobs()[-1]["id"])))
    assert after["claim"] == before["claim"] | {"memory": 2 << 30}
    assert (after["name"], after["command"]) == (before["name"], before["command"])


def test_a_job_in_the_background_is_there_again(daemon: Daemon) -> None:
    first = daemon.submit("--mem", "1G", "false")
    daemon.wait_until(first, "ended")
    done = daemon.run("again", str(first), "--no-growth")
    again = int(done.stdout)
    assert done.stderr == f"job {again} · again of {first}\n"
    assert daemon.wait_until(again, "ended")["exit_status"] == 1


def test_an_element_of_an_array_keeps_its_index(daemon: Daemon) -> None:
    array = daemon.submit("--mem", "1G", "--array", "3-4", "sh", "-c", "echo $GPULEASE_ARRAY_INDEX")
    for element in (array, array + 1):
        daemon.wait_until(element, "ended")
    again = int(daemon.run("again", f"{array}_4").stdout)
    daemon.wait_until(again, "ended")
    assert daemon.run("logs", f"{again}_4").stdout == "4\n"
    refused = daemon.run("again", str(array), check=False)
    assert (refused.returncode, "name one of its elements" in refused.stderr) == (2, True)


def test_what_cannot_be_repeated_says_why(daemon: Daemon) -> None:
    running = daemon.submit("--mem", "1G", "sleep", "600")
    daemon.wait_until(running, "active")
    held = json.loads(daemon.run("hold", "--mem", "1G", "--for", "1s", "--json").stdout)
    daemon.wait_until(held["job"]["id"], "ended")
    for line, said in (
        ([str(running)], f"cannot repeat job {running}: it has not ended"),
        ([str(held["job"]["id"])], "it was a lease without a command"),
        (["999999"], "no job 999999"),
        ([], "no job to repeat"),
        (["1", "2"], "cannot repeat several jobs"),
    ):
        done = daemon.run("again", *line, check=False)
        assert said in done.stderr
        assert (done.returncode, done.stdout) != (0, "")


def test_the_environment_of_an_ended_job_is_not_kept(daemon: Daemon) -> None:
    done = daemon.run("run", "--mem", "1G", "true", env={**os.environ, "TOKEN": "s3cr3t-value"})
    assert done.returncode == 0
    number = int(daemon.jobs()[-1]["id"])
    daemon.wait_until(number, "ended")
    assert daemon.client.submission(number).environment == {}
