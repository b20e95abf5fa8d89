"""Find what COMMAND means, as the kernel will: a script for Python, or a program on the PATH.

What cannot run is refused here, before anything is queued: nobody wants to wait four hours to read
that a file does not exist.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpulease.errors import CommandNotExecutable, CommandNotFound
from gpulease.path_ownership import shaky

_DEFAULT_PATH = "/bin:/usr/bin"
"""Where execvp(3) looks without a PATH."""
_SHELLS = ("/bin/bash", "/bin/sh")
"""What is tried where SHELL names none."""


def resolve(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the arguments to execute for COMMAND.

    A script whose name ends in .py is given to the caller's python, unless it is called as a shell
    would take it: with a slash in its name, executable, and with a first line that names what runs
    it. Any other command stays as it was typed, for a program may look at how it was called, and
    the kernel knows what runs a script.

    Raises:
        CommandNotFound: there is no such file.
        CommandNotExecutable: there is, and it cannot be executed.
    """
    name, *rest = command
    if name.endswith(".py") and _exists(script := cwd / name):
        _refuse_unreadable(name, script)
        if not ("/" in name and _runs(script) and _names_its_interpreter(script)):
            return (python_of(cwd, environment), name, *rest)
    if "/" in name or not name:
        _refuse_unrunnable(name, cwd / name, cwd)
    elif find(name, cwd, environment) is None:
        raise _not_on_path(name, cwd, environment)
    return (name, *rest)


def python_of(cwd: Path, environment: Mapping[str, str]) -> str:
    """Return the interpreter that the caller's shell would use.

    Raises:
        CommandNotFound: there is none.
        CommandNotExecutable: the caller is root, and others can change what it is.
    """
    active = environment.get("VIRTUAL_ENV")
    if active and _runs(python := cwd / active / "bin" / "python"):
        return _chosen(python)
    for name in ("python3", "python"):
        if found := find(name, cwd, environment):
            return _chosen(found)
    raise CommandNotFound(
        "cannot run the script: there is no python3 and no python on your PATH",
        "activate the environment that it needs, or name its python: "
        "gpulease run -- /path/to/python script.py",
    )


def shell_of(environment: Mapping[str, str]) -> str:
    """Return the user's shell.

    Raises:
        CommandNotFound: there is none.
        CommandNotExecutable: the caller is root, and others can change what it is.
    """
    for path in (environment.get("SHELL", ""), *_SHELLS):
        if path.startswith("/") and _runs(Path(path)):
            return _chosen(Path(path))
    raise CommandNotFound(
        "cannot start a shell: there is none here", "name one: gpulease run --pty -- COMMAND"
    )


def _chosen(program: Path) -> str:
    """Return a program that the environment chose.

    Root's environment may have come from another user, through su(1) or sudo -E.

    Raises:
        CommandNotExecutable: the caller is root, and others can change what it is.
    """
    # What runs this very command could do no more if it were run once again.
    if os.geteuid() == 0 and program.parent != Path(sys.executable).parent:
        why = shaky(program, 0)
        if why is not None:
            raise CommandNotExecutable(
                f"cannot run {program} as root: {why}",
                "the environment chose it (VIRTUAL_ENV, PATH or SHELL), perhaps another user's; "
                f"use root's own: sudo -i; if you trust it, name it: gpulease run -- {program} ...",
            )
    return str(program)


def find(name: str, cwd: Path, environment: Mapping[str, str]) -> Path | None:
    """Return the program that execvp would run for a name without a slash."""
    return next((path for path in _on_path(name, cwd, environment) if _runs(path)), None)


def _on_path(name: str, cwd: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    for folder in environment.get("PATH", _DEFAULT_PATH).split(os.pathsep):
        yield cwd / folder / name


def _exists(path: Path) -> bool:
    # Unlike Path.exists, which raises where a folder may not be searched.
    return os.access(path, os.F_OK)


def _runs(path: Path) -> bool:
    return os.access(path, os.X_OK) and path.is_file()


def _names_its_interpreter(script: Path) -> bool:
    try:
        with script.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _refuse_unreadable(name: str, script: Path) -> None:
    if script.is_dir():
        raise CommandNotExecutable(f"cannot run {name}: it is a directory")
    if not os.access(script, os.R_OK):
        raise CommandNotExecutable(
            f"cannot run {name}: you may not read it", f"look at its permissions: ls -l {name}"
        )


def _refuse_unrunnable(name: str, path: Path, cwd: Path) -> None:
    if not name:
        raise CommandNotFound("cannot run the command: its name is empty")
    if not _exists(path):
        raise CommandNotFound(
            f"cannot run {name}: there is no such file",
            None if name.startswith("/") else f"a relative path starts at {cwd}",
        )
    if path.is_dir():
        raise CommandNotExecutable(f"cannot run {name}: it is a directory")
    if not os.access(path, os.X_OK):
        raise _without_permission(name, name)


def _not_on_path(
    name: str, cwd: Path, environment: Mapping[str, str]
) -> CommandNotFound | CommandNotExecutable:
    for path in _on_path(name, cwd, environment):
        if _exists(path) and path.is_file():
            return _without_permission(name, str(path))
    if name.endswith(".py"):
        return CommandNotFound(
            f"cannot run {name}: there is no such file in {cwd}",
            "name the script as it is seen from there",
        )
    if _runs(cwd / name):
        return CommandNotFound(
            f"cannot run {name}: it is not on your PATH", f"for the file here write ./{name}"
        )
    if _exists(cwd / name):
        return CommandNotFound(
            f"cannot run {name}: it is not on your PATH",
            f"for the file here: gpulease run -- bash {name}",
        )
    return CommandNotFound(
        f"cannot run {name}: there is no such command",
        "an option of gpulease run goes before the command",
    )


def _without_permission(name: str, path: str) -> CommandNotExecutable:
    return CommandNotExecutable(
        f"cannot run {name}: it is not executable",
        f"chmod +x {path}, or say what runs it: gpulease run -- bash {path}",
    )
