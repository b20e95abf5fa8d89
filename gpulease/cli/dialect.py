"""Setting and unsetting variables in the languages of shells, quoted so that `eval` is safe."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

Dialect = Literal["sh", "fish", "csh"]

_DIALECTS: Mapping[str, Dialect] = {"fish": "fish", "csh": "csh", "tcsh": "csh"}
_LIKE_SH = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "busybox", "yash"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def dialect_of(program: str | None, login_shell: str | None) -> Dialect:
    """Return what a shell understands: by its name, or else by what $SHELL says."""
    for path in (program, login_shell):
        # A login shell calls itself -bash.
        name = (path or "").rpartition("/")[2].removeprefix("-")
        if name in _DIALECTS:
            return _DIALECTS[name]
        if name in _LIKE_SH:
            return "sh"
    return "sh"


def statements(new: Mapping[str, str], unset: Iterable[str], dialect: Dialect) -> str:
    """Return the lines that set and unset variables; each ends in a semicolon.

    A name that no shell accepts is left out: it came with the environment and stays in it.
    """
    gone = [_UNSET[dialect].format(name) for name in unset if _NAME.fullmatch(name)]
    given = [
        _SET[dialect].format(name, _quoted(value, dialect))
        for name, value in new.items()
        if _NAME.fullmatch(name)
    ]
    return "\n".join([*gone, *given])


_SET: Mapping[Dialect, str] = {
    "sh": "export {}={};",
    "fish": "set -gx {} {};",
    "csh": "setenv {} {};",
}
_UNSET: Mapping[Dialect, str] = {"sh": "unset {};", "fish": "set -e {};", "csh": "unsetenv {};"}


def _quoted(value: str, dialect: Dialect) -> str:
    match dialect:
        case "fish":
            inside = value.replace("\\", "\\\\").replace("'", "\\'")
        case "csh":
            # History is looked for inside quotes too, and a line ends there.
            inside = value.replace("'", "'\\''").replace("!", "\\!").replace("\n", "\\\n")
        case "sh":
            inside = value.replace("'", "'\\''")
    return f"'{inside}'"
