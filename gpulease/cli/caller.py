"""The process that calls gpulease, which its job resembles: directory, environment, terminal."""

from __future__ import annotations

import os
import termios

from gpulease.client import submission
from gpulease.errors import BadValue, GpuleaseError
from gpulease.locations import environment
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def is_ours(handle: int) -> bool:
    """Tell whether this process is in the foreground of a terminal, and so may read it."""
    try:
        return os.tcgetpgrp(handle) == os.getpgrp()
    except OSError:
        return False


def adds_carriage_returns(handle: int) -> bool:
    """Tell whether a descriptor is a terminal that writes a line feed as CR LF."""
    try:
        output: int = termios.tcgetattr(handle)[1]
    except termios.error:
        return False
    return output & (termios.OPOST | termios.ONLCR) == termios.OPOST | termios.ONLCR


def attributes_of(handle: int) -> tuple[int, ...]:
    """Return the attributes of a terminal as the wire has them.

    Raises:
        termios.error: it is no terminal.
    """
    *flags, characters = termios.tcgetattr(handle)
    return (*flags, *(_number(character) for character in characters))


def _number(character: bytes | int) -> int:
    # Python returns VMIN and VTIME as numbers if the terminal is not in canonical mode.
    return character if isinstance(character, int) else ord(character)


def size_of(handle: int) -> tuple[int, int] | None:
    """Return rows and columns; None if it is no terminal, or its size is unknown."""
    try:
        size = os.get_terminal_size(handle)
    except OSError:
        return None
    return (size.lines, size.columns) if size.lines > 0 and size.columns > 0 else None


@record(frozen=True)
class Streams:
    """Which of the three streams are terminals, and the settings of that terminal."""

    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    size: tuple[int, int] | None = None
    """Rows and columns."""
    attributes: tuple[int, ...] | None = None
    """As the wire has them."""


@record(frozen=True)
class Caller:
    """What a job inherits from the process that submits it."""

    cwd: str
    environment: Mapping[str, str]
    umask: int
    soft_limits: Mapping[str, int]
    """By the names of resource.RLIMIT_*; -1 is unlimited."""
    nice: int
    streams: Streams = Streams()


def this_process() -> Caller:
    """Describe this process.

    Raises:
        GpuleaseError: its working directory is gone.
    """
    return Caller(
        cwd=working_directory(),
        environment=dict(environment()),
        umask=submission.umask(),
        soft_limits=submission.soft_limits(),
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        streams=_streams(),
    )


def trusted_environment() -> Mapping[str, str]:
    """Return the environment for programs that gpulease itself runs.

    The environment of root may have come from another user, through su(1) or sudo -E, and make
    Python import from directories of that user (PYTHONPATH, HOME). So root's programs get only a
    few fixed variables, and the library directories that no other user can change: container
    images with CUDA name them.
    """
    if os.geteuid() != 0:
        return environment()
    import pwd
    from pathlib import Path

    from gpulease.path_ownership import shaky

    trusted = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": pwd.getpwuid(0).pw_dir}
    named = environment().get("LD_LIBRARY_PATH", "").split(":")
    libraries = [each for each in named if each.startswith("/") and not shaky(Path(each), 0)]
    return trusted | ({"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {})


def working_directory() -> str:
    """Return the working directory.

    Raises:
        GpuleaseError: it was removed, or cannot be looked up.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise GpuleaseError(
            "cannot use the working directory: it was removed",
            "change to a directory that exists",
        ) from None
    except OSError as error:
        raise GpuleaseError(f"cannot use the working directory: {error.strerror}") from error


def _streams() -> Streams:
    terminals = [handle for handle in (0, 1, 2) if os.isatty(handle)]
    try:
        attributes = attributes_of(terminals[0]) if terminals else None
    except termios.error:
        attributes = None
    return Streams(
        stdin=0 in terminals,
        stdout=1 in terminals,
        stderr=2 in terminals,
        size=next((size for handle in terminals if (size := size_of(handle))), None),
        attributes=attributes,
    )


def refuse_unknown_user(name: str, doing: str, hint: str) -> None:
    """Raises: BadValue, if this machine has no such user; `doing` follows "cannot"."""
    import pwd

    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise BadValue(f"cannot {doing} {name[:80]!r}: no such user", hint) from None
