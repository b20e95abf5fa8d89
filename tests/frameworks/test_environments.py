"""When a framework that the tests need may be missing, and when that is a failure."""

from pathlib import Path

import pytest

from frameworks import environments
from frameworks.environments import BuildError, Environment, NoInterpreter, built


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPULEASE_TEST_ENVIRONMENTS", str(tmp_path))
    monkeypatch.setitem(environments.ENVIRONMENTS, "ancient", Environment(("ancient",), "1.5"))
    monkeypatch.setitem(environments.ENVIRONMENTS, "empty", Environment(("./none.whl",)))
    return tmp_path


def test_a_framework_for_a_python_that_is_not_here_may_be_missing() -> None:
    with pytest.raises(NoInterpreter, match=r"no Python 1\.5"):
        built("ancient")

    assert environments.main(["ancient"]) == 0


def test_one_that_was_built_here_before_may_not_be_missing(cache: Path) -> None:
    (cache / "ancient.built").touch()

    with pytest.raises(BuildError, match=r"Python 1\.5 is gone"):
        built("ancient")

    assert environments.main(["ancient"]) == 1


def test_one_that_cannot_be_installed_is_a_failure_and_is_tried_again() -> None:
    for _ in range(2):
        with pytest.raises(BuildError, match=r"none\.whl"):
            built("empty")
