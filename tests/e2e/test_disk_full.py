"""The disk that the record is on is full, and later it is not: nothing is lost, and it is said."""

from collections.abc import Callable
from pathlib import Path

from .conftest import Daemon, fill, wait_for


def test_a_full_disk_is_told_and_nothing_is_lost(
    small_disk: Path, make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon(settings={"grace": "1s"})
    daemon.state.symlink_to(small_disk / "state")
    (small_disk / "state").mkdir()
    daemon.start()
    gate = tmp_path / "gate"
    script = f"while ! test -e {gate}; do sleep 0.05; done; echo said; exit 5"
    running = daemon.submit("--mem", "6G", "--", "sh", "-c", script)
    waiting = daemon.submit("--mem", "6G", "--gpus", "2", "--", "sh", "-c", "exit 6")
    pid = daemon.wait_until(running, "active")["pid"]
    ballast = fill(small_disk)
    refused = [daemon.run("run", "-d", "--mem", "1G", "--", "true", check=False) for _ in range(3)]
    assert any(done.returncode == 125 for done in refused), "a full disk takes no job for long"
    for done in refused:
        if done.returncode:
            assert "cannot write the record" in done.stderr
            assert "hint:" in done.stderr
    gate.touch()
    wait_for("the job has ended", lambda: not Path(f"/proc/{pid}").exists())
    assert daemon.run("status", "--json").returncode == 0
    ballast.unlink()
    assert daemon.wait_until(running, "ended")["exit_status"] == 5
    assert daemon.wait_until(waiting, "ended")["exit_status"] == 6
    assert "Traceback" not in daemon.log
