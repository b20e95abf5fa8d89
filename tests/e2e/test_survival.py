"""The daemon is killed and comes back: nothing that ran ends, nothing that waited is lost."""

import signal
import subprocess
import sys
from pathlib import Path

from daemon_rig import Daemon, wait_for


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


def test_a_shim_that_its_user_has_stopped_does_not_save_its_job(daemon: Daemon) -> None:
    job = daemon.submit("--mem", "1G", "--", "sh", "-c", "kill -STOP $PPID; sleep 600")
    wait_for("it was launched", (daemon.state / f"jobs/{job}/socket").exists)
    daemon.cancel(job)
    assert daemon.wait_until(job, "ended")["outcome"] == "cancelled"


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    def fails(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gpulease.daemon", "--simulate", "8G", *arguments],
            capture_output=True, text=True, timeout=120, check=False, cwd="/",
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
