"""What `doctor` says on the daemon's side of what holds jobs, and of what does not."""

import os
import sys
from pathlib import Path

import pytest

from goldens import mentions
from gpulease.daemon.doctor import Doctor
from gpulease.host.enforcement import Circumstances, EnforcementLevels
from gpulease.wire.machine import CheckView


def checks(folder: Path, simulated: str | None) -> dict[str, CheckView]:
    around = Circumstances(simulated is not None, "systemd does not run here", None)
    ladder = EnforcementLevels(around, None, lambda: None)
    examination = Doctor(lambda: None, lambda: None, simulated, folder, Path("/usr"), ladder.views)
    found = examination.results().checks
    return {each.message.partition(":")[0] if each.mend else each.name: each for each in found}


def test_where_gpus_are_simulated_nothing_is_said_to_be_limited(tmp_path: Path) -> None:
    found = checks(tmp_path, "2x8G")
    assert mentions(found["hooks"].message, "simulated")
    assert mentions(found["not enforced by framework"].message, "simulated")


def test_what_does_not_hold_is_said_with_what_that_leaves_open(tmp_path: Path) -> None:
    for simulated in ("2x8G", None):
        found = checks(tmp_path, simulated)
        missing = {name: each.mend or "" for name, each in found.items() if "not enforced" in name}
        assert len(missing) == (4 if simulated else 3)
        assert len(set(missing.values())) == len(missing)
        assert not any(".md" in each for each in missing.values()), "not everybody has the docs"


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
    examination = Doctor(
        seen=lambda: None,
        driver=lambda: None,
        simulated="1x8G",
        state=tmp_path,
        hooks=Path("/usr"),
        levels=tuple,
    )
    found = {each.name: each for each in examination.results().checks}
    assert found["python"].state == "failure"
    assert mentions(found["python"].message, str(python))
    assert found["python"].message.endswith(str(place))
