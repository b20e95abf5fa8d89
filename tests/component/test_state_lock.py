"""The lock of a state directory: for one daemon, and free soon after a kill of its holder."""

import fcntl
import os
from pathlib import Path
from threading import Timer

import pytest

from gpulease.errors import StateUnusable
from gpulease.host.state_dir import StateDirectory
from gpulease.user_daemon import LOCK


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    try:
        with pytest.raises(StateUnusable, match="another gpuleased"):
            StateDirectory(tmp_path)
    finally:
        first.close()
    StateDirectory(tmp_path).close()


def test_a_holder_that_is_about_to_end_is_awaited(tmp_path: Path) -> None:
    """Such as a child of a killed daemon that has not executed its program yet."""
    holder = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(holder, fcntl.LOCK_EX)
    end = Timer(0.05, os.close, (holder,))
    end.start()
    StateDirectory(tmp_path, lock_within_s=60).close()
    end.join()
