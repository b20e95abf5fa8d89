"""The script that a command runs: which word it is, its options of `run`, and whether it changed.

`gpulease run` imports this at every start.
"""

from __future__ import annotations

import os
from stat import S_ISREG

from gpulease.errors import BadUsage
from gpulease.wire.text import from_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from gpulease.wire.jobs import JobView

_SUFFIXES = (".py", ".sh", ".bash", ".R", ".r", ".jl", ".pl", ".rb", ".lua")
_NO_FILE = frozenset({"-c", "-m", "-e"})
"""Options of interpreters after which the program is no file."""
_CLOCKS_DIFFER_S = 0.1
"""A file on another machine has its time from there."""
_MOST_WORDS = 32
"""Of a command, among which a script with options is looked for: a command may name many files."""
_READ = 64 << 10
"""Bytes at the beginning of a script in which options may stand."""
_MARK = b"gpulease:"
_NO_MARK = b"gpulease -"
"""An option without the colon: silently ignored, it would be missed once the job is stopped."""
_INTERPRETERS = ("python", "pypy", "ipython", "Rscript", "julia", "perl", "ruby", "lua")
_STARTERS = (
    "sh", "bash", "dash", "zsh", "ksh", "fish", "torchrun", "accelerate", "deepspeed", "horovodrun",
    "mpirun", "mpiexec", "env", "nice", "nohup", "stdbuf", "time", "timeout", "uv", "conda",
)  # fmt: skip
_QUOTES = frozenset("'\"\\#")


def script_place(argv: Sequence[str], cwd: str) -> int | None:
    """Return which word of a command is the script that it runs; None if none is."""
    for place, word in enumerate(argv):
        if word in _NO_FILE:
            return None
        path = os.path.join(cwd, word)
        is_named_so = word.endswith(_SUFFIXES) and os.path.isfile(path)
        is_searched = place == 0 and "/" not in word  # on the PATH, and not in this directory
        if not word.startswith("-") and (
            is_named_so or (not is_searched and _begins_as_script(path))
        ):
            return place
    return None


def _runs_scripts(program: str) -> bool:
    """Return whether a program runs the script among its arguments: cat and diff do not."""
    name = os.path.basename(program)
    return name.startswith(_INTERPRETERS) or name in _STARTERS


def options_in_script(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of `run` in the script of a command as text, and where each text stands.

    They are in its first comments, in lines such as `# gpulease: --mem 4G`. What is no regular
    file, or cannot be read, has none.

    Raises:
        BadUsage: the colon is missing.
    """
    place = script_place(command[:_MOST_WORDS], "")
    if place is None or (place > 0 and not _runs_scripts(command[0])):
        return
    for number, line in enumerate(_beginning(command[place]).split(b"\n"), 1):
        text = line.strip()
        if text and not text.startswith(b"#"):
            return
        comment = text[1:].lstrip()
        where = f"{command[place]}, line {number}"
        if comment.startswith(_MARK):
            yield os.fsdecode(comment[len(_MARK) :]), where
        elif comment.startswith(_NO_MARK):
            raise BadUsage(
                f"cannot read the options in {where}: there is no colon after gpulease",
                "write them as # gpulease: --mem 4G",
            )


def _beginning(path: str) -> bytes:
    """Return the first lines of a script; none if it has no options there."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            is_file = S_ISREG(os.fstat(handle).st_mode)
            content = os.read(handle, _READ) if is_file else b""
        finally:
            os.close(handle)
    except OSError:
        return b""
    if len(content) == _READ:
        content = content[: content.rfind(b"\n") + 1]  # the last line may be cut
    return content.removeprefix(b"\xef\xbb\xbf") if b"gpulease" in content else b""


def script_change(job: JobView) -> str | None:
    """Say if the script of a job changed since its submission, as far as the caller can see it."""
    if job.cwd is None or job.state not in ("queued", "granted", "active"):
        return None
    try:
        name, changed_at = _script_of(job, from_wire(job.cwd))
    except (OSError, ValueError):
        return None
    from gpulease.drawing.words import instant

    if (changed_at - instant(job.submitted_at)).total_seconds() <= _CLOCKS_DIFFER_S:
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
    from datetime import UTC, datetime

    from gpulease.drawing.words import clean

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
