"""Scripts that are edited while their job waits."""

import os
import shutil
import subprocess
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from daemon_stand_in import views
from gpulease.cli import snapshot
from gpulease.cli.script import script_change, script_place
from gpulease.cli.snapshot import take_directory, take_snapshot
from gpulease.errors import BadUsage, GpuleaseError, TooLarge
from gpulease.fingerprint import fingerprint_of
from gpulease.wire.jobs import JobView


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("train.py", "sweep.sh", "data.csv"):
        (tmp_path / name).write_text(f"first {name}")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("python train.py data.csv", 1),
        ("python -u train.py", 2),
        ("torchrun --nproc 2 train.py", 3),
        ("bash sweep.sh", 1),
        ("./tool train.py", 0),
        ("python -m train train.py", None),
        ("echo data.csv", None),
        ("true", None),
    ],
)
def test_the_script_of_a_command_is_found(home: Path, line: str, place: int | None) -> None:
    assert script_place(line.split(), str(home)) == place


def test_a_copy_runs_with_its_neighbours_and_outlives_an_edit(home: Path) -> None:
    argv, variables = take_snapshot(["python", "train.py", "-x"], home, {"PYTHONPATH": "/lib"})
    (home / "train.py").write_text("second")
    assert Path(argv[1]).read_text() == "first train.py"
    assert Path(argv[1]).stat().st_mode & 0o077 == 0
    assert argv[2] == "-x"
    assert variables["PYTHONPATH"] == f"{home}:/lib"
    assert take_snapshot(["python", "train.py", "-x"], home, {})[0] != argv


def test_the_memory_that_a_script_used_is_known_for_its_copies(home: Path) -> None:
    argv, _ = take_snapshot(["python", "train.py", "-x"], home, {})
    assert fingerprint_of(argv, "/") == fingerprint_of(["python", "train.py", "-x"], str(home))


def test_a_copy_that_nobody_uses_any_more_is_removed(home: Path) -> None:
    argv, _ = take_snapshot(["bash", "sweep.sh"], home, {})
    folder = next(each for each in Path(argv[1]).parents if each.parent.name == "snapshots")
    os.utime(folder, (0, 0))
    take_snapshot(["python", "train.py"], home, {})
    assert not folder.exists()


def test_what_a_killed_command_copied_is_removed_after_a_day(project: Path) -> None:
    _, cwd, _ = take_directory(".", ["true"], project, {})
    (snapshots,) = (each for each in cwd.parents if each.name == "snapshots")
    for name, age in (("dead.part", timedelta(days=2)), ("busy.part", timedelta(hours=1))):
        (snapshots / name).mkdir()
        at = time.time() - age.total_seconds()
        os.utime(snapshots / name, (at, at))
    take_directory(".", ["true"], project, {})
    assert not (snapshots / "dead.part").exists()
    assert (snapshots / "busy.part").exists() and cwd.exists()


def test_what_is_no_script_or_too_large_is_refused(home: Path) -> None:
    with pytest.raises(BadUsage):
        take_snapshot(["echo", "data.csv"], home, {})
    with (home / "train.py").open("wb") as file:
        file.truncate(snapshot.LARGEST + 1)
    with pytest.raises(TooLarge):
        take_snapshot(["python", "train.py"], home, {})


def _job(home: Path, **changed: str | None) -> JobView:
    return views.job(command="python train.py", cwd=str(home), **changed)


def test_a_script_that_changed_since_submission_is_shown(home: Path) -> None:
    now = datetime.fromtimestamp((home / "train.py").stat().st_mtime).astimezone()
    before, after = now - timedelta(hours=1), now + timedelta(hours=1)
    assert script_change(_job(home, submitted_at=after.isoformat())) is None
    waits = script_change(_job(home, submitted_at=before.isoformat()))
    runs = script_change(
        _job(home, state="active", submitted_at=before.isoformat(), started_at=after.isoformat())
    )
    earlier = (before + timedelta(minutes=1)).isoformat()
    late = script_change(
        _job(home, state="active", submitted_at=before.isoformat(), started_at=earlier)
    )
    assert waits and runs and late
    assert len({waits, runs, late}) == 3
    assert all("changed since submission" in said for said in (waits, runs, late))


def test_of_a_script_that_cannot_be_seen_nothing_is_said(home: Path) -> None:
    assert script_change(views.job(command="python train.py")) is None
    assert script_change(_job(home / "elsewhere")) is None
    assert script_change(views.job(command="python 'tra", cwd=str(home))) is None


