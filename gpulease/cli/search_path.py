"""Search the PATH for a program, as execvp(3) does."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    StrPath = PathLike[str] | str

_DEFAULT_PATH = "/bin:/usr/bin"
"""Where execvp(3) looks without a PATH."""


def find(name: str, cwd: StrPath, environment: Mapping[str, str]) -> str | None:
    """Return the program that execvp(3) runs for a name without a slash."""
    return next((path for path in on_path(name, cwd, environment) if is_program(path)), None)


def on_path(name: str, cwd: StrPath, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield where execvp(3) looks for a name without a slash."""
    for folder in environment.get("PATH", _DEFAULT_PATH).split(os.pathsep):
        yield os.path.join(cwd, folder, name)


def is_program(path: str) -> bool:
    """Return whether the caller may execute a file."""
    return os.access(path, os.X_OK) and os.path.isfile(path)
