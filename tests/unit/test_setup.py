"""Which systems `gpulease-setup` accepts, and what it links."""

import os
from pathlib import Path

import pytest

from gpulease.errors import SetupFailed
from gpulease.setup import install
from gpulease.setup.requirements import check_system, home_label


@pytest.mark.parametrize(
    ("name", "systemd", "kernel"),
    [
        ("Debian 11", "systemd 247 (247.3-7+deb11u7)\n+PAM", "5.10.0-35-amd64"),
        ("Debian 12", "systemd 252 (252.38-1~deb12u1)", "6.1.0-37-amd64"),
        ("Ubuntu 22.04", "systemd 249 (249.11-0ubuntu3.16)", "5.15.0-1084-nvidia"),
        ("Debian 13", "systemd 257 (257.7-1)", "6.12.38+deb13-amd64"),
        ("Rocky Linux 9.6", "systemd 252 (252-51.el9)", "5.14.0-570.17.1.el9_6.x86_64"),
    ],
)
def test_systems_of_the_table_are_accepted(name: str, systemd: str, kernel: str) -> None:
    check_system(name, systemd, kernel)


@pytest.mark.parametrize(
    ("name", "systemd", "kernel", "missing"),
    [
        ("RHEL 8.10", "systemd 239 (239-82.el8)", "4.18.0-553.el8.x86_64",
         "RHEL 8.10 has systemd 239 and Linux 4.18, and gpulease needs systemd 247 and Linux 5.3"),
        ("Ubuntu 20.04", "systemd 245 (245.4-4ubuntu3.24)", "5.4.0-216-generic",
         "Ubuntu 20.04 has systemd 245, and gpulease needs systemd 247 or later"),
        ("a container", "systemd 252 (252.38-1~deb12u1)", "4.18.0-553.el8.x86_64",
         "a container has Linux 4.18, and gpulease needs Linux 5.3 or later"),
    ],
)  # fmt: skip
def test_older_systems_are_refused_in_words(
    name: str, systemd: str, kernel: str, missing: str
) -> None:
    with pytest.raises(SetupFailed, match="cannot install") as refused:
        check_system(name, systemd, kernel)
    assert missing in refused.value.text()


def test_a_file_that_was_moved_from_a_home_is_recognized_by_its_label(tmp_path: Path) -> None:
    file = tmp_path / "gpuleased"
    file.touch()
    assert home_label(file) is None
    try:
        os.setxattr(file, "security.selinux", b"unconfined_u:object_r:user_home_t:s0\0")
    except OSError:
        pytest.skip("only root can set labels, and not on every file system")
    assert home_label(file) == "user_home_t"
    os.setxattr(file, "security.selinux", b"system_u:object_r:bin_t:s0\0")
    assert home_label(file) is None


def test_a_command_is_linked_once_and_what_others_made_in_its_place_stays(tmp_path: Path) -> None:
    program, link = tmp_path / "program", tmp_path / "bin" / "gpulease"
    assert [install._link(link, program) for _ in range(2)] == ["installed", "unchanged"]
    assert link.readlink() == program
    assert install._link(link, tmp_path / "other").startswith("not changed")
    assert link.readlink() == program
