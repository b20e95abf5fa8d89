"""Whether the framework hook has reached a process, by how the process was started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HOOK: Final = "GPULEASE_HOOK"
PATH: Final = "PYTHONPATH"
SAID: Final = "is not held by the framework hook"
"""What each sentence about a process that is not held has in it."""
_SHUT_OUT: Final = {
    "I": "it runs with -I, which ignores PYTHONPATH",
    "E": "it runs with -E, which ignores PYTHONPATH",
    "S": "it runs with -S, without the site module that loads the hook",
}
_TAKES_A_VALUE: Final = ("W", "X")
_BEGINS_THE_PROGRAM: Final = ("c", "m")
_LONG_WITH_A_VALUE: Final = "--check-hash-based-pycs"


@dataclass(frozen=True, slots=True)
class Start:
    """How a process was started, as far as the hook depends on it."""

    command: Sequence[str]
    environment: Mapping[str, str] | None
    """What it was given of HOOK and PATH; None where that cannot be read."""
    is_python: bool
    container: str | None = None


@dataclass(frozen=True, slots=True)
class Unheld:
    """A process of a job that uses a GPU, and that the hook does not hold."""

    pid: int
    command: str
    why: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}) {SAID}: {self.why}"


def why_unheld(start: Start, hooks: str) -> str | None:
    """Return why the hook in the folder `hooks` has not reached a process; None: it has.

    None as well where there is no telling.
    """
    if start.environment is None:
        return None
    if start.container is not None:
        return f"it is in container {start.container}, where the hook is not known to be"
    if HOOK not in start.environment:
        return "it was started without the job's environment (env -i, sudo and the like)"
    if not start.is_python:
        return "it is not Python"
    if hooks not in start.environment.get(PATH, "").split(":"):
        return "its PYTHONPATH does not lead to the hook"
    return next((_SHUT_OUT[flag] for flag in _flags(start.command) if flag in _SHUT_OUT), None)


def _flags(command: Sequence[str]) -> str:
    """Return the letters of Python's own options: those before the program; see python(1)."""
    flags, words = "", iter(command[1:])
    for word in words:
        if word.startswith("--"):
            if word == _LONG_WITH_A_VALUE:
                next(words, None)
            continue
        letters, rest = _letters(word)
        flags += letters
        if rest is None or rest.startswith(_BEGINS_THE_PROGRAM):
            break
        if rest in _TAKES_A_VALUE:
            next(words, None)  # the value is a word of its own
    return flags


def _letters(word: str) -> tuple[str, str | None]:
    """Return the plain options in a word, and what ends them; None there: it is no option."""
    if not word.startswith("-") or word == "-":
        return "", None
    for place, letter in enumerate(word[1:], 1):
        if letter in (*_TAKES_A_VALUE, *_BEGINS_THE_PROGRAM):
            return word[1:place], word[place:]
    return word[1:], ""
