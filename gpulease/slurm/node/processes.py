"""Finds the processes of Slurm's jobs: by Slurm's cgroup, or by ancestry from slurmstepd.

slurmstepd is root's, runs each step of a job, and calls itself `slurmstepd: [JOB.STEP]`. Users can
give their processes that name, but not its uids together with its program.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from gpulease.domain.gpu import JobId
from gpulease.host import cgroups
from gpulease.host.proc_reader import command_of, name_of, read, real_uid
from gpulease.shim.process_tree import Entry, entry, processes

_PROGRAM = "slurmstepd"
_TITLE = re.compile(r"slurmstepd: \[([1-9][0-9]{0,17})\.[A-Za-z0-9+_]+\]\s*")
_DEEPEST = 4096
_MOST_REMEMBERED = 4096


class SlurmProcesses:
    """Tells which job of Slurm a process belongs to."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], int] = {}
        """The jobs of known slurmstepds, by pid and start."""
        self._directories: dict[Path, int] = {}
        """The jobs of cgroups with a SLUID for a name, which Slurm gives once."""

    def jobs_of(self, pids: Iterable[int], jobs: Mapping[int, JobId]) -> dict[int, JobId]:
        """Return the lease of each of `pids` that belongs to one of `jobs`, by Slurm's number."""
        if not jobs:
            return {}
        found = {pid: self.job_of(pid) for pid in pids}
        return {pid: jobs[job] for pid, job in found.items() if job is not None and job in jobs}

    def job_of(self, pid: int) -> int | None:
        """Return Slurm's number of the job that a process belongs to, or None."""
        job = self._by_cgroup(pid)
        steps = (self._step(each) for each in _upwards(pid)) if job is None else ()
        return next((step for step in steps if step is not None), job)

    def _by_cgroup(self, pid: int) -> int | None:
        found = cgroups.slurm_directory(pid)
        if found is None:
            return None
        directory, number = found
        return self.job_in(directory) if number is None else number

    def job_in(self, directory: Path) -> int | None:
        """Return the job that has a cgroup with any name, from the slurmstepds in it."""
        if directory not in self._directories:
            steps = filter(None, map(entry, cgroups.slurm_steps_in(directory)))
            job = next((job for each in steps if (job := self._step(each)) is not None), None)
            if job is None:
                return None
            if len(self._directories) >= _MOST_REMEMBERED:
                self._directories.clear()
            self._directories[directory] = job
        return self._directories[directory]

    def with_steps(self, jobs: Collection[int]) -> set[int]:
        """Return those of `jobs` that have a slurmstepd here. Reads all of /proc if one has not."""
        there = {job for key, job in list(self._steps.items()) if _is_living(*key)}
        return there if there.issuperset(jobs) else set(self.steps().values())

    def steps(self) -> dict[int, int]:
        """Return the job of each slurmstepd that runs here, by pid. Reads all of /proc."""
        found = {each.pid: self._step(each) for each in processes() if not each.zombie}
        return {pid: job for pid, job in found.items() if job is not None}

    def of_job(self, job: int, among: Collection[Entry] | None = None) -> set[Entry]:
        """Return the living processes of a job. Reads all of /proc, unless `among` are all.

        Leaves out root's: slurmstepd, and the epilog, which may run in the job's cgroup.
        """
        there = {each.pid: each for each in (processes() if among is None else among)}
        below: dict[int, bool] = {}
        return {
            found
            for found in there.values()
            # The user first: most processes are root's, and the rest costs several reads.
            if not found.zombie
            and real_uid(found.pid) != 0
            and (self._is_below(found, job, there, below) or self._by_cgroup(found.pid) == job)
        }

    def _is_below(
        self, found: Entry, job: int, there: Mapping[int, Entry], known: dict[int, bool]
    ) -> bool:
        """Return whether a process is a slurmstepd of a job or below one; add to `known`."""
        path: list[int] = []
        above: Entry | None = found
        # Not recursive: users choose the depth. Pids that are reused meanwhile may form a circle.
        while above is not None and above.pid not in known:
            known[above.pid] = self._step(above) == job
            if known[above.pid]:
                break
            path.append(above.pid)
            above = there.get(above.parent)
        is_below = above is not None and known[above.pid]
        known.update(dict.fromkeys(path, is_below))
        return is_below

    def _step(self, found: Entry) -> int | None:
        """Return the job of a slurmstepd; None for other processes."""
        key = found.pid, found.started
        if key in self._steps:
            return self._steps[key]
        # The name first: it is cheap, and excludes nearly all.
        if name_of(found.pid) != _PROGRAM or not is_slurmstepd(found.pid):
            return None
        title = _TITLE.fullmatch(" ".join(command_of(found.pid) or ()))
        if title is None:
            return None
        if len(self._steps) >= _MOST_REMEMBERED:
            self._steps.clear()
        return self._steps.setdefault(key, int(title[1]))


def is_slurmstepd(pid: int) -> bool:
    """Return whether a process runs root's slurmstepd."""
    for line in (read(pid, "status") or b"").splitlines():
        # Real, effective, saved and file system uid: a program that is setuid root has others.
        if line.startswith(b"Uid:") and set(line.split()[1:]) != {b"0"}:
            return False
    try:
        program = Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return False
    return program.name.startswith(_PROGRAM)  # Debian's is slurmstepd-wlm


def _upwards(pid: int) -> Iterator[Entry]:
    """Yield a process and those above it."""
    for _ in range(_DEEPEST):
        found = entry(pid)
        if found is None:
            return
        yield found
        if found.parent == 0:
            return
        pid = found.parent


def directory_of(job: int) -> Path | None:
    """Return the cgroup of a job of Slurm in version 2, or None."""
    processes = SlurmProcesses()
    for directory in cgroups.slurm_directories():
        if directory.name == f"job_{job}" or processes.job_in(directory) == job:
            return directory
    return None


def _is_living(pid: int, started: int) -> bool:
    found = entry(pid)
    return found is not None and not found.zombie and found.started == started
