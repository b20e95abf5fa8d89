"""The enforcement levels that this machine offers, and the driver's limits of running jobs.

`EnforcementLevels` knows which levels are available, and why the others are not. `LimitRemoval`
removes the driver's limits when jobs end, before their cgroups are removed. `LimitRestore` checks
after a restart whether the driver still limits running jobs. It sets a missing limit again; if that
fails, it notes that the driver does not limit the lease, and tells the owner.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulease.domain.enforcement import EnforcementLevel, in_level_order
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Lease
from gpulease.host import cgroups, scopes
from gpulease.service.log_once import LogOnce
from gpulease.service.observation import Observation
from gpulease.service.ports import MemoryLimiter, NotLimited
from gpulease.slurm.node.processes import directory_of
from gpulease.wire.machine import EnforcementLevelView

FOREIGN_PIDS = (
    "this daemon runs in another pid namespace, and the driver may list processes by the pids of "
    "the host"
)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the levels depend on and does not change while the daemon runs."""

    simulated: bool
    no_scopes: str | None
    """Why jobs do not get scopes; None: they do."""
    hooks_closed_at: Path | None
    """The directory that users cannot enter, so that they cannot read the hooks."""


class EnforcementLevels:
    """Knows the levels, and asks the driver once for each of its versions."""

    def __init__(
        self,
        circumstances: Circumstances,
        limiter: MemoryLimiter | None,
        driver: Callable[[], str | None],
        *,
        driver_limits: bool = True,
        watch: Callable[[], bool] = lambda: False,
        watch_varies: Callable[[], bool] = lambda: False,
        watch_is_blind: Callable[[], bool] = lambda: False,
    ) -> None:
        """`limiter` belongs to the real driver; `driver_limits` says whether to use it."""
        self.driver_limits = driver_limits
        self.watch = watch
        self.watch_varies = watch_varies
        self.watch_is_blind = watch_is_blind
        self._circumstances = circumstances
        self._limiter = limiter
        self._driver = driver
        self._asked: tuple[str | None, dict[str, str | None]] | None = None
        """The version of the driver, and why it has no limits on each GPU, by label."""

    @property
    def everywhere(self) -> tuple[str, ...]:
        """The enforcement levels of all leases that are granted now."""
        has = {
            EnforcementLevel.FRAMEWORK: self._framework()[0],
            EnforcementLevel.WATCH: self.watch() and not self.watch_is_blind(),
        }
        return in_level_order(level for level, is_there in has.items() if is_there)

    def limiter(self) -> MemoryLimiter | None:
        """Return the limiter, or None if the driver cannot set limits here."""
        return self._limiter if self._no_driver_limit() is None else None

    async def ask(self, seen: Observation) -> None:
        """Ask the driver whether it can set limits, unless that is known for its version."""
        if self._limiter is None or not self._is_worth_asking(seen):
            return
        version, cgroup = self._driver(), cgroups.own_directory()
        if cgroup is None:
            return
        answers: dict[str, str | None] = {}
        for reading in _leasable(seen):
            with suppress(NotLimited):  # the next observation asks again
                answers[reading.label] = await asyncio.to_thread(
                    self._limiter.why_unavailable, reading.uuid, cgroup
                )
        self._asked = version, answers

    def _is_worth_asking(self, seen: Observation) -> bool:
        there = {reading.label for reading in _leasable(seen)}
        if self._asked is None or self._asked[0] != self._driver():
            return bool(there)
        return not there <= self._asked[1].keys()

    def views(self) -> list[EnforcementLevelView]:
        """Return each level, whether it is available, and why."""
        found = {
            EnforcementLevel.DRIVER: self._driver_level(),
            EnforcementLevel.FRAMEWORK: self._framework(),
            EnforcementLevel.WATCH: self._watch_level(),
            EnforcementLevel.DEVICES: self._devices(),
        }
        varies = {EnforcementLevel.WATCH} if self.watch_varies() else set()
        return [
            EnforcementLevelView(level.value, *found[level], varies=level in varies)
            for level in EnforcementLevel
        ]

    def _driver_level(self) -> tuple[bool, str]:
        why = self._no_driver_limit()
        if why is not None:
            return False, why
        if not self._answers():
            return False, "the driver has not answered yet whether it supports memory limits"
        refusing = {label: each for label, each in self._answers().items() if each is not None}
        but = "".join(f", but not on GPU {label}: {each}" for label, each in refusing.items())
        return True, f"an allocation beyond the lease fails in every program{but}"

    def _no_driver_limit(self) -> str | None:
        """Return why the driver sets no limits; None if it does on some GPU."""
        no_scopes = self._circumstances.no_scopes
        obstacles = {
            "simulated GPUs have no driver": self._circumstances.simulated,
            "a separate process calls NVML, which crashed gpuleased": self._limiter is None,
            "turned off by driver_limits": not self.driver_limits,
            "only root can set them": os.geteuid() != 0,
            f"limits need a scope for each job: {no_scopes}": no_scopes is not None,
            "cgroups of version 2 are not mounted": not cgroups.has_version_2(),
        }
        for why, applies in obstacles.items():
            if applies:
                return why
        answers = [each for each in self._answers().values() if each is not None]
        all_refuse = len(answers) == len(self._answers())
        return "; ".join(dict.fromkeys(answers)) if answers and all_refuse else None

    def _answers(self) -> dict[str, str | None]:
        return self._asked[1] if self._asked is not None else {}

    def _framework(self) -> tuple[bool, str]:
        if self._circumstances.simulated:
            return False, "the hooks limit nothing on simulated GPUs"
        if self._circumstances.hooks_closed_at is not None:
            return (
                False,
                f"users cannot read the hooks: {self._circumstances.hooks_closed_at} is closed",
            )
        return True, "hooks limit the frameworks that they know, in programs that do not evade them"

    def _watch_level(self) -> tuple[bool, str]:
        but = ", with exceptions in the settings" if self.watch_varies() else ""
        if self.watch_is_blind():
            return False, f"the memory of jobs is not known: {FOREIGN_PIDS}"
        if self.watch():
            return True, f"a job that stays over its lease is notified and then stopped{but}"
        why = "a job over its lease is notified and not stopped (overuse = warn)"
        return False, f"{why}{but}"

    def _devices(self) -> tuple[bool, str]:
        if self._circumstances.simulated:
            return False, "simulated GPUs have no devices"
        if self._circumstances.no_scopes is not None:
            return False, f"a job can open every GPU: {self._circumstances.no_scopes}"
        own = cgroups.own_directory()
        if own is not None and scopes.kernel_has_device_rules(own) is False:
            return False, "a job can open every GPU: the kernel was built without CONFIG_CGROUP_BPF"
        return True, "a job can open only its own GPUs"


