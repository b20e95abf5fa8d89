"""The lowest versions that pyproject.toml allows, on an old and a new Python."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHONS = ["python3.11", "python3.13"]


def run(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | variables, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def installed(name: str) -> str | None:
    """Return an interpreter that works; pyenv leaves words on the PATH that start none."""
    version = name.removeprefix("python")
    found = Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")
    for path in (shutil.which(name), *map(str, found)):
        if (
            path
            and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return path
    return None


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if found := shutil.which("uv"):
        return Path(found)
    folder = tmp_path_factory.mktemp("uv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    installed = subprocess.run([folder / "bin/pip", "install", "--quiet", "uv"], check=False)
    if installed.returncode != 0:
        pytest.skip("uv cannot be installed here")
    return folder / "bin/uv"


@pytest.fixture(params=PYTHONS)
def lowest(request: pytest.FixtureRequest, uv: Path, tmp_path: Path) -> Iterator[Path]:
    """Yield the programs of an installation whose direct dependencies are the lowest."""
    if (python := installed(request.param)) is None:
        pytest.skip(f"{request.param} is not installed")
    run(uv, "venv", "--quiet", "--python", python, tmp_path / "venv")
    programs = tmp_path / "venv" / "bin"
    # A copy, as the build leaves files beside what it builds.
    ignored = shutil.ignore_patterns(
        ".venv", ".git", "*_cache", ".hypothesis", "__pycache__", "build", "dist"
    )
    shutil.copytree(REPOSITORY, tmp_path / "source", ignore=ignored)
    run(
        uv, "pip", "install", "--quiet", "--python", programs / "python",
        "--resolution", "lowest-direct", f"{tmp_path / 'source'}[daemon]",
    )  # fmt: skip
    yield programs


def test_a_job_runs_with_the_lowest_versions(lowest: Path, tmp_path: Path) -> None:
    gpulease = lowest / "gpulease"
    assert "run" in run(gpulease, "--help")
    assert "--mem" in run(gpulease, "run", "--help")

    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    variables = {"XDG_RUNTIME_DIR": str(own), "XDG_STATE_HOME": str(tmp_path / "state")}
    socket = own / "s"
    daemon = subprocess.Popen(
        [lowest / "gpuleased", "--socket", socket, "--state", tmp_path / "s", "--simulate", "1x8G"],
        env=os.environ | variables,
    )
    try:
        line = (gpulease, "--socket", socket)
        for _ in range(300):
            ready = subprocess.run([*line, "status"], capture_output=True, check=False)
            if ready.returncode == 0:
                break
        assert run(*line, "run", "--mem", "1G", "echo", "hello") == "hello\n"
        assert "echo" in run(*line, "list", "--all", "--json")
        assert "echo" in run(*line, "show", "last")
        assert run(*line, "status") and run(*line, "report")
        refused = subprocess.run([*line, "lst"], capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and "gpulease list" in refused.stderr
    finally:
        daemon.terminate()
        daemon.wait(120)
