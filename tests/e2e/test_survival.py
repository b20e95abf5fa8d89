"""The daemon is killed and comes back: nothing that ran ends, nothing that waited is lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon_rig import Daemon, alive, wait_for


def test_killing_the_run_command_leaves_the_job_running(daemon: Daemon) -> None:
    run = daemon.open("run", "--mem", "1G", "--", "sleep", "600", stdout=subprocess.DEVNULL)
    daemon.wait_until(1, "active") if wait_for(
        "it is known", lambda: daemon.status()["jobs"]
    ) else 0
    run.kill()
    run.wait()
    daemon.kill()
    daemon.start()
    assert daemon.job(1)["state"] == "active"


def test_a_signal_to_the_run_command_goes_to_the_job(daemon: Daemon) -> None:
    script = "trap 'echo got usr1; exit 9' USR1; echo up; while :; do sleep 0.05; done"
    run = daemon.open("run", "--mem", "1G", "--", "bash", "-c", script, stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    run.send_signal(signal.SIGUSR1)
    assert run.communicate(timeout=60)[0] == b"got usr1\n"
    assert run.returncode == 9


def test_ctrl_c_interrupts_the_job_and_the_status_says_by_which_signal(daemon: Daemon) -> None:
    script = "import time; print('up', flush=True); time.sleep(600)"
    run = daemon.open(
        "run", "--mem", "1G", "--", "python3", "-c", script,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert b"KeyboardInterrupt" in err
    assert run.returncode in (1, -signal.SIGINT)


def test_a_failed_job_ends_its_command_though_the_daemon_does_not_answer(daemon: Daemon) -> None:
    run = daemon.open(
        "run", "--mem", "1G", "--", "sh", "-c", "echo up; read line; exit 3",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == b"up\n"
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        # Less than the 30 seconds that an answer may otherwise take.
        run.communicate(b"go on\n", timeout=20)
        assert run.returncode == 3
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def test_ctrl_c_ends_a_command_that_waits_though_the_daemon_does_not_answer(
    daemon: Daemon,
) -> None:
    daemon.wait_until(daemon.submit("--exclusive", "--gpus", "2", "--", "sleep", "600"), "active")
    run = daemon.open("run", "--mem", "1G", "--", "true", stderr=subprocess.PIPE)
    wait_for("it waits", lambda: len(daemon.status()["jobs"]) == 2)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=20)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert run.returncode == -signal.SIGINT
    assert b"job 2 " in err
    # The daemon had the request all the same.
    assert daemon.wait_until(2, "ended")["outcome"] == "cancelled"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_cancels_the_job_and_ends_the_command(
    daemon: Daemon, signum: signal.Signals
) -> None:
    daemon.wait_until(daemon.submit("--exclusive", "--gpus", "2", "--", "sleep", "600"), "active")
    run = daemon.open("run", "--mem", "1G", "--", "true", stderr=subprocess.PIPE)
    wait_for("it waits", lambda: len(daemon.status()["jobs"]) == 2)
    run.send_signal(signum)
    run.communicate(timeout=60)
    assert run.returncode == -signum
    assert len(daemon.status()["jobs"]) == 1
    assert daemon.job(2)["outcome"] == "cancelled"


def test_a_job_whose_shim_is_killed_ends_as_lost_and_leaves_no_process(daemon: Daemon) -> None:
    job = daemon.submit("--mem", "1G", "--", "sh", "-c", "setsid sleep 600 & sleep 600")
    daemon.wait_until(job, "active")
    pid = daemon.job(job)["pid"]
    shim = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(shim, signal.SIGKILL)
    ended = daemon.wait_until(job, "ended")
    assert ended["outcome"] == "lost"
    assert "shim" in ended["reason"]
    assert alive([pid]) == []


def test_cancelled_jobs_leave_no_process_however_stubborn(daemon: Daemon, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ >>{pids}; while :; do sleep 1; done' & echo $$ >>{pids}; while :; do sleep 1; done"  # noqa: E501
    job = daemon.submit("--mem", "1G", "--", "bash", "-c", script)
    wait_for("both are up", lambda: pids.exists() and len(pids.read_text().split()) == 2)
    daemon.cancel(job)
    assert daemon.job(job)["state"] in ("releasing", "ended")
    daemon.wait_until(job, "ended")
    assert alive([int(pid) for pid in pids.read_text().split()]) == []


def test_a_shim_that_its_user_has_stopped_does_not_save_its_job(daemon: Daemon) -> None:
    job = daemon.submit("--mem", "1G", "--", "sh", "-c", "kill -STOP $PPID; sleep 600")
    wait_for("it was launched", (daemon.state / f"jobs/{job}/socket").exists)
    daemon.cancel(job)
    assert daemon.wait_until(job, "ended")["outcome"] == "cancelled"


def test_with_its_database_gone_a_new_job_meets_no_record_of_an_old_one(daemon: Daemon) -> None:
    first = daemon.submit("--mem", "1G", "--", "sh", "-c", "echo old; exit 1")
    daemon.wait_until(first, "ended")
    daemon.kill(signal.SIGTERM)
    for file in daemon.state.glob("gpulease.db*"):
        file.unlink()
    daemon.start()
    second = daemon.submit("--mem", "1G", "--", "sh", "-c", "echo new; exit 3")
    assert second > first
    assert daemon.wait_until(second, "ended")["exit_status"] == 3
    assert daemon.run("logs", str(second)).stdout == "new\n"


def test_a_job_that_ended_while_nobody_was_there_to_tell_is_shown_in_full(
    daemon: Daemon, tmp_path: Path
) -> None:
    holder = daemon.submit("--exclusive", "--gpus", "2", "--", "sleep", "600")
    daemon.wait_until(holder, "active")
    run = daemon.open(
        "run", "--mem", "1G", "--", "sh", "-c", "echo precious; exit 5", stdout=subprocess.PIPE
    )
    wait_for("it waits", lambda: len(daemon.status()["jobs"]) == 2)
    run.send_signal(signal.SIGSTOP)
    daemon.cancel(holder)
    daemon.wait_until(2, "ended")
    daemon.kill()
    run.send_signal(signal.SIGCONT)
    daemon.start()
    assert run.communicate(timeout=60)[0] == b"precious\n"
    assert run.returncode == 5


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    def fails(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gpulease.daemon", "--simulate", "8G", *arguments],
            capture_output=True, text=True, timeout=60, check=False, cwd="/",
        )  # fmt: skip
        assert done.returncode in (78, 125), done
        assert "Traceback" not in done.stderr
        assert "hint:" in done.stderr
        return done.stderr

    state = str(tmp_path / "state")
    assert "200 bytes" in fails("--state", state, "--socket", "/tmp/" + "x" * 195)
    file = tmp_path / "file"
    file.write_text("")
    for state in (str(file / "x"), "/proc/1/nowhere"):
        assert state in fails("--state", state, "--socket", str(tmp_path / "s"))


def test_without_a_driver_the_daemon_says_how_to_simulate(
    make_daemon: Callable[..., Daemon],
) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        return
    made = make_daemon(simulate=None)
    done = subprocess.run(
        made.command(), capture_output=True, text=True, timeout=60, check=False,
        env={key: it for key, it in os.environ.items() if key != "GPULEASE_SIMULATE"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "--simulate" in done.stderr
