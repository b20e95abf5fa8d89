"""Which systems gpulease runs on; docs/admin/install.md has the table.

SQLite is not among them: every system with this systemd has 3.34, which is enough.
"""

import os
import re
from pathlib import Path

from gpulease.errors import SetupFailed

_LEAST = {"systemd": (247,), "Linux": (5, 3)}
"""ProtectProc= in the units; pidfd_open(2)."""
_SELINUX = Path("/sys/fs/selinux/enforce")
_LABEL = "security.selinux"


def check_system(name: str, systemd: str, kernel: str) -> None:
    """Check the versions of a system.

    Args:
        name: of the distribution, for the message.
        systemd: what `systemctl --version` says.
        kernel: the release of the kernel.

    Raises:
        SetupFailed: one of them is too old.
    """
    found = {"systemd": _version(systemd, 1), "Linux": _version(kernel, 2)}
    old = [each for each, least in _LEAST.items() if found[each] < least]
    if old:
        has, needs = (
            " and ".join(f"{each} {'.'.join(map(str, versions[each]))}" for each in old)
            for versions in (found, _LEAST)
        )
        raise SetupFailed(
            f"cannot install: {name} has {has}, and gpulease needs {needs} or later",
            "docs/admin/install.md lists the systems that have it: Debian 11, Ubuntu 22.04, "
            "RHEL 9, and later ones",
        )


def _version(text: str, parts: int) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:parts]))


def check_labels(environment: Path) -> None:
    """Check that SELinux lets systemd run the programs of an environment.

    Files that were moved from a home keep its labels, and services may not run them.

    Raises:
        SetupFailed: the programs have labels of a home.
    """
    if _SELINUX.exists() and (label := home_label(environment / "bin/gpuleased")):
        raise SetupFailed(
            f"cannot install from {environment}: SELinux labels its files as {label}, so systemd "
            "may not run them",
            f"give them the labels of their place: restorecon -RF {environment}",
        )


def home_label(file: Path) -> str | None:
    """Return the label of a file if it is that of files in a home: user_home_t."""
    try:
        label = os.getxattr(file, _LABEL).decode().rstrip("\0")
    except OSError:  # it has none
        return None
    return next((part for part in label.split(":") if "home" in part), None)
