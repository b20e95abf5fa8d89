"""A pass over the queue that fails unexpectedly: the daemon serves, and grants again later."""

import sys
from collections.abc import Callable
from pathlib import Path

from daemon_rig import Daemon, wait_for


class FailingDaemon(Daemon):
    """A daemon that cannot plan while a file exists."""

    def command(self) -> list[str]:
        script = Path(__file__).parent / "daemon_with_failing_passes.py"
        return [sys.executable, str(script), *super().command()[3:]]


def test_a_daemon_with_a_first_pass_that_fails_serves_and_grants_again_later(
    tmp_path: Path, make_daemon: Callable[..., Daemon]
) -> None:
    folder = tmp_path / "failing"
    folder.mkdir()
    fail = folder / "fail"
    fail.touch()
    daemon = FailingDaemon(folder, environment={"PASSES_FAIL": str(fail)})
    daemon.start()
    try:
        first, second = (daemon.submit("--mem", "1G", "--", "true") for _ in range(2))
        assert [job["id"] for job in daemon.status()["jobs"]] == [first, second]
        assert daemon.run("show", str(first)).returncode == 0
        assert daemon.run("cancel", str(first)).returncode == 0
        assert daemon.job(first)["outcome"] == "cancelled"
        assert "RecursionError: a bug" in daemon.log, "with its traceback"
        assert daemon.job(second)["state"] == "queued"
        fail.unlink()
        assert daemon.wait_until(second, "ended")["exit_status"] == 0
        wait_for("it is alive", lambda: daemon.process and daemon.process.poll() is None)
    finally:
        daemon.end_all()
