"""Refuse a notebook that could not be executed or saved, before its job waits in the queue."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from gpulease.errors import CommandNotExecutable

_OLDEST = 4
"""Of the formats of notebooks; Jupyter has written this one since 2015."""


def refuse_unusable(name: str, words: Sequence[str], cwd: Path) -> None:
    """Check the notebook `name` with its arguments: nothing, or the file of --output.

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
    try:
        content = json.loads(notebook.read_bytes())
    except (ValueError, RecursionError):
        return "it is no notebook: it has no JSON"
    except OSError as error:
        return error.strerror
    version = content.get("nbformat") if isinstance(content, dict) else None
    if not isinstance(version, int):
        return "it is no notebook: it has no nbformat"
    if version < _OLDEST:
        return f"its format is {version}: convert it with jupyter nbconvert --to notebook"
    if not isinstance(content.get("cells"), list):
        return "it is no notebook: it has no cells"
    return None
