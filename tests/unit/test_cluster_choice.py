"""Which commands act on Slurm: the environment, the user's file, that of the machine."""

from pathlib import Path

import pytest

from gpulease.cluster_choice import acts_on_slurm, cluster
from gpulease.errors import BadConfiguration, BadUsage


class Files:
    """The settings of a user and of a machine."""

    def __init__(self, folder: Path) -> None:
        self.system, self._personal = folder / "config.toml", folder / "gpulease" / "config.toml"
        self._personal.parent.mkdir()
        self.environment = {"XDG_CONFIG_HOME": str(folder)}

    def cluster(self, system: str = "", personal: str = "", variable: str = "") -> str:
        self.system.write_text(system)
        self._personal.write_text(personal)
        return cluster({**self.environment, "GPULEASE_CLUSTER": variable}, str(self.system))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_without_files_there_is_no_cluster(tmp_path: Path) -> None:
    nowhere = {"XDG_CONFIG_HOME": str(tmp_path / "none")}
    assert cluster(nowhere, str(tmp_path / "config.toml")) == "none"


def test_the_file_of_the_machine_names_the_cluster(files: Files) -> None:
    assert files.cluster(system='cluster = "slurm"') == "slurm"


def test_the_users_file_has_precedence_over_that_of_the_machine(files: Files) -> None:
    assert files.cluster(system='cluster = "slurm"', personal='cluster = "none"') == "none"


def test_the_environment_has_precedence_over_files(files: Files) -> None:
    assert files.cluster(personal='cluster = "slurm"', variable="none") == "none"
    assert files.cluster(variable="slurm") == "slurm"


def test_the_word_elsewhere_in_a_file_names_no_cluster(files: Files) -> None:
    assert files.cluster(system='# a cluster\n[run]\nname = "cluster"') == "none"


@pytest.mark.parametrize("text", ['cluster = "pbs"', "cluster = 3\n", "cluster = ["])
def test_a_mistake_in_a_file_is_an_error(files: Files, text: str) -> None:
    with pytest.raises(BadConfiguration, match=r"config\.toml"):
        files.cluster(system=text)


def test_a_mistake_in_the_environment_is_an_error(files: Files) -> None:
    with pytest.raises(BadUsage, match="pbs"):
        files.cluster(variable="pbs")


def test_a_file_without_the_word_is_not_parsed(files: Files) -> None:
    assert files.cluster(system="margin = = 3") == "none"


@pytest.mark.parametrize(
    ("variables", "socket", "new_lease", "expected"),
    [
        ({}, None, None, True),
        ({}, "/run/s", None, False),
        ({"GPULEASE_SOCKET": "/run/s"}, None, None, False),
        ({"GPULEASE_JOB": "7"}, None, None, False),
        ({"GPULEASE_JOB": "7"}, None, True, True),
        ({"GPULEASE_JOB": "7", "SLURM_JOB_ID": "9"}, None, None, True),
        ({"GPULEASE_JOB": "7", "SLURM_JOB_ID": "9"}, None, False, False),
        ({"GPULEASE_SOCKET": "/run/s", "SLURM_JOB_ID": "9"}, None, None, False),
    ],
)
def test_a_socket_or_a_lease_means_the_daemon_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    socket: str | None,
    new_lease: bool | None,
    expected: bool,
) -> None:
    for name in ("GPULEASE_SOCKET", "GPULEASE_JOB", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"GPULEASE_CLUSTER": "slurm", **variables}.items():
        monkeypatch.setenv(name, value)

    assert acts_on_slurm(socket, new_lease=new_lease) is expected
