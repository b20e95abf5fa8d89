"""What `doctor` says of the frameworks in the caller's python, without importing them."""

import sys
from pathlib import Path

import pytest

from goldens import sentence
from gpulease.cli.doctor import Python, framework_checks


def said(**installed: str) -> dict[str, tuple[str, str]]:
    given = {name.replace("_", "-"): version for name, version in installed.items()}
    return {each.name: (each.state, each.message) for each in framework_checks(given)}


def test_a_framework_that_was_tried_is_held() -> None:
    state, message = said(tensorflow="2.21.0")["tensorflow"]
    assert state == "ok"
    sentence("framework-held", message)


def test_one_that_was_not_tried_says_with_what_it_was() -> None:
    state, message = said(tensorflow_cpu="2.99.1rc2")["tensorflow"]
    assert state == "ok"
    sentence("framework-untried", message)


@pytest.mark.parametrize("version", ["1.12.0", "1", "nonsense"])
def test_one_that_is_too_old_is_not_held(version: str) -> None:
    state, message = said(tensorflow=version)["tensorflow"]
    assert (state, f"tensorflow {version}" in message) == ("warning", True)


def test_none_at_all_is_one_warning() -> None:
    assert [state for state, _ in said().values()] == ["warning"]
    assert list(said(numpy="2.0")) == ["frameworks"]


def test_each_framework_is_told_once_under_its_usual_name() -> None:
    told = said(cupy_cuda12x="14.0.1", jax="0.11.0", jaxlib="0.11.0")
    assert list(told) == ["jax", "jaxlib", "cupy"]
    assert "cupy-cuda12x 14.0.1" in told["cupy"][1]


def test_versions_are_read_from_metadata_by_the_python_that_runs_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(sys._base_executable)
    packages = tmp_path / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    for name, version in (("tensorflow", "2.21.0"), ("jaxlib", "0.11.0")):
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        # Imported, it would end the python that asks.
        (packages / f"{name}.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(base)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    asked = Python.of_the_caller()
    checks = {each.name: each.message for each in asked.checks}
    assert "tensorflow 2.21.0" in checks["tensorflow"]
    assert "jaxlib 0.11.0" in checks["jaxlib"]
    assert [name for name, _ in asked.frameworks] == ["tensorflow"]


def test_what_lies_in_the_current_directory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('run by who looked')")
    monkeypatch.chdir(tmp_path)
    assert Python.of_the_caller().checks[0].state == "ok"


def test_a_python_that_does_not_work_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho nonsense\n")
    broken.chmod(0o755)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (check,) = Python.of_the_caller().checks
    assert check.state == "warning"
