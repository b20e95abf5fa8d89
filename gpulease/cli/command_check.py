"""Find out why a command cannot run, before it is queued, and what was probably meant.

Only what is certain to fail is refused: what depends on the time of the start is a note.
"""

from __future__ import annotations

import os

from gpulease.cli.render import print_stderr
from gpulease.cli.search_path import find, is_program, on_path
from gpulease.errors import CommandNotExecutable, CommandNotFound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    StrPath = PathLike[str] | str

_INTERPRETERS = {".sh": "bash", ".bash": "bash", ".R": "Rscript", ".r": "Rscript", ".jl": "julia"}
_MOST_READ = 256
"""Bytes of a script in which the kernel looks for the interpreter, see execve(2)."""
_OF_SHELLS = frozenset(
    {".", "alias", "cd", "conda", "eval", "exec", "export", "module", "popd", "pushd", "set",
     "source", "ulimit", "umask", "unset"}
)  # fmt: skip
"""Commands that change the shell that runs them, so that they are parts or functions of it."""
_OPERATORS = ("&&", "||", ";", "|", ">", "<", "$(", "`")
_OLDEST_NOTEBOOK = 4
"""Of the formats of notebooks; Jupyter has written this one since 2015."""
_QUOTED_IN_ENV = frozenset("'\"\\${}=")


def check_argument(command: Sequence[str], cwd: StrPath) -> None:
    """Check the script that a Python or a shell is asked to run.

    Raises:
        CommandNotFound: a Python would not find it.
    """
    name, *rest = command
    if not os.path.basename(name).startswith(("python", "pypy")):
        # A shell has many options, and looks for a missing script on the PATH.
        if rest and (first := _first_line(os.path.join(cwd, rest[0]))):
            _note_windows_lines(rest[0], first)
        return
    script = _script_of_python(rest)
    if script is not None and not os.path.exists(os.path.join(cwd, script)):
        raise CommandNotFound(
            f"cannot run {name} {script}: no such file in {os.fspath(cwd)}",
            "give the path of the script, absolute or relative to that directory; if another job "
            "writes it, use --after",
        )


def _script_of_python(words: Sequence[str]) -> str | None:
    """Return the script in the arguments of a Python; None for -c, -m, standard input, a prompt."""
    left = iter(words)
    for word in left:
        if word == "--":
            return next(left, None)
        if not word.startswith("-"):
            return word
        if word.startswith("--"):
            if word in ("--check-hash-based-pycs", "--jit"):  # the latter is PyPy's
                next(left, None)
            continue
        letter = next((each for each in word[1:] if each in "cmWXhV?"), "")
        if word == "-" or letter in ("c", "m", "h", "V", "?"):
            return None
        if letter and word.endswith(letter):  # -W and -X have a value
            next(left, None)
    return None


def check_first_line(name: str, script: str, cwd: StrPath, environment: Mapping[str, str]) -> None:
    """Check the #! line of a program, if it has one, as the kernel and env(1) read it.

    Raises:
        CommandNotExecutable: its interpreter does not exist.
    """
    first = _first_line(script)
    if not first.startswith("#!"):
        return
    program, _, argument = first[2:].replace("\t", " ").strip(" ").partition(" ")
    missing = program if program and not os.path.exists(os.path.join(cwd, program)) else None
    if os.path.basename(program) == "env" and missing is None:
        missing = _missing_for_env(argument.strip(" "), cwd, environment)
    if missing is None:
        _note_windows_lines(name, first)
    elif missing.endswith("\r"):
        raise CommandNotExecutable(
            f"cannot run {name}: it has the line ends of Windows, which become part of the name of "
            f"its interpreter {missing.rstrip()}",
            _to_unix(name),
        )
    elif " " in missing:
        raise CommandNotExecutable(
            f"cannot run {name}: env looks for a program named {missing!r}",
            f"write its first line as #!{program} -S {missing}",
        )
    else:
        why = "does not exist" if "/" in missing else "is not on your PATH"
        raise CommandNotExecutable(
            f"cannot run {name}: its interpreter {missing} {why}",
            f"correct its first line, or name another one: gpulease run -- INTERPRETER {name}",
        )


def _first_line(path: str) -> str:
    """Return the first line of a file; "" if it cannot be read, or is longer than a #! line."""
    if not os.path.isfile(path):  # of `bash <(...)`, a pipe, what is read here is lost
        return ""
    try:
        with open(path, "rb") as file:
            first, ended, _ = file.read(_MOST_READ).partition(b"\n")
    except OSError:
        return ""
    return os.fsdecode(first) if ended else ""


def _missing_for_env(argument: str, cwd: StrPath, environment: Mapping[str, str]) -> str | None:
    """Return the program that env(1) does not find; None if it does, or if that is not certain."""
    wanted = argument
    if argument.startswith("-S"):
        wanted = argument[2:].strip(" ").partition(" ")[0]
    if not wanted or wanted.startswith("-") or not _QUOTED_IN_ENV.isdisjoint(wanted):
        return None
    if "/" in wanted:
        return None if os.path.exists(os.path.join(cwd, wanted)) else wanted
    return None if find(wanted, cwd, environment) else wanted


def _note_windows_lines(name: str, first: str) -> None:
    if first.endswith("\r"):
        print_stderr(
            f"gpulease: {name} has the line ends of Windows, which shells read as part of the last "
            f"word; {_to_unix(name)}"
        )


def _to_unix(name: str) -> str:
    from shlex import quote

    return rf"sed -i 's/\r$//' {quote(name)} removes them"


