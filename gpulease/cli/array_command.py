"""The command of the elements of an array, and where it probably does not work as intended."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

_INDEX = "$GPULEASE_ARRAY_INDEX"
_NAMED = re.compile(r"{([A-Za-z_]\w*)}")
_MOST_READ = 1 << 20


def array_doubts(
    indices: str, typed: Sequence[str], argv: Sequence[str], cwd: str
) -> Iterator[str]:
    """Say where an array probably does not work as intended.

    Args:
        indices: the value of --array.
        typed: the command line of the job.
        argv: what is executed for it.
        cwd: its directory.
    """
    number, _, _ = indices.strip().partition("%")
    if number.isascii() and number.isdecimal() and int(number) > 1:
        yield (
            f"gpulease: --array {number} is one job, with index {int(number)}; "
            f"for {int(number)} jobs: --array 0-{int(number) - 1}"
        )
    is_python = Path(argv[0]).name.startswith(("python", "pypy"))
    if any("{}" in word and not any(map(str.isspace, word)) for word in typed):
        return  # the daemon replaces it
    if any(_INDEX in word for word in typed) and is_python:
        words = [word.replace(_INDEX, "{}") for word in typed]
        why = f"no shell replaces {_INDEX} in an argument of the command"
    elif _uses_index(argv, cwd):
        return
    elif any("{}" in word for word in typed):
        yield f"gpulease: {{}} stays as it is between spaces; in single quotes, use {_INDEX}"
        return
    else:
        words, why = _with_index(typed)
    if why:
        line = shlex.join(words).replace("'{}'", "{}")
        yield f"gpulease: {why}; for the index of each element: {line}"


def grid_doubts(grid: Sequence[str], typed: Sequence[str]) -> Iterator[str]:
    """Say which {NAME} of a command stays as it is; `grid` are the values of --grid."""
    names = [each.partition("=")[0].strip() for each in grid]
    for name in {each: None for word in typed for each in _NAMED.findall(word)}:
        if name not in names:
            yield f"gpulease: {{{name}}} stays as it is: --grid has {', '.join(names)}"


def _uses_index(argv: Sequence[str], cwd: str) -> bool:
    """Return whether the command, or a file that it names, names the variable with the index."""
    return any("GPULEASE_ARRAY" in word or _names_index(Path(cwd, word)) for word in argv)


def _names_index(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return b"GPULEASE_ARRAY" in file.read(_MOST_READ)
    except (OSError, ValueError):
        return False


def _with_index(typed: Sequence[str]) -> tuple[list[str], str]:
    """Return a command with {} where a shell may have removed the index, and what is missing.

    A shell replaces an unquoted $GPULEASE_ARRAY_INDEX by nothing, and quoted by an empty word.
    """
    lost = f"your shell removes {_INDEX} outside of single quotes"
    words = list(typed)
    for place, word in enumerate(words[1:], 1):
        if not word or (word.startswith("-") and word.endswith("=")):
            words[place] = word + "{}"
            what = f"{word} has no value" if word else f"argument {place} is empty"
            return words, f"{what}, and {lost}"
    if len(words) > 1 and words[-1].startswith("--") and "=" not in words[-1]:
        return [*words, "{}"], f"if {words[-1]} takes a value, it has none: {lost}"
    return words, ""
