"""Becoming the command, found as a shell would find it, and saying why that failed."""

import os
from collections.abc import Mapping, Sequence
from errno import E2BIG, EACCES, ENOENT, ENOEXEC, ENOTDIR
from typing import NoReturn

from gpulease.process.record import EXEC, Failure
from gpulease.process.steps import StepFailed, shown

_SHELL = b"/bin/sh"


def become_command(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, looked up on the PATH of `environment`.

    A file that is executable and of no known format is run by /bin/sh, as execvp(3) has it.

    Raises:
        StepFailed: there is no such command, or it cannot be executed.
    """
    words = [os.fsencode(word) for word in argv]
    variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    denied: OSError | None = None
    for path in _candidates(words[0], variables):
        try:
            _become(path, words, variables)
        except OSError as error:
            if error.errno not in (ENOENT, ENOTDIR, EACCES) or os.access(path, os.F_OK):
                denied = denied or error
            if error.errno not in (ENOENT, ENOTDIR, EACCES):
                break
    raise StepFailed(_not_found(argv[0], variables) if denied is None else _denied(argv[0], denied))


def _candidates(name: bytes, environment: Mapping[bytes, bytes]) -> list[bytes]:
    if b"/" in name or not name:
        return [name]
    path = environment.get(b"PATH", os.fsencode(os.defpath))
    return [(directory or b".") + b"/" + name for directory in path.split(b":")]


def _become(path: bytes, words: list[bytes], environment: dict[bytes, bytes]) -> None:
    try:
        os.execve(path, words, environment)  # noqa: S606 - to become the command is the point
    except OSError as error:
        if error.errno != ENOEXEC:
            error.filename = path
            raise
    os.execve(_SHELL, [_SHELL, path, *words[1:]], environment)  # noqa: S606 - likewise


def _not_found(name: str, environment: Mapping[bytes, bytes]) -> Failure:
    if "/" in name:
        why = "there is no such file"
        hint = None if name.startswith("/") else "the path counts from where the job starts"
    elif b"PATH" in environment:
        why = "no such command on PATH"
        hint = (
            f"give its path, or add its directory to PATH, which is {shown(environment[b'PATH'])}"
        )
    else:
        why, hint = "no such command", "PATH is not set; give the path of the command"
    return Failure(EXEC, ENOENT, f"cannot run {shown(name)}: {why}", hint)


def _denied(name: str, error: OSError) -> Failure:
    number, why, hint = error.errno or EACCES, error.strerror or str(error), None
    path = bytes(error.filename)
    if number in (ENOENT, ENOTDIR):
        # The file is there, which to a shell makes it "not executable": 126 and not 127.
        number, why = EACCES, "its interpreter does not exist"
        hint = "the first line of the file names it"
    elif number == EACCES and _is_directory(path):
        why = "it is a directory"
    elif number == EACCES:
        why, hint = "it is not executable", f"chmod +x {shown(path)}, or name its interpreter first"
    elif number == E2BIG:
        why = "its arguments and environment are longer than the system allows"
        hint = "hand long lists over in a file"
    return Failure(EXEC, number, f"cannot run {shown(name)}: {why}", hint)


def _is_directory(path: bytes) -> bool:
    try:
        os.close(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
