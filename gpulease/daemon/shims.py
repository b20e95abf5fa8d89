"""The shim of a job as its directory shows it: whether it lives, its session, its scope.

If the directory is missing, the job on record tells which process is the shim.
"""

import os
from pathlib import Path

import psutil

from gpulease.domain.job import Job
from gpulease.process import control
from gpulease.process.patience import real_uid
from gpulease.process.proc import Entry, entry
from gpulease.process.record import is_alive, read_record

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CLOCK_SLACK_S = 2.0
"""The kernel gives the time of boot in whole seconds."""
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


def has_living_shim(directory: Path, job: Job | None) -> bool:
    """Tell whether the shim of a job lives, also if the directory of the job is missing."""
    if is_alive(directory):
        return True
    return job is not None and read_record(directory) is None and shim_on_record(job) is not None


def shim_on_record(job: Job) -> Entry | None:
    """Return the process that `job` names as its shim, or None if that is another process by now.

    The shim of a job starts before its command. A later process with the same pid does not.
    """
    if job.shim_pid is None or job.started_at is None:
        return None
    found = entry(job.shim_pid)
    if found is None or found.zombie or real_uid(found.pid) != job.owner.uid:
        return None
    started_at_s = psutil.boot_time() + found.started / _TICKS_PER_S
    return found if started_at_s <= job.started_at.timestamp() + _CLOCK_SLACK_S else None


def session_on_record(job: Job) -> int | None:
    """Return the session that the shim of `job` led, if the job started since the last boot."""
    if job.started_at is None or job.started_at.timestamp() <= psutil.boot_time():
        return None
    return job.shim_pid
