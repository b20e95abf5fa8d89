"""The script that a command runs: which word it is, and whether it changed since the submission."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

from gpulease.drawing.words import clean, instant
from gpulease.wire.text import from_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpulease.wire.jobs import JobView

_SUFFIXES = (".py", ".sh", ".bash", ".R", ".r", ".jl", ".pl", ".rb", ".lua")
_NO_FILE = frozenset({"-c", "-m", "-e"})
"""Options of interpreters after which the program is no file."""
_CLOCKS_DIFFER = timedelta(seconds=0.1)
"""A file on another machine has its time from there."""
_QUOTES = frozenset("'\"\\#")


def script_place(argv: Sequence[str], cwd: str) -> int | None:
    """Return which word of a command is the script that it runs; None if none is."""
    if argv and "/" in argv[0] and _begins_as_script(os.path.join(cwd, argv[0])):
        return 0
    for place, word in enumerate(argv[1:], 1):
        if word in _NO_FILE:
            return None
        path = os.path.join(cwd, word)
        is_named_so = word.endswith(_SUFFIXES) and os.path.isfile(path)
        if not word.startswith("-") and (is_named_so or _begins_as_script(path)):
            return place
    return None


def script_change(job: JobView) -> str | None:
    """Say if the script of a job changed since its submission, as far as the caller can see it."""
    if job.cwd is None or job.state not in ("queued", "granted", "active"):
        return None
    try:
        name, changed_at = _script_of(job, from_wire(job.cwd))
    except (OSError, ValueError):
        return None
    if changed_at <= instant(job.submitted_at) + _CLOCKS_DIFFER:
        return None
    if job.started_at is None:
        return f"{name} changed since submission; the job will run the new version"
    if changed_at < instant(job.started_at):
        return f"{name} changed since submission; the job runs the new version"
    return f"{name} changed since submission, after the job had started"


def _script_of(job: JobView, cwd: str) -> tuple[str, datetime]:
    """Return the script of a job as its command names it, and when it changed.

    Raises:
        ValueError: there is none, or the command is cut short.
        OSError: the caller cannot see it.
    """
    if _QUOTES.isdisjoint(job.command):
        argv = job.command.split()
    else:
        from shlex import split  # which imports re

        argv = split(job.command)
    place = script_place(argv, cwd)
    if place is None:
        raise ValueError("no script")
    changed = os.stat(os.path.join(cwd, argv[place])).st_mtime
    return clean(argv[place]), datetime.fromtimestamp(changed, UTC)


def _begins_as_script(path: str) -> bool:
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False
