"""Programs that another user's environment names: gpulease does not run them as root."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from goldens import mentions
from gpulease.cli.caller import trusted_environment
from gpulease.cli.doctor import Python
from gpulease.setup import install
from process_rig import PYTHON

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="it is about what root does")


class Trap:
    """A home with a virtual environment, whose python leaves a mark when it runs."""

    def __init__(self, folder: Path, user: pwd.struct_passwd) -> None:
        self.home, self.mark = folder / "home", folder / "mark"
        self.venv = self.home / "venv"
        (self.venv / "bin").mkdir(parents=True)
        self.program("python")
        self.program("python3")
        (self.home / "sitecustomize.py").write_text(f"open({str(self.mark)!r}, 'w')\n")
        for part in (self.home, *self.home.rglob("*")):
            os.lchown(part, user.pw_uid, user.pw_gid)

    def program(self, name: str) -> Path:
        path = self.venv / "bin" / name
        path.write_text(f'#!/bin/sh\ntouch {self.mark}\nexec {PYTHON} "$@"\n')
        path.chmod(0o755)
        return path


@pytest.fixture
def trap(tmp_path: Path, user: pwd.struct_passwd) -> Trap:
    return Trap(tmp_path, user)


def gpulease(
    tmp_path: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpulease.cli", "--socket", str(tmp_path / "none"), *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd="/",
        env={"PATH": os.environ["PATH"], "COLUMNS": "400", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("by", ["VIRTUAL_ENV", "PATH", "link"])
def test_doctor_as_root_runs_no_python_of_another_user_and_says_so(
    tmp_path: Path, trap: Trap, user: pwd.struct_passwd, by: str
) -> None:
    given = {"VIRTUAL_ENV": str(trap.venv)}
    if by == "PATH":
        given = {"PATH": f"{trap.venv}/bin:/usr/bin:/bin"}
    elif by == "link":
        # Root's own link, which passes a link of the user's on its way to root's python.
        python = tmp_path / "roots" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(trap.home / "python")
        (trap.home / "python").symlink_to(PYTHON)
        os.lchown(trap.home / "python", user.pw_uid, user.pw_gid)
        given = {"VIRTUAL_ENV": str(python.parents[1])}
    done = gpulease(tmp_path, "doctor", **given)
    assert mentions(done.stdout, f"{trap.home} ", str(user.pw_uid))
    assert not trap.mark.exists()


def test_roots_python_imports_nothing_from_where_the_environment_says(
    trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(trap.home))
    monkeypatch.setenv("HOME", str(trap.home))
    asked = Python.of_the_caller()
    assert asked.checks[0].state == "ok", asked
    assert not trap.mark.exists()


def test_roots_programs_load_libraries_from_directories_of_root_alone(
    tmp_path: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{trap.home}:{tmp_path}:relative")
    monkeypatch.setenv("LD_PRELOAD", "")
    trusted = trusted_environment()
    assert trusted.keys() == {"PATH", "HOME", "LD_LIBRARY_PATH"}
    assert trusted["LD_LIBRARY_PATH"] == str(tmp_path)


def test_run_as_root_refuses_a_python_or_shell_of_another_user_that_the_environment_chose(
    tmp_path: Path, trap: Trap
) -> None:
    (tmp_path / "train.py").touch()
    shell = trap.venv / "bin" / "python"
    for arguments, given in (
        (("run", str(tmp_path / "train.py")), {"VIRTUAL_ENV": str(trap.venv)}),
        (("run", "--shell"), {"SHELL": str(shell)}),
    ):
        done = gpulease(tmp_path, *arguments, **given)
        assert done.returncode == 126, done
        assert mentions(done.stderr, str(shell), f"{trap.home} ")
        assert f"gpulease run -- {shell}" in done.stderr
    assert not trap.mark.exists()


def test_the_installer_calls_no_program_that_the_environment_chose(
    trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap.program("true")
    monkeypatch.setenv("PATH", f"{trap.venv}/bin:/usr/bin:/bin")
    install._call("true")
    assert not trap.mark.exists()
