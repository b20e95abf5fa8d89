"""`run --end-with-command`: the job ends with the command, however that ends."""

import signal
import subprocess

import pytest

from daemon_rig import Daemon, alive, wait_for
from goldens import mentions


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_the_job_ends_with_its_command(daemon: Daemon, number: signal.Signals) -> None:
    script = "trap '' HUP; sleep 600 & echo $!; wait"
    words = ("run", "--mem", "1G", "--end-with-command", "--", "sh", "-c", script)
    process = daemon.open(*words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(number)
    process.communicate()
    assert daemon.wait_until(1, "ended")["outcome"] == "cancelled"
    assert not alive([pid])


def test_a_command_that_was_killed_in_the_queue_leaves_a_job_that_does_not_stay(
    daemon: Daemon,
) -> None:
    blocker = daemon.submit("--mem", "8G", "--gpus", "2", "sleep", "600")
    process = daemon.open("run", "--mem", "8G", "--end-with-command", "sleep", "600")
    wait_for("it is queued", lambda: len(daemon.jobs()) == 2)
    process.kill()
    process.wait()
    daemon.cancel(blocker)
    assert daemon.wait_until(2, "ended")["outcome"] == "cancelled"


def test_a_job_that_ends_by_itself_keeps_its_exit_code(daemon: Daemon) -> None:
    assert daemon.run("run", "--mem", "1G", "--end-with-command", "true").returncode == 0
    failed = daemon.run(
        "run", "--mem", "1G", "--end-with-command", "sh", "-c", "exit 3", check=False
    )
    assert failed.returncode == 3
    assert [job["outcome"] for job in daemon.jobs()] == ["exited", "exited"]


def test_in_the_background_there_is_no_command_to_end_with(daemon: Daemon) -> None:
    refused = daemon.run("run", "-d", "--end-with-command", "true", check=False)
    assert refused.returncode == 2
    assert mentions(refused.stderr, "--end-with-command", "-d")
