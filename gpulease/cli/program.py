"""Find out what COMMAND runs: a script under Python, or a program on the PATH.

A command that cannot run is refused here, before it is queued, and not after hours of waiting.
"""

from __future__ import annotations

import os
import sys

import gpulease
from gpulease.cli.render import print_stderr
from gpulease.cli.search_path import find, is_program
from gpulease.errors import BadUsage, CommandNotExecutable, CommandNotFound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    StrPath = PathLike[str] | str

_SHELLS = ("/bin/bash", "/bin/sh")
"""The shells that are tried if SHELL names none."""
_INTERPRETERS = frozenset({"python", "pypy", "bash", "sh", "dash", "zsh"})
"""Programs that run a script as their argument, without their versions."""
_NOTEBOOK_MAIN = f"{os.path.dirname(gpulease.__file__)}/worker/notebook_main.py"
_ASK = """\
import sys, importlib.util
print("%d.%d" % sys.version_info[:2])
print(sys.prefix)
print(importlib.util.find_spec(sys.argv[1]) is not None)
"""
_ANSWER_WITHIN_S = 60.0
"""Time for a Python to start and to look for a module, on a slow file system."""


def resolve(
    command: Sequence[str],
    cwd: StrPath,
    environment: Mapping[str, str],
    *,
    must_exist: bool = True,
) -> tuple[str, ...]:
    """Return the arguments to execute for COMMAND.

    A script whose name ends in .py runs under the caller's python, unless a shell would execute it:
    with a slash in its name, executable, and with a #! line. A notebook (.ipynb) is executed by the
    nbclient of that python. Any other command stays as typed: a program may look at how it was
    called, and the kernel finds the interpreter of a script.

    Without `must_exist` the job starts later or on another machine, and it is only noted here if
    the script of a Python or the interpreter of a script is missing.

    Raises:
        CommandNotFound: there is no such file.
        CommandNotExecutable: the file cannot be executed.
        BadUsage: a notebook takes no such arguments.
    """
    name, *rest = command
    if name.endswith(".py") and _exists(script := os.path.join(cwd, name)):
        _refuse_unreadable(name, script)
        if not ("/" in name and is_program(script) and _names_its_interpreter(script)):
            return (python_of(cwd, environment), name, *rest)
    if name.endswith(".ipynb") and _exists(notebook := os.path.join(cwd, name)):
        _refuse_unreadable(name, notebook)
        _refuse_notebook_arguments(name, rest)
        python = _notebook_python(name, cwd, environment)
        from pathlib import Path

        from gpulease.cli.command_check import refuse_notebook

        refuse_notebook(name, rest, Path(cwd))
        return (python, _NOTEBOOK_MAIN, name, *rest)
    program = _program(command, cwd, environment)
    try:
        _check_scripts(command, program, cwd, environment)
    except (CommandNotFound, CommandNotExecutable) as error:
        if must_exist:
            raise
        print_stderr(f"gpulease: now the job would fail: {error.message}")
    return (name, *rest)


def _check_scripts(
    command: Sequence[str], program: str, cwd: StrPath, environment: Mapping[str, str]
) -> None:
    is_interpreter = os.path.basename(command[0]).rstrip(".0123456789") in _INTERPRETERS
    if is_interpreter or _names_its_interpreter(program):
        from gpulease.cli import command_check

        if is_interpreter:
            command_check.check_argument(command, cwd)
        command_check.check_first_line(command[0], program, cwd, environment)


def python_of(cwd: StrPath, environment: Mapping[str, str]) -> str:
    """Return the python of the active environment, or else of the PATH.

    Raises:
        CommandNotFound: there is none.
        CommandNotExecutable: the caller is root, and another user can change that program.
    """
    active = environment.get("VIRTUAL_ENV")
    if active and is_program(python := os.path.join(cwd, active, "bin", "python")):
        return _chosen(python)
    for name in ("python3", "python"):
        if found := find(name, cwd, environment):
            return _chosen(found)
    raise CommandNotFound(
        "cannot run the script: no python3 or python on your PATH",
        "activate the environment of the script, or name its python: "
        "gpulease run -- /path/to/python script.py",
    )


