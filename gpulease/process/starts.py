"""How a process was started, as /proc tells: its command, a few variables, and if it is Python."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from gpulease.process.patience import command_of, read

_PYTHON = re.compile(r"python[0-9.]*[a-z]*( \(deleted\))?")
_LIBRARY = re.compile(rb"/libpython[0-9][^/\n]*\.so")


class Started(NamedTuple):
    """What was found out."""

    command: tuple[str, ...]
    variables: dict[str, str] | None
    """Of those asked for, those that it was given; None where they cannot be read."""
    is_python: bool


def exec_mark(pid: int) -> bytes:
    """Return what is another after each exec, and the same as long as a program runs.

    The auxiliary vector: addresses that the kernel draws anew; see gpu/resident.py.
    """
    return read(pid, "auxv") or b""


def started(pid: int, names: Collection[str]) -> Started:
    """Return how a process was started, with its variables of these names."""
    environment = read(pid, "environ")
    return Started(
        command_of(pid) or ("",),
        # One that is empty was read all the same: that is what env -i leaves.
        None if environment is None else _chosen(environment, names),
        _is_python(pid),
    )


def _chosen(environment: bytes, names: Collection[str]) -> dict[str, str]:
    pairs = (os.fsdecode(each).partition("=") for each in environment.split(b"\0"))
    return {name: value for name, _, value in pairs if name in names}


def _is_python(pid: int) -> bool:
    """Tell by the program, or by the library of one that has Python built in."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False
    return bool(_PYTHON.fullmatch(program)) or bool(_LIBRARY.search(read(pid, "maps") or b""))