def not_runnable(
    command: Sequence[str], cwd: StrPath, environment: Mapping[str, str]
) -> CommandNotFound | CommandNotExecutable:
    """Return the error for a command that cannot be executed, with what was probably meant."""
    name = command[0]
    here = os.path.join(cwd, name)
    if not name:
        return CommandNotFound("cannot run the command: its name is empty")
    if "/" in name and os.path.isdir(here):
        return CommandNotExecutable(f"cannot run {name}: it is a directory")
    places = (here,) if "/" in name else on_path(name, cwd, environment)
    for path in places:
        if os.path.isfile(path):
            shown = name if "/" in name else path
            return CommandNotExecutable(
                f"cannot run {name}: it is not executable", _how_to_run(shown)
            )
    if (meant := _line_of_a_shell(command)) is not None:
        return CommandNotFound(f"cannot run {name!r}: no such command", meant)
    if "/" in name:
        hint = None if name.startswith("/") else f"the path is relative to {os.fspath(cwd)}"
        return CommandNotFound(f"cannot run {name}: no such file", hint)
    return _not_on_path(command, cwd, environment)


def _line_of_a_shell(command: Sequence[str]) -> str | None:
    """Return what to type for a word that looks like more than the name of a program."""
    from shlex import join, split

    name, *rest = command
    variable, equals, _ = name.partition("=")
    if equals and variable.isidentifier():
        return f"it sets a variable: gpulease run -- {join(['env', name, *rest])}"
    if name in _OF_SHELLS:
        return (
            "it is part of a shell, and no program; a job starts in this directory with this "
            f"environment, so use it before gpulease run, or: "
            f"gpulease run -- {join(['bash', '-c', f'{join(command)} && COMMAND'])}"
        )
    if not any(char.isspace() for char in name):
        return None
    if any(each in name for each in _OPERATORS):
        return f"it looks like a line for a shell: gpulease run -- {join(['bash', '-c', name])}"
    try:
        words = split(name)
    except ValueError:  # a quote is not closed
        return None
    line = join([*words, *rest])
    return f"it looks like a command with its arguments in quotes: gpulease run -- {line}"


def _not_on_path(
    command: Sequence[str], cwd: StrPath, environment: Mapping[str, str]
) -> CommandNotFound:
    from shlex import join

    name = command[0]
    if name.endswith((".py", ".ipynb")):
        what = "script" if name.endswith(".py") else "notebook"
        return CommandNotFound(
            f"cannot run {name}: no such file in {os.fspath(cwd)}",
            f"give the path of the {what}, absolute or relative to that directory",
        )
    here = os.path.join(cwd, name)
    if os.path.isdir(here):
        return CommandNotFound(
            f"cannot run {name}: it is not on your PATH, and here it is a directory",
            f"name a file in it: gpulease run {name}/FILE",
        )
    if is_program(here):
        return CommandNotFound(
            f"cannot run {name}: it is not on your PATH", f"for the file here, write ./{name}"
        )
    if os.path.isfile(here):
        return CommandNotFound(
            f"cannot run {name}: it is not on your PATH, and the file here is not executable",
            _how_to_run(name),
        )
    # Debian has no python outside of virtual environments.
    if name == "python" and find("python3", cwd, environment):
        hint = f"python3 is on your PATH: gpulease run -- {join(['python3', *command[1:]])}"
    else:
        hint = (
            "check its spelling; options of gpulease run come before the command; for an alias of "
            f"your shell: gpulease run -- {join(['bash', '-ic', join(command)])}"
        )
    return CommandNotFound(f"cannot run {name}: no such command", hint)


def _how_to_run(path: str) -> str:
    suffix = os.path.splitext(path)[1]
    interpreter = _INTERPRETERS.get(suffix)
    if interpreter is None:
        return f"chmod +x {path}, or name its interpreter: gpulease run -- INTERPRETER {path}"
    return f"gpulease run -- {interpreter} {path}, or chmod +x {path}"


def refuse_notebook(name: str, words: Sequence[str], cwd: Path) -> None:
    """Refuse a notebook that could not be executed or saved, before its job waits in the queue.

    `words` are its arguments: none, or the file of --output.

    Raises:
        CommandNotExecutable: it is no notebook, or its output cannot be written.
    """
    why = _fault_of(cwd / name)
    if why is not None:
        raise CommandNotExecutable(f"cannot run {name}: {why}")
    asked = (
        words[-1].removeprefix("--output=") if words else f"{name.removesuffix('.ipynb')}.out.ipynb"
    )
    output = cwd / asked
    if output.is_dir():
        raise CommandNotExecutable(f"cannot write the output of {name}: {asked} is a directory")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        what = "you have no permission to write" if output.parent.is_dir() else "no such directory"
        raise CommandNotExecutable(
            f"cannot write the output of {name}: {output.parent}: {what}",
            f"name another file: gpulease run {name} --output FILE",
        )


def _fault_of(notebook: Path) -> str | None:
    import json  # only for notebooks

    try:
        content = json.loads(notebook.read_bytes())
    except (ValueError, RecursionError):
        return "it is no notebook: it has no JSON"
    except OSError as error:
        return error.strerror
    version = content.get("nbformat") if isinstance(content, dict) else None
    if not isinstance(version, int):
        return "it is no notebook: it has no nbformat"
    if version < _OLDEST_NOTEBOOK:
        return f"its format is {version}: convert it with jupyter nbconvert --to notebook"
    if not isinstance(content.get("cells"), list):
        return "it is no notebook: it has no cells"
    return None
