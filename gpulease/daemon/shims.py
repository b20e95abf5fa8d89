"""The shim of a job as its directory shows it: whether it lives, its session, its scope."""

from pathlib import Path

import psutil

from gpulease.process import control
from gpulease.process.proc import Entry, entry
from gpulease.process.record import is_alive, read_record

_SCOPE = "scope"
"""An empty file: a name alone would not tell our scopes from those of another daemon."""


def note_scope(directory: Path) -> None:
    """Remember that the shim of a launch was put into a scope. Raises OSError on a full disk."""
    (directory / _SCOPE).touch(mode=0o600)


def has_scope(directory: Path) -> bool:
    """Tell whether the shim of a launch was put into a scope of ours."""
    return (directory / _SCOPE).exists()


def living_shim(directory: Path) -> Entry | None:
    """Return the shim of a job that has not ended, or None."""
    record = read_record(directory)
    if record is None or record.exited is not None or not is_alive(directory):
        return None
    # One of before, whose record does not begin with who made it, is asked through its socket,
    # which is the user's: they can see to it that there is no answer.
    known = record.started.shim_pid if record.started else record.claimed_by
    pid = control.shim_pid(directory) if known is None else known
    return None if pid is None else entry(pid)


def session_of(directory: Path) -> int | None:
    """Return the session that the shim of a launch led, if that was since the machine's boot."""
    record = read_record(directory)
    if record is None or record.started is None:
        return None
    started = record.started
    return started.shim_pid if started.started_at.timestamp() > psutil.boot_time() else None