def _leasable(seen: Observation) -> list[GpuReading]:
    """Return the readable GPUs; of a GPU in MIG mode, only its MIG devices."""
    return [each for each in seen.readings if each.fault is None and not each.mig_mode]


def why_no_scopes(confined: bool) -> str | None:
    """Return why jobs do not get scopes, or None if they do.

    `confined` means that the daemon runs as the system's service.
    """
    if not scopes.is_available():
        return "the machine does not run systemd"
    if os.geteuid() != 0:
        return "only root's daemon creates scopes"
    return None if confined else "gpuleased was not started by its systemd unit"


_log = logging.getLogger(__name__)


class LimitRemoval:
    """Removes limits. The driver drops those of a cgroup that was removed."""

    def __init__(self, limiter: MemoryLimiter | None, has_scope: Callable[[JobId], bool]) -> None:
        """`limiter` is needed even if no more limits are set. `has_scope`: this daemon made it."""
        self._limiter = limiter
        self._has_scope = has_scope
        self._complaints = LogOnce(_log)

    async def of(self, job: JobId, gpus: Iterable[GpuUuid]) -> None:
        """Remove the limits of a job without processes."""
        if self._limiter is None or not self._has_scope(job):
            return
        directory = await asyncio.to_thread(cgroups.directory_of, job)
        if directory is not None:
            await self._remove(job, directory, gpus)

    async def of_slurm(self, job: Job) -> None:
        """Remove the limits of a job of Slurm that has ended; Slurm removes its cgroup."""
        directory = await asyncio.to_thread(_directory_of_slurm, job)
        if self._limiter is not None and directory is not None:
            await self._remove(job.id, directory, [lease.gpu for lease in job.leases])

    async def of_all_but(self, live: Collection[JobId], gpus: Collection[GpuUuid]) -> None:
        """Remove the limits of jobs that ended while no daemon ran."""
        if self._limiter is None:
            return
        for number, directory in await asyncio.to_thread(lambda: list(cgroups.scopes())):
            if number not in live and self._has_scope(JobId(number)):
                await self._remove(JobId(number), directory, gpus)

    async def _remove(self, job: JobId, directory: Path, gpus: Iterable[GpuUuid]) -> None:
        assert self._limiter is not None
        for gpu in gpus:
            try:
                await asyncio.to_thread(self._limiter.remove_limit, gpu, directory)
                self._complaints.passed(gpu)
            except NotLimited as failure:
                if directory.exists():
                    text = f"cannot remove the limit of job {job} on {gpu}: {failure}"
                    self._complaints.say(gpu, text, why=str(failure))


