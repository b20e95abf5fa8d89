"""A daemon that is told to go, while others still listen to it, leaves without an alarm."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from daemon_rig import Daemon


def test_streams_that_end_with_the_daemon_are_no_errors(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(forked=False).start()
    running = daemon.submit("--mem", "8G", "--gpus", "2", "sleep", "600")
    daemon.wait_until(running, "active")
    words = tmp_path / "words"
    with words.open("wb") as stderr:
        waiting = daemon.open("run", "--mem", "8G", "true", stderr=stderr)
        reading = daemon.open("logs", "-f", str(running), stdout=subprocess.DEVNULL)
        daemon.wait_until(running + 1, "queued")
        daemon.kill(signal.SIGTERM)
        assert daemon.process is not None
        assert daemon.process.returncode == 0
        daemon.start()
        daemon.cancel(running)
        assert waiting.wait(120) == 0, "its turn was kept"
        reading.kill()
        reading.wait()
    assert "Traceback" not in daemon.log
    assert "ERROR" not in daemon.log


def test_a_command_that_leaves_nothing_behind_is_not_said_to(daemon: Daemon) -> None:
    for _ in range(8):
        daemon.run("run", "--mem", "1G", "true")
    for job in range(1, 9):
        kinds = [event["kind"] for event in daemon.wait_until(job, "ended")["events"]]
        assert "main_exited" not in kinds