def ask_python(python: str, module: str) -> tuple[str, str, bool]:
    """Return the version of a Python, its prefix, and whether it finds a module.

    Raises:
        CommandNotExecutable: it does not answer.
    """
    import subprocess

    from gpulease.cli.caller import trusted_environment

    try:
        answer = subprocess.run(
            [python, "-c", _ASK, module], env=dict(trusted_environment()), cwd="/",
            capture_output=True, text=True,
            timeout=_ANSWER_WITHIN_S, check=True,
        )  # fmt: skip
        version, prefix, found = answer.stdout.splitlines()[-3:]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CommandNotExecutable(f"cannot use {python}: {error}") from None
    return version, prefix, found == "True"


def _refuse_notebook_arguments(name: str, words: Sequence[str]) -> None:
    """Refuse what notebook_main.py does not accept, before the notebook is queued."""
    match words:
        case [] | ["-o" | "--output", _]:
            return
        case [word] if word.startswith("--output="):
            return
    import shlex

    raise BadUsage(
        f"cannot run {name} with {shlex.join(words)}: a notebook takes only --output FILE",
        f"for parameters: gpulease run -- papermill {name} OUTPUT.ipynb -p NAME VALUE",
    )


def _notebook_python(name: str, cwd: StrPath, environment: Mapping[str, str]) -> str:
    python = python_of(cwd, environment)
    if not ask_python(python, "nbclient")[2]:
        raise CommandNotExecutable(
            f"cannot run {name}: {python} has no nbclient, which executes notebooks",
            f"{python} -m pip install nbclient ipykernel; papermill and nbconvert contain it too",
        )
    return python


def shell_of(environment: Mapping[str, str]) -> str:
    """Return the user's shell.

    Raises:
        CommandNotFound: there is none.
        CommandNotExecutable: the caller is root, and another user can change that program.
    """
    for path in (environment.get("SHELL", ""), *_SHELLS):
        if path.startswith("/") and is_program(path):
            return _chosen(path)
    raise CommandNotFound(
        "cannot start a shell: SHELL names none, and there is no /bin/sh",
        "name a shell: gpulease run --pty -- COMMAND",
    )


def _chosen(program: str) -> str:
    """Return a program that the environment chose, if the caller may trust it.

    Root's environment may have come from another user, through su(1) or sudo -E.

    Raises:
        CommandNotExecutable: the caller is root, and others can change what it is.
    """
    # The program that runs gpulease itself can do no more harm when it runs a job.
    if os.geteuid() == 0 and os.path.dirname(program) != os.path.dirname(sys.executable):
        from pathlib import Path

        from gpulease.path_ownership import shaky

        why = shaky(Path(program), 0)
        if why is not None:
            raise CommandNotExecutable(
                f"cannot run {program} as root: {why}",
                "VIRTUAL_ENV, PATH or SHELL names it, and may come from another user; for root's "
                f"own use sudo -i; if you trust it, name it: gpulease run -- {program} ...",
            )
    return program


def _exists(path: str) -> bool:
    return os.access(path, os.F_OK)


def _names_its_interpreter(script: str) -> bool:
    try:
        with open(script, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _refuse_unreadable(name: str, script: str) -> None:
    if os.path.isdir(script):
        raise CommandNotExecutable(f"cannot run {name}: it is a directory")
    if not os.access(script, os.R_OK):
        raise CommandNotExecutable(
            f"cannot run {name}: you have no permission to read it", f"see ls -l {name}"
        )


def _program(command: Sequence[str], cwd: StrPath, environment: Mapping[str, str]) -> str:
    """Return the file that execvp(3) executes for a command."""
    name = command[0]
    path = os.path.join(cwd, name) if "/" in name else find(name, cwd, environment)
    if path is not None and is_program(path):
        return path
    from gpulease.cli import command_check

    raise command_check.not_runnable(command, cwd, environment)
