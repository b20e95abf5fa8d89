"""The process-finder port: whose a process is, among the jobs of this installation."""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpulease.domain.job import Job
from gpulease.domain.memory import JobId
from gpulease.process.table import ProcessTable

_LONGEST_COMMAND = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is, for people."""

    user: str | None
    name: str | None
    command: str | None


def _readable(text: str) -> str:
    """Return text that any reader can take: names of processes are bytes, whatever they mean."""
    return os.fsencode(text).decode(errors="backslashreplace")


class Finder:
    """Looks processes up in the table, by the shims and the markers of our own jobs."""

    def __init__(self, table: ProcessTable, installation: str) -> None:
        self._table = table
        self._marker_prefix = f"{installation}/"

    def identify(self, pid: int) -> Identity | None:
        """Return who a process is, or None for one that is gone."""
        found = self._table.identify(pid)
        if found is None:
            return None
        command = shlex.join(found.command)[:_LONGEST_COMMAND]
        return Identity(found.user, _readable(found.name), _readable(command) or None)

    def jobs_of(self, pids: Iterable[int], jobs: Sequence[Job]) -> Mapping[int, JobId]:
        """Return the job of each pid that belongs to one of `jobs`."""
        shims = {job.shim_pid: job.id for job in jobs if job.shim_pid is not None}
        owners = {job.id: job.owner.uid for job in jobs}
        return self._table.jobs_of(pids, shims, self._marker_prefix, owners)