def _directory_of_slurm(job: Job) -> Path | None:
    return None if job.slurm is None else directory_of(job.slurm.id)


_SHORT_UUID = len("GPU-12345678")

Note = Callable[[JobId, Mapping[GpuUuid, int | None], str], Awaitable[object]]
"""Stores the limits of a job, None for no limit, and why they changed."""
Tell = Callable[[JobId, str], Awaitable[object]]
"""Notifies the owner of a job."""


class LimitRestore:
    """Restores the limits of running jobs."""

    def __init__(
        self, limiter: MemoryLimiter | None, has_scope: Callable[[JobId], bool], note: Note
    ) -> None:
        """`has_scope` says whether this daemon made the scope of a job."""
        self._limiter = limiter
        self._has_scope = has_scope
        self._note = note
        self._complaints = LogOnce(_log)

    async def of(self, jobs: Iterable[Job], tell: Tell) -> None:
        """Check the limits of those `jobs` that the driver limits according to the database.

        Raises:
            RecordUnwritable: the result cannot be stored now.
        """
        if self._limiter is None:
            return
        for job in jobs:
            limited = [lease for lease in job.leases if lease.driver_limit is not None]
            directory = await asyncio.to_thread(self._directory_of, job) if limited else None
            if directory is not None:
                await self._restore(job, limited, directory, tell)

    def _directory_of(self, job: Job) -> Path | None:
        """Return the cgroup of a job with processes, or None."""
        if job.slurm is not None:
            return _directory_of_slurm(job)
        # The limits of a job that has just ended are removed at its end.
        is_ours = self._has_scope(job.id) and cgroups.members(job.id)
        return cgroups.directory_of(job.id) if is_ours else None

    async def _restore(
        self, job: Job, leases: Iterable[Lease], directory: Path, tell: Tell
    ) -> None:
        answers = await asyncio.gather(
            *(asyncio.to_thread(self._restore_one, job.id, lease, directory) for lease in leases)
        )
        changed = {gpu: now for gpu, now, _ in (each for each in answers if each is not None)}
        said = "; ".join(why for _, _, why in (each for each in answers if each is not None))
        if not changed:
            return
        _log.warning("job %s: %s", job.id, said)
        await self._note(job.id, changed, said)
        if None in changed.values():
            await tell(job.id, said)

    def _restore_one(
        self, job: JobId, lease: Lease, directory: Path
    ) -> tuple[GpuUuid, int | None, str] | None:
        """Set the limit of a lease again; return it with the reason, or None if it is in force."""
        assert self._limiter is not None
        gpu = lease.gpu
        try:
            kept = self._limiter.current_limit(gpu, directory)
        except NotLimited as failure:
            # It may be in force or not. The database has the limit of the launch.
            text = f"cannot read the limit of job {job} on {gpu}: {failure}"
            self._complaints.say(gpu, text, why=str(failure))
            return None
        if kept is not None and kept <= lease.most:
            return None
        short = gpu[:_SHORT_UUID]
        try:
            now = self._limiter.set_limit(gpu, directory, lease.most)
        except NotLimited as failure:
            return gpu, None, f"the driver no longer limits it on {short}: {failure}"
        return gpu, now, f"the driver had dropped its limit on {short}; it was set again"
