"""Python environments with one framework each, for tests of the hooks on real packages.

Each is built when a test first needs it, in a cache outside the checkout, and kept. A test is
skipped where the Python that the framework needs is missing; on a machine that has built the
environment before, and wherever that Python is there, a missing framework is a failure.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

BUILD_FOR = 1500
"""Seconds that one installation may take: a framework with CUDA is gigabytes."""


@dataclass(frozen=True)
class Environment:
    """What an environment holds; `python` is a version such as "3.7", "" for that of the tests."""

    requirements: tuple[str, ...]
    python: str = ""


ENVIRONMENTS = {
    "tensorflow-1.13": Environment(("tensorflow==1.13.2", "protobuf<3.20", "wheel<0.38"), "3.6"),
    "tensorflow-1.15": Environment(("tensorflow==1.15.5", "protobuf<3.20"), "3.7"),
    "tensorflow-2.4": Environment(("tensorflow-cpu==2.4.4", "protobuf<3.20"), "3.8"),
    "tensorflow-2.12": Environment(("tensorflow-cpu==2.12.1",), "3.11"),
    "tensorflow-2.19": Environment(("tensorflow-cpu==2.19.1",), "3.11"),
    "tensorflow-2.20": Environment(("tensorflow-cpu==2.20.0",), "3.11"),
    "tensorflow-2.21": Environment(("tensorflow-cpu==2.21.0",), "3.11"),
    "torch-2.9": Environment(("torch==2.9.1", "numpy"), "3.11"),
    "torch": Environment(("torch==2.15.0", "numpy"), "3.11"),
    "jax": Environment(("jax[cuda12]",), "3.11"),
    "cupy": Environment(("cupy-cuda12x[ctk]",), "3.11"),
}


def python_of(name: str) -> str:
    """Return the Python of an environment, which is built first if need be.

    Skips the test where no Python of its version is found, unless it was built here before.
    """
    wanted = ENVIRONMENTS[name]
    folder = _cache() / f"{name}-{_digest(wanted)}"
    with _locked(folder.with_suffix(".lock")):
        if not (folder / "complete").exists():
            _build(name, wanted, folder)
    return str(folder / "bin" / "python")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GPULEASE_TEST_ENVIRONMENTS") or Path(base, "gpulease-tests"))


def _digest(wanted: Environment) -> str:
    return hashlib.sha256(repr(wanted).encode()).hexdigest()[:8]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(name: str, wanted: Environment, folder: Path) -> None:
    python, was_built = interpreter(wanted.python), _cache() / f"{name}.built"
    if python is None:
        if was_built.exists():
            pytest.fail(f"{name} was built on this machine, and Python {wanted.python} is gone")
        pytest.skip(f"no Python {wanted.python}, which {name} needs")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    _run(python, "-m", "venv", str(folder))
    if wanted.python in ("3.6", "3.7"):
        # Theirs knows no manylinux2010 wheel; newer ones need a newer Python.
        _run(*pip, "install", "pip<22")
    _run(*pip, "install", *wanted.requirements)
    (folder / "complete").touch()
    was_built.touch()


def _run(*command: str) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=BUILD_FOR, check=False
    )
    if done.returncode:
        pytest.fail(f"cannot run {' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def interpreter(version: str) -> str | None:
    """Return a Python of `version`, from PATH or pyenv; None if there is none that starts."""
    if version in ("", "{}.{}".format(*sys.version_info)):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    return next((str(path) for path in found if path and _starts(str(path), version)), None)


def _starts(path: str, version: str) -> bool:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [path, "-c", code], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return False
    return done.stdout.strip() == version
