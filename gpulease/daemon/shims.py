"""The shim of a job as its directory shows it: whether it lives, and the session that it led."""

from pathlib import Path

import psutil

from gpulease.process import control
from gpulease.process.proc import Entry, entry
from gpulease.process.record import is_alive, read_record


def living_shim(directory: Path) -> Entry | None:
    """Return the shim of a job that has not ended, or None."""
    record = read_record(directory)
    if record is None or record.exited is not None or not is_alive(directory):
        return None
    # Before its worker has started the record does not say who it is.
    pid = record.started.shim_pid if record.started else control.shim_pid(directory)
    return None if pid is None else entry(pid)


def session_of(directory: Path) -> int | None:
    """Return the session that the shim of a launch led, if that was since the machine's boot."""
    record = read_record(directory)
    if record is None or record.started is None:
        return None
    started = record.started
    return started.shim_pid if started.started_at.timestamp() > psutil.boot_time() else None
