"""What `doctor` says about the daemon's own installation."""

import os
import sys
from pathlib import Path

import pytest

from gpulease.daemon.examine import Examination


@pytest.mark.skipif(os.geteuid() != 0, reason="only of root's daemon is it a question")
def test_a_python_that_users_cannot_reach_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "pyenv"
    place.mkdir(mode=0o700)
    python = place / "python3"
    python.touch(mode=0o755)
    link = tmp_path / "python3"
    link.symlink_to(python)
    monkeypatch.setattr(sys, "executable", str(link))
    examination = Examination(
        seen=lambda: None,
        driver=lambda: None,
        simulated="1x8G",
        state=tmp_path,
        hooks=Path("/usr"),
        rungs=tuple,
    )
    found = {each.name: each for each in examination.results().checks}
    assert found["python"].state == "failure"
    assert f"users cannot run {python}: {place} is closed" in found["python"].message
