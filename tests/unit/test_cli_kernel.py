"""What `gpulease kernel` refuses, and what it leaves alone."""

import json
import sys
from pathlib import Path

import pytest

from goldens import mentions
from gpulease.cli.app import call


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the data directory of Jupyter of a user with the python of the tests."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    return tmp_path


def spec(folder: Path, name: str, **metadata: object) -> Path:
    path = folder / "kernels" / name
    path.mkdir(parents=True)
    (path / "kernel.json").write_text(json.dumps({"metadata": metadata}))
    return path


@pytest.mark.parametrize(
    ("words", "status", "hint"),
    [
        (["install"], 2, "--mem 4G"),
        (["install", "--mem", "4 apples"], 2, "4G"),
        (["install", "--mem", "4G", "--", "--gpus", "2", "--frob"], 2, "run --help"),
        (["install", "--mem", "4G", "--", "--gpus", "x"], 2, "run --help"),
        (["install", "--mem", "4G", "--", "--gpus", "2", "extra"], 2, "run --help"),
        (["install", "--mem", "4G", "--name", "My Kernel"], 2, "--display-name"),
        (["install", "--mem", "4G", "--name", ".."], 2, "--display-name"),
        (["install", "--mem", "4G"], 125, "pip install ipykernel"),
        (["remove"], 2, "gpulease kernel list"),
        (["remove", "python3"], 2, "gpulease kernel list"),
        (["start"], 2, "--help"),
    ],
)
def test_refusals_say_what_to_do(
    words: list[str], status: int, hint: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = spec(home, "python3")
    assert call(["kernel", *words]) == status
    assert mentions(capsys.readouterr().err, "hint:", hint)
    assert theirs.exists()


def test_only_kernels_of_gpulease_are_listed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec(home, "python3")
    spec(home, "mine", gpulease={"run": ["--mem", "4G"], "idle": 0})
    spec(home, "odd", gpulease="no")
    assert call(["kernel", "list"]) == 0
    listed = capsys.readouterr().out
    assert mentions(listed, "mine", "--mem 4G", "IDLE") and listed.count("\n") == 2


def test_a_name_that_is_given_twice_and_a_link_are_removed(home: Path, tmp_path: Path) -> None:
    for name in ("one", "linked"):
        spec(home, name, gpulease={"run": ["--mem", "4G"], "idle": 0})
    elsewhere = (home / "kernels" / "linked").rename(tmp_path / "elsewhere")
    (home / "kernels" / "linked").symlink_to(elsewhere)
    assert call(["kernel", "remove", "one", "one", "linked"]) == 0
    assert not list((home / "kernels").iterdir()) and (elsewhere / "kernel.json").exists()
