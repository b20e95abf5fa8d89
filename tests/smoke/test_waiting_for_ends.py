"""`gpulease wait`: the end of jobs, as an exit code."""

import signal
import subprocess
from pathlib import Path

from daemon_rig import Daemon, wait_for


def submit(daemon: Daemon, script: str, name: str = "job", memory: str = "1G") -> int:
    return daemon.submit("--mem", memory, "--name", name, "--", "sh", "-c", script)


def waited(daemon: Daemon, *arguments: str) -> tuple[int, str]:
    done = daemon.run("wait", *arguments, check=False)
    return done.returncode, done.stdout


def test_wait_exits_with_the_worst_status_and_prints_nothing(daemon: Daemon) -> None:
    jobs = [submit(daemon, f"exit {code}", f"end-{code}") for code in (0, 3, 2)]
    numbers = [str(job) for job in jobs]
    assert waited(daemon, *numbers) == (3, "")
    assert waited(daemon, numbers[0], "end-0") == (0, "")
    assert waited(daemon, "last") == (2, "")
    assert waited(daemon, "4711")[0] == 125
    assert daemon.run("wait", "--all").returncode == 0


def test_wait_follows_live_jobs_by_pattern_the_first_of_several_and_gives_up_in_time(
    daemon: Daemon, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = submit(daemon, f"while ! test -e {gate}; do sleep 0.05; done; exit 4", "sweep-1")
    short = submit(daemon, "exit 6", "sweep-2")
    assert waited(daemon, "--any", str(held), str(short)) == (6, "")
    assert waited(daemon, "--timeout", "1s", str(held)) == (75, "")
    waiting = daemon.open("wait", "--name", "sweep*", stderr=subprocess.PIPE)
    assert waiting.stderr is not None
    assert b"sweep-1" in waiting.stderr.readline()
    gate.touch()
    waiting.communicate(timeout=120)
    assert waiting.returncode == 4


def test_a_wait_survives_a_restart_of_the_daemon_and_ctrl_c_ends_only_the_wait(
    daemon: Daemon, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = submit(daemon, f"while ! test -e {gate}; do sleep 0.05; done; exit 5", "restart")
    daemon.wait_until(job, "active")
    waiting, ended = (
        daemon.open("wait", "--name", "restart", stderr=subprocess.PIPE) for _ in range(2)
    )
    assert waiting.stderr is not None
    assert ended.stderr is not None
    # What they wait for is known from here on.
    assert b"restart" in waiting.stderr.readline()
    assert b"restart" in ended.stderr.readline()
    ended.send_signal(signal.SIGINT)
    ended.communicate(timeout=120)
    assert ended.returncode == -signal.SIGINT
    daemon.kill()
    assert b"daemon" in waiting.stderr.readline()
    daemon.start()
    assert daemon.job(job)["state"] == "active"
    gate.touch()
    waiting.communicate(timeout=120)
    assert waiting.returncode == 5


def test_a_retried_job_is_waited_for_to_its_last_attempt(daemon: Daemon, tmp_path: Path) -> None:
    once = tmp_path / "once"
    script = (
        f"if test -e {once}; then exit 0; fi; touch {once}; "
        "echo torch.cuda.OutOfMemoryError: CUDA out of memory >&2; exit 1"
    )
    job = daemon.submit("--mem", "1G", "--retry-oom", "1.5x", "--", "sh", "-c", script)
    assert waited(daemon, str(job)) == (0, "")
    wait_for("the retry is known", lambda: daemon.job(job)["retried_as"])


def test_one_connection_waits_for_ten_thousand_jobs(daemon: Daemon) -> None:
    submit(daemon, "exit 0")
    jobs = [submit(daemon, "exit 0") for _ in range(20)]
    daemon.wait_until(jobs[-1], "ended")
    for job in jobs:
        daemon.wait_until(job, "ended")
    # Ended jobs are the slow case: each is read from the database.
    ends = list(daemon.client.ends(jobs * 500))
    assert sorted(job.id for job in ends) == jobs
