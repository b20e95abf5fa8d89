"""Points that a wounded process crosses: at the one that a file names, something is killed.

The standard library alone, since shims cross them too. The file `arm` in the folder that
TORTURE_FOLDER names holds `POINT|ACTION`; whoever comes to that point first takes it away and acts.
"""

import os
import signal
import time
from pathlib import Path

FOLDER = "TORTURE_FOLDER"
DAEMON = "TORTURE_DAEMON"
"""In the environment of what a daemon forks: the pid of that daemon."""

HERE = "here"
"""Kill this process."""
WITH_DAEMON = "both"
"""Kill the daemon, and then this process."""
AFTER_DAEMON = "daemon"
"""Kill the daemon, and go on once it has gone."""
LATE = "late"
"""Kill the daemon, and go on when the tester says so."""
WAIT = "wait"
"""Kill nobody, and go on when the tester says so."""


def arm(folder: Path, point: str, action: str) -> None:
    """Have whoever comes to `point` next in this folder act."""
    (folder / "struck").unlink(missing_ok=True)
    (folder / "hold").touch()
    new = folder / "arm.new"
    new.write_text(f"{point}|{action}")
    new.rename(folder / "arm")


def let_go(folder: Path) -> None:
    """Let go on who waits for the tester."""
    (folder / "hold").unlink(missing_ok=True)


def struck(folder: Path) -> int | None:
    """Return who came to the point since it was armed."""
    try:
        return int((folder / "struck").read_text())
    except FileNotFoundError:
        return None


def cross(point: str) -> None:
    """Be at a point."""
    folder = Path(os.environ[FOLDER])
    try:
        wanted, _, action = (folder / "arm").read_text().partition("|")
        if wanted != point:
            return
        (folder / "arm").rename(folder / "taken")
    except FileNotFoundError:
        return
    (folder / "struck.new").write_text(str(os.getpid()))
    (folder / "struck.new").rename(folder / "struck")
    if action in (WITH_DAEMON, AFTER_DAEMON, LATE):
        _kill_and_see_gone(int(os.environ[DAEMON]))
    if action in (WAIT, LATE):
        while (folder / "hold").exists():
            time.sleep(0.005)
    if action in (HERE, WITH_DAEMON):
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_and_see_gone(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        while True:
            os.kill(pid, 0)
            time.sleep(0.002)
    except ProcessLookupError:
        return