def test_a_default_leaves_commands_without_a_script_unchanged(home: Path) -> None:
    unchanged = take_snapshot(["sleep", "0"], home, {"A": "b"}, must=False)
    assert unchanged == (["sleep", "0"], {"A": "b"})


@pytest.fixture
def project(home: Path) -> Path:
    root = home / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "data").mkdir()
    for name in ("train.py", "pkg/model.py", "new.py"):
        (root / name).write_text(f"first {name}")
    (root / "data" / "set").write_text("large")
    (root / ".gitignore").write_text("data/\n__pycache__/\n")
    (root / "pkg" / "__pycache__").mkdir()
    (root / "pkg" / "__pycache__" / "model.pyc").write_text("old")
    for words in (("init", "-q"), ("add", "train.py", "pkg", ".gitignore")):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


def test_a_job_runs_in_the_copy_of_its_directory_and_finds_what_git_ignores(project: Path) -> None:
    script = str(project / "train.py")
    variables = {"PYTHONPATH": f"{project}/pkg:/lib"}
    argv, cwd, changed = take_directory("..", ["python", script], project / "pkg", variables)
    copy = cwd.parent
    for name in ("train.py", "pkg/model.py", "new.py"):
        (project / name).write_text("second")
        assert (copy / name).read_text() == f"first {name}"
    assert (argv, cwd.name) == (["python", str(copy / "train.py")], "pkg")
    assert changed["PYTHONPATH"] == f"{copy}/pkg:/lib"
    assert changed["GPULEASE_SUBMIT_DIR"] == str(project / "pkg")
    assert (copy / "data").readlink() == project / "data"
    assert not (copy / ".git").exists() and not (copy / "pkg" / "__pycache__").exists()
    assert take_directory(".", ["true"], project, {})[1] != copy


def test_each_job_has_a_copy_of_its_own_that_counts_as_the_original(project: Path) -> None:
    argv, cwd, _ = take_directory(".", ["python", "-m", "train"], project, {})
    (cwd / "train.py").write_text("changed by the job")
    other = take_directory(".", argv, project, {})[1]
    assert (other / "train.py").read_text() == "first train.py"
    assert fingerprint_of(argv, str(cwd)) == fingerprint_of(argv, str(project))


def test_links_lead_where_they_did_and_empty_directories_are_there(project: Path) -> None:
    (project / "out").mkdir()
    (project / "away").symlink_to("../data.csv")
    (project / "near").symlink_to("train.py")
    _, cwd, _ = take_directory(".", ["true"], project, {})
    assert (cwd / "out").is_dir() and not (cwd / "out").is_symlink()
    assert (cwd / "away").read_text() == "first data.csv"
    assert (cwd / "near").resolve() == cwd / "train.py"


def test_a_submodule_is_copied_and_a_directory_without_git_as_a_whole(project: Path) -> None:
    inner = project / "inner"
    inner.mkdir()
    subprocess.run(["git", "-C", str(inner), "init", "-q"], check=True)
    (inner / "part.py").write_text("part")
    not_fetched = f"160000,{'1' * 40},empty"
    index = ("update-index", "--add", "--cacheinfo", not_fetched)
    subprocess.run(["git", "-C", str(project), *index], check=True)
    (project / "empty").mkdir()
    _, cwd, _ = take_directory(".", ["true"], project, {})
    assert (cwd / "inner" / "part.py").read_text() == "part"
    assert list((cwd / "empty").iterdir()) == []
    shutil.rmtree(project / ".git")
    shutil.rmtree(inner / ".git")
    _, cwd, _ = take_directory(".", ["true"], project, {})
    assert (cwd / "data" / "set").read_text() == "large" and not (cwd / "data").is_symlink()


def test_what_cannot_be_copied_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, script in (("missing", "train.py"), ("data", "train.py"), (".", "../train.py")):
        with pytest.raises(BadUsage):
            take_directory(directory, ["python", script], project, {})
    with monkeypatch.context() as patch:
        # As of a checkout of another user, where git is not told to trust all.
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        with pytest.raises(GpuleaseError, match=r"git says: .*ownership"):
            take_directory(".", ["true"], project, {})
    with (project / "new.py").open("wb") as file:
        file.truncate(snapshot.LARGEST_DIRECTORY + 1)
    with pytest.raises(TooLarge):
        take_directory(".", ["true"], project, {})
    (copies,) = project.parent.glob("state/gpulease/*/snapshots")
    assert list(copies.iterdir()) == []
