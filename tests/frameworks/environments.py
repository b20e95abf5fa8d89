"""Python environments with one framework each, for tests of the hooks on real packages.

`make test-slow` builds its environments first, by `python -m frameworks.environments`, in a cache
outside the checkout, and keeps them; `make test-frameworks` builds those of MORE_VERSIONS too. A
test that runs alone builds what it needs. Frameworks for
Pythons that gpulease itself supports are always required. One for an older Python is skipped where
that Python is missing, unless the machine has built it before: then it is a failure.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

BUILD_FOR = 1500
"""Seconds that one installation may take: a framework with CUDA is gigabytes."""
OWN_PYTHON = "{}.{}".format(*sys.version_info)
AT_ONCE = 2
"""Installations at a time: one downloads while the other unpacks."""


class BuildError(Exception):
    """An environment cannot be built."""


class NoInterpreter(Exception):
    """The Python that an environment needs is not on this machine."""


@dataclass(frozen=True)
class Environment:
    """What an environment holds; `python` is a version such as "3.7", "" for that of the tests."""

    requirements: tuple[str, ...]
    python: str = ""
    surplus: tuple[str, ...] = field(default=(), repr=False)
    """Large packages that a requirement installs and no test needs; removed again."""


ENVIRONMENTS = {
    "tensorflow-1.13": Environment(("tensorflow==1.13.2", "protobuf<3.20"), "3.6"),
    "tensorflow-1.14": Environment(("tensorflow==1.14.0", "protobuf<3.20"), "3.7"),
    "tensorflow-1.15": Environment(("tensorflow==1.15.5", "protobuf<3.20"), "3.7"),
    "tensorflow-2.4": Environment(("tensorflow-cpu==2.4.4", "protobuf<3.20"), "3.8"),
    "tensorflow-2.12": Environment(("tensorflow-cpu==2.12.1",), "3.11"),
    "tensorflow-2.19": Environment(("tensorflow-cpu==2.19.1",), "3.11"),
    "tensorflow-2.20": Environment(("tensorflow-cpu==2.20.0",), "3.11"),
    "torch-2.9": Environment(("torch==2.9.1", "numpy"), surplus=("triton",)),
    "torch": Environment(
        ("torch==2.14.1", "numpy", "accelerate==1.15.0", "lightning==2.6.6", "keras==3.15.1"),
        surplus=("triton",),
    ),
    # The plugin without CUDA's libraries: it is imported, and stops where it looks for them.
    "jax": Environment(
        ("jax==0.10.2", "jax-cuda12-plugin==0.10.2", "jax-cuda12-pjrt==0.10.2", "keras==3.15.1")
    ),
    "client": Environment(("msgspec", "rich", "typer<0.30"), "3.10"),
    "cupy": Environment(("cupy-cuda12x==14.2.0",)),
    "onnxruntime": Environment(("onnxruntime-gpu==1.31.1",)),
    "rmm": Environment(("rmm-cu12==26.10.0",)),
    # With what gpulease itself imports, which is found through PYTHONPATH.
    "jupyter": Environment(
        (
            "ipykernel==7.4.0",
            "nbclient==0.11.0",
            "jupyter_client==8.10.0",
            "jupyterhub==6.1.1",
            "jupyter_server==2.21.1",
            "cloudpickle==3.1.2",
            "joblib==1.6.0",
            "hydra-core==1.3.8",
            "hydra-joblib-launcher",
            "submitit==1.5.4",
            "msgspec",
            "rich",
            "typer<0.30",
        ),
        "3.11",
    ),
}
MORE_VERSIONS = {f"tensorflow-{it}" for it in ("1.14", "1.15", "2.12", "2.19", "2.20")}
"""Between the oldest TensorFlow, 2.4, and the newest, which is beside the tests."""

TORCHES = [pytest.param("torch-2.9", marks=pytest.mark.more_versions), "torch"]
"""Parameters of a test; what an older PyTorch does otherwise has tests of its own."""


def versions(*names: str, framework: str = "tensorflow") -> list[Any]:
    """Return parameters of a test, of which `make test-slow` leaves out MORE_VERSIONS."""
    more = pytest.mark.more_versions
    return [
        pytest.param(name, marks=more) if f"{framework}-{name}" in MORE_VERSIONS else name
        for name in names
    ]


def python_of(name: str) -> str:
    """Return the Python of an environment, which is built first if need be.

    Skips the test where no Python of its version is found, unless it was built here before.
    """
    try:
        return str(built(name) / "bin" / "python")
    except NoInterpreter as error:
        pytest.skip(str(error))
    except BuildError as error:
        pytest.fail(str(error))


def built(name: str) -> Path:
    """Return the folder of an environment, which is built first if need be.

    Raises:
        NoInterpreter: no Python of its version is found, and it was never built here.
        BuildError: it cannot be built.
    """
    wanted = ENVIRONMENTS[name]
    folder = _cache() / f"{name}-{_digest(wanted)}"
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not (folder / "complete").exists():
            _build(name, wanted, folder)
    return folder


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GPULEASE_TEST_ENVIRONMENTS") or Path(base, "gpulease-tests"))


def _digest(wanted: Environment) -> str:
    named = replace(wanted, python=wanted.python or OWN_PYTHON)
    return hashlib.sha256(repr(named).encode()).hexdigest()[:8]


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
            raise BuildError(
                f"{name} was built on this machine, and Python {wanted.python} is gone"
            )
        raise NoInterpreter(f"no Python {wanted.python}, which {name} needs")
    shutil.rmtree(folder, ignore_errors=True)
    # What is installed here is cached; a second copy in pip's cache only fills the disk.
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    install = [*pip, "--no-cache-dir", "install"]
    _run(python, "-m", "venv", str(folder))
    if wanted.python in ("3.6", "3.7"):
        # Theirs knows no manylinux2010 wheel; newer ones need a newer Python.
        _run(*install, "--upgrade", "pip<22")
    _run(*install, *wanted.requirements)
    if wanted.surplus:
        _run(*pip, "uninstall", "--yes", *wanted.surplus)
    (folder / "complete").touch()
    was_built.touch()


def _run(*command: str) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=BUILD_FOR, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{' '.join(command)} took longer than {BUILD_FOR} s") from error
    if done.returncode:
        said = (done.stdout[-2000:] + done.stderr[-2000:]).strip()
        raise BuildError(f"cannot run {' '.join(command)}:\n{said}")


def interpreter(version: str) -> str | None:
    """Return a Python of `version`, from PATH or pyenv; None if there is none that starts."""
    if version in ("", OWN_PYTHON):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    return next((str(path) for path in found if path and _starts(str(path), version)), None)


def _starts(path: str, version: str) -> bool:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [path, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
    except OSError:
        return False
    return done.stdout.strip() == version


def main(names: Sequence[str]) -> int:
    """Build the named environments, those of `make test-slow` without names.

    Returns the exit status.
    """
    failed = False
    print(f"installing frameworks for tests in {_cache()}; the first time some 15 GB")  # noqa: T201
    wanted = names or sorted(ENVIRONMENTS.keys() - MORE_VERSIONS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        began = {pool.submit(_built_in, name): name for name in wanted}
        for done in as_completed(began):
            name = began[done]
            try:
                text = done.result()
            except NoInterpreter as error:
                text = f"skipped: {error}"
            except BuildError as error:
                text, failed = f"failed: {error}", True
            print(f"{name}: {text}", flush=True)  # noqa: T201
    return int(failed)


def _built_in(name: str) -> str:
    began = time.monotonic()
    folder = built(name)
    return f"ready after {time.monotonic() - began:.0f} s in {folder}"


if __name__ == "__main__":
    sys.exit(main(sorted(ENVIRONMENTS) if sys.argv[1:] == ["all"] else sys.argv[1:]))
