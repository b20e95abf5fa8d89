"""An environment with the base dependencies alone: the command and the Python API, no daemon."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import daemons
from gpulease.config import personal_state
from gpulease.daemon_packages import NEEDED, missing
from gpulease.user_daemon import serving
from gpulease.web.__main__ import NEEDED as WEB_NEEDED

_REPOSITORY = Path(__file__).parents[2]
_LIGHT = """
import sys
before = set(sys.modules)
import gpulease.lease_api
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(names - sys.stdlib_module_names))
"""
_LEASE = "import gpulease; print(gpulease.lease('1G').memory)"


def _project() -> dict[str, Any]:
    with (_REPOSITORY / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _with_requirements(names: list[str]) -> Iterator[str]:
    """Yield distributions and what they require here, extras left out."""
    pending, found = list(names), set()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):  # one that another platform needs
            required = distribution(name).requires or []
            yield name
            pending += [_name(each) for each in required if "extra ==" not in each]


def _documented_submission() -> str:
    """Return the example in docs/python.md that submits a job."""
    blocks = (_REPOSITORY / "docs/python.md").read_text().split("```")
    (found,) = [block for block in blocks if "client.submit(" in block]
    return found.removeprefix("python\n").replace("/usr/bin/python3", sys.executable)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the python of an environment that has gpulease and its base dependencies."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "gpulease.pth").write_text(f"{_REPOSITORY}\n")
    base = [_name(each) for each in _project()["dependencies"]]
    for name in _with_requirements(base):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder / "bin/python"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    private = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **private}


def _run(
    python: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], check=False, capture_output=True, text=True, cwd="/",
        env=environment, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("extra", "needed"), [("daemon", NEEDED), ("web", WEB_NEEDED)])
def test_the_extras_name_the_distributions_of_the_packages_that_are_checked(
    extra: str, needed: tuple[str, ...]
) -> None:
    listed = {_name(each) for each in _project()["optional-dependencies"][extra]}
    homes = packages_distributions()
    assert {homes[name][0].lower().replace("_", "-") for name in needed} == listed
    assert missing() == ()


def test_the_python_api_imports_the_standard_library_and_msgspec_alone(python: Path) -> None:
    done = _run(python, "-c", _LIGHT)
    # msgspec imports typing_extensions where it is installed.
    assert set(done.stdout.split()) - {"typing_extensions"} == {"gpulease", "msgspec"}, done


def test_the_command_works_with_a_daemon_of_another_environment(
    python: Path, tmp_path: Path
) -> None:
    with daemons(tmp_path) as make:
        daemon = make().start()
        environment = {**os.environ, "GPULEASE_SOCKET": str(daemon.socket)}
        shown = _run(python, "-m", "gpulease.cli", "status", environment=environment)
        assert shown.returncode == 0, shown
        leased = _run(python, "-c", _LEASE, environment=environment)
        assert leased.stdout.split() == [str(2**30)], leased
        submitted = _run(python, "-c", _documented_submission(), environment=environment)
        assert "ended exited with 2\n2\nSTDERR" in submitted.stdout, submitted


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("-m", "gpulease.cli", "run", "true"), 125),
        (("-m", "gpulease.daemon"), 78),
        (("-m", "gpulease.setup", "install"), 125),
    ],
    ids=["run", "daemon", "setup"],
)
def test_what_needs_the_daemon_says_how_to_install_it(
    arguments: tuple[str, ...],
    code: int,
    python: Path,
    environment: dict[str, str],
    no_daemon_of_the_machine: None,
) -> None:
    done = _run(python, *arguments, environment=environment)
    assert done.returncode == code, done
    assert f"uv pip install --python {python} 'gpulease[daemon]'" in done.stderr, done
    assert "Traceback" not in done.stderr


def test_the_web_server_says_how_to_install_its_packages(python: Path) -> None:
    done = _run(python, "-m", "gpulease.web", "--version")
    assert done.returncode == 78, done
    assert f"uv pip install --python {python} 'gpulease[web]'" in done.stderr, done


@pytest.fixture
def hiding(tmp_path: Path) -> Path:
    """Return a directory with modules that hide gpulease and what it imports."""
    folder = tmp_path / "hiding"
    names = ("gpulease/__init__", "msgspec", "random", "rich/__init__", "sqlalchemy", "starlette")
    for name in names:
        module = folder / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text("raise ImportError('this is for another Python')")
    return folder


def test_modules_on_the_users_pythonpath_are_the_jobs_alone(
    python: Path, tmp_path: Path, hiding: Path
) -> None:
    command = shutil.copy(_REPOSITORY / "gpulease/cli/__main__.py", python.parent / "gpulease")
    with daemons(tmp_path) as make:
        socket = {"GPULEASE_SOCKET": str(make().start().socket)}
        environment = {**os.environ, **socket, "PYTHONPATH": str(hiding)}
        shown = _run(python, command, "report", environment=environment)
        assert shown.returncode == 0, shown
        ran = _run(python, command, "run", "printenv", "PYTHONPATH", environment=environment)
        assert ran.stdout.strip().endswith(f":{hiding}"), ran


def test_a_daemon_for_one_user_starts_despite_the_users_pythonpath(
    environment: dict[str, str], hiding: Path, no_daemon_of_the_machine: None
) -> None:
    found = {**environment, "GPULEASE_SIMULATE": "1x8G", "PYTHONPATH": str(hiding)}
    command = str(_REPOSITORY / "gpulease/cli/__main__.py")
    try:
        done = _run(Path(sys.executable), command, "run", "true", environment=found)
        assert done.returncode == 0, done
    finally:
        if (daemon := serving(personal_state(environment))) is not None:
            os.kill(daemon.pid, signal.SIGTERM)


@pytest.mark.parametrize("program", ["gpuleased", "gpulease-web"])
def test_the_other_programs_start_despite_the_users_pythonpath(program: str, hiding: Path) -> None:
    shutil.rmtree(hiding / "gpulease")
    line = [Path(sys.executable).with_name(program), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(hiding)}
    done = subprocess.run(
        line, env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done
