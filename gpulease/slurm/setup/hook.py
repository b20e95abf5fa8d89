"""Installs the hook script for Slurm (hook.pl)."""

from collections.abc import Sequence
from pathlib import Path

from gpulease.errors import SetupFailed
from gpulease.path_ownership import shaky
from gpulease.setup.install import Say, write_file

NAME = "gpulease-hook"
DIRECTORY = Path("/etc/slurm")
"""Where the hook is, unless the admin names other directories."""
MARK = "for gpulease"
"""In every version of the script."""
_SOURCE = Path(__file__).with_name("hook.pl")
_SOCKET = "/run/gpulease/gpuleased.sock"
_LONGEST_SOCKET = 107
"""Bytes of sockaddr_un (unix(7)), less the last null byte."""


def hook_text(socket: Path) -> str:
    """Return the script for the daemon on `socket`.

    Raises:
        SetupFailed: the path does not fit into the script or into the address of a socket.
    """
    name = str(socket)
    if not socket.is_absolute() or set(name) & set("'\\\n") or len(name) > _LONGEST_SOCKET:
        raise SetupFailed(
            f"cannot install the hook: the socket {name!r} is no absolute path of at most "
            f"{_LONGEST_SOCKET} plain characters",
            f"leave out the setting socket: the default is {_SOCKET}",
        )
    return _SOURCE.read_text().replace(f"'{_SOCKET}'", f"'{name}'", 1)


def install_hook(directories: Sequence[Path], socket: Path, say: Say) -> None:
    """Write the script into each directory; Slurm runs it as root.

    Raises:
        SetupFailed: a directory does not exist, or users can change it.
    """
    text = hook_text(socket)
    for directory in directories:
        if not directory.is_dir():
            raise SetupFailed(
                f"cannot install the hook: {directory} is no directory",
                "name the directory of your prologs: gpulease-setup slurm --install DIRECTORY",
            )
        if (why := shaky(directory, 0)) is not None:
            raise SetupFailed(f"cannot install the hook, which root runs: {why}")
    for directory in directories:
        say(f"{write_file(directory / NAME, text, 0o755)} {directory / NAME}")
