"""SIGHUP: settings change under running jobs; what cannot change is said, what is wrong refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from daemon_rig import Daemon, wait_for
from goldens import mentions


def reload(daemon: Daemon, text: str, until: str) -> None:
    assert daemon.process is not None
    before = len(daemon.log)
    (daemon.folder / "config.toml").write_text(text)
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(f"the log says {until!r}", lambda: until in daemon.log[before:])


def test_a_smaller_margin_lets_a_waiting_job_in(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"margin": "4G", "grace": "2s"}).start()
    holder = daemon.submit("--gpus", "2", "--mem", "3G", "--", "sleep", "600")
    daemon.wait_until(holder, "active")
    waiting = daemon.submit("--mem", "3G", "--", "true")
    assert daemon.job(waiting)["state"] == "queued"
    reload(
        daemon,
        'margin = "1G"\ngrace = "2s"\ndriver_deadline = "9s"\n',
        "driver_deadline",
    )
    wait_for("the margin is named", lambda: "margin" in daemon.log)
    daemon.wait_until(waiting, "ended")
    assert daemon.job(holder)["state"] == "active"


def test_a_bad_file_changes_nothing_and_is_told(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"margin": "1G"}).start()
    reload(daemon, "margin = 1G\n", "config.toml")
    assert daemon.status()


def test_a_table_for_a_user_that_nobody_knows_is_told_of(
    make_daemon: Callable[..., Daemon],
) -> None:
    tables = '[users.nobodyhere]\noveruse = "warn"\n'
    daemon = make_daemon(settings={"margin": "1G"}, tables=tables).start()
    wait_for("it is told at the start", lambda: "[users.nobodyhere]" in daemon.log)
    reload(daemon, '[groups.nogroup123]\noveruse = "warn"\n', "[groups.nogroup123]")


def test_settings_can_be_checked_without_a_daemon(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    command = [sys.executable, "-m", "gpulease.daemon", "--check", "--config", str(config)]
    config.write_text('margin = "1G"\n')
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    in_order = done.stdout
    config.write_text(f"[users.nobodyhere]\n[users.{tmp_path.owner()}]\n[groups.nogroup123]\n")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    user, group, end = done.stdout.splitlines()
    assert mentions(user, "warning: ", "[users.nobodyhere]")
    assert mentions(group, "warning: ", "[groups.nogroup123]")
    assert end == in_order.strip()
    config.write_text('simulate = "2x"\n')
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, "simulate" in done.stderr) == (78, True)


def test_a_daemon_of_ones_own_has_settings_too(tmp_path: Path) -> None:
    config, log = tmp_path / "gpulease" / "config.toml", tmp_path / "log"
    config.parent.mkdir()
    config.write_text('margin = "1G"\n')
    kept = {key: value for key, value in os.environ.items() if "GPULEASE" not in key}
    folders = dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"), str(tmp_path))
    tmp_path.chmod(0o700)
    with log.open("wb") as said:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "gpulease.daemon", "--personal", "--simulate", "1x8G"],
            env={**kept, **folders}, stderr=said,
        )  # fmt: skip
    try:
        wait_for("it is ready", lambda: str(tmp_path) in log.read_text())
        config.write_text('margin = "1G"\noveruse = "warn"\n')
        daemon.send_signal(signal.SIGHUP)
        wait_for("it has read them", lambda: "overuse" in log.read_text())
        config.unlink()
        daemon.send_signal(signal.SIGHUP)
        wait_for("it has the usual ones", lambda: "margin" in log.read_text())
        assert daemon.poll() is None
    finally:
        daemon.terminate()
        daemon.wait()
    config.write_text(f'state = "{tmp_path}"\n')
    command = [sys.executable, "-m", "gpulease.daemon", "--personal", "--check"]
    done = subprocess.run(
        command, check=False, env={**kept, **folders}, capture_output=True, text=True
    )
    assert (done.returncode, "state" in done.stderr) == (78, True), done.stderr
