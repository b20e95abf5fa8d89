"""SIGHUP: settings change under running jobs; what cannot change is said, what is wrong refused."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .conftest import Daemon, wait_for


def reload(daemon: Daemon, text: str, until: str) -> None:
    assert daemon.process is not None
    before = len(daemon.log)
    (daemon.folder / "config.toml").write_text(text)
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(f"the log says {until!r}", lambda: until in daemon.log[before:])


def test_a_smaller_margin_lets_a_waiting_job_in(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"margin": "4G", "grace": "2s"}).start()
    holder = daemon.submit("--gpus", "2", "--mem", "3G", "--", "sleep", "600")
    waiting = daemon.submit("--mem", "3G", "--", "true")
    daemon.wait_until(holder, "active")
    assert daemon.job(waiting)["state"] == "queued"
    reload(
        daemon,
        'margin = "1G"\ngrace = "2s"\ndriver_deadline = "9s"\n',
        "driver_deadline: a restart is needed",
    )
    assert "changed: margin" in daemon.log
    daemon.wait_until(waiting, "ended")
    assert daemon.job(holder)["state"] == "active"


def test_a_bad_file_changes_nothing_and_is_told(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"margin": "1G"}).start()
    reload(daemon, "margin = 1G\n", "the settings stay as they were: cannot read")
    assert daemon.run("status").returncode == 0


def test_settings_can_be_checked_without_a_daemon(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    command = [sys.executable, "-m", "gpulease.daemon", "--check", "--config", str(config)]
    config.write_text('margin = "1G"\n')
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the settings are in order\n")
    config.write_text('simulate = "2x"\n')
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, "simulate" in done.stderr) == (78, True)
