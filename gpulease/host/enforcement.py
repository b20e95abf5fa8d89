"""Which rungs of the ladder this machine has, and for each that it has not, why.

Takes the driver's limits away at the end of jobs, before their cgroups are removed.

Looks after a restart whether the driver still keeps running jobs to their limits.

What it has dropped is set again; where that cannot be, the lease is on record as one that the
driver does not hold, and its owner is told.
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
from gpulease.wire.views import EnforcementLevelView

FOREIGN_PIDS = (
    "this daemon has a pid namespace of its own, and the processes that the driver lists are not "
    "known to be of it"
)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What decides on the rungs and does not change while the daemon runs."""

    simulated: bool
    no_scopes: str | None
    """Why jobs are not put into scopes of their own; None: they are."""
    hooks_closed_at: Path | None
    """The directory that keeps users from the hooks."""


class EnforcementLevels:
    """Knows the rungs; asks the driver about its own when it is another driver than before."""

    def __init__(
        self,
        around: Circumstances,
        limiter: MemoryLimiter | None,
        driver: Callable[[], str | None],
        *,
        driver_limits: bool = True,
        watch: Callable[[], bool] = lambda: False,
        watch_varies: Callable[[], bool] = lambda: False,
        watch_is_blind: Callable[[], bool] = lambda: False,
    ) -> None:
        """`limiter` is that of the real driver; `driver_limits` whether it is to be used."""
        self.driver_limits = driver_limits
        self.watch = watch
        self.watch_varies = watch_varies
        self.watch_is_blind = watch_is_blind
        self._around = around
        self._limiter = limiter
        self._driver = driver
        self._asked: tuple[str | None, dict[str, str | None]] | None = None
        """Of which driver, and by the label of each GPU its obstacle to limits."""

    @property
    def everywhere(self) -> tuple[str, ...]:
        """The rungs on which all leases stand that are granted now."""
        has = {
            EnforcementLevel.FRAMEWORK: self._framework()[0],
            EnforcementLevel.WATCH: self.watch() and not self.watch_is_blind(),
        }
        return in_level_order(rung for rung, there in has.items() if there)

    def limiter(self) -> MemoryLimiter | None:
        """Return what sets the driver's limits, or None if there is no use in trying."""
        return self._limiter if self._no_driver_limit() is None else None

    async def ask(self, seen: Observation) -> None:
        """Find out what the driver can do, if that is not known of this one."""
        if self._limiter is None or not self._is_worth_asking(seen):
            return
        version, cgroup = self._driver(), cgroups.own_directory()
        if cgroup is None:
            return
        answers: dict[str, str | None] = {}
        for reading in _leasable(seen):
            with suppress(NotLimited):  # no answer now: there is another look
                answers[reading.label] = await asyncio.to_thread(
                    self._limiter.why_unavailable, reading.uuid, cgroup
                )
        self._asked = version, answers

    def _is_worth_asking(self, seen: Observation) -> bool:
        there = {reading.label for reading in _leasable(seen)}
        if self._asked is None or self._asked[0] != self._driver():
            return bool(there)
        return not there <= self._asked[1].keys()

    def rungs(self) -> list[EnforcementLevelView]:
        """Return each rung, and what there is to say of it."""
        said = {
            EnforcementLevel.DRIVER: self._driver_rung(),
            EnforcementLevel.FRAMEWORK: self._framework(),
            EnforcementLevel.WATCH: self._watch_rung(),
            EnforcementLevel.DEVICES: self._devices(),
        }
        varies = {EnforcementLevel.WATCH} if self.watch_varies() else set()
        return [
            EnforcementLevelView(rung.value, *said[rung], varies=rung in varies)
            for rung in EnforcementLevel
        ]

    def _driver_rung(self) -> tuple[bool, str]:
        why = self._no_driver_limit()
        if why is not None:
            return False, why
        if not self._answers():
            return False, "the driver has not said yet whether it has memory limits"
        refusing = {label: each for label, each in self._answers().items() if each is not None}
        but = "".join(f", but not on GPU {label}: {each}" for label, each in refusing.items())
        return True, f"an allocation beyond the lease fails, in whatever program{but}"

    def _no_driver_limit(self) -> str | None:
        """Return why there are no limits by the driver; None also where some GPU has them."""
        no_scopes = self._around.no_scopes
        obstacles = {
            "simulated GPUs have no driver": self._limiter is None,
            "turned off by driver_limits": not self.driver_limits,
            "only root can set them": os.geteuid() != 0,
            f"no scope, so no driver limit: {no_scopes}": no_scopes is not None,
            "there are no cgroups of version 2 here": not cgroups.has_version_2(),
        }
        for why, stands in obstacles.items():
            if stands:
                return why
        answers = [each for each in self._answers().values() if each is not None]
        all_refuse = len(answers) == len(self._answers())
        return "; ".join(dict.fromkeys(answers)) if answers and all_refuse else None

    def _answers(self) -> dict[str, str | None]:
        return self._asked[1] if self._asked is not None else {}

    def _framework(self) -> tuple[bool, str]:
        if self._around.simulated:
            return False, "on simulated GPUs the hooks limit nothing"
        if self._around.hooks_closed_at is not None:
            return False, f"users cannot read the hooks: {self._around.hooks_closed_at} is closed"
        return True, "hooks keep honest programs in; not every framework and process is reached"

    def _watch_rung(self) -> tuple[bool, str]:
        but = ", unless a table in the settings says otherwise" if self.watch_varies() else ""
        if self.watch_is_blind():
            return False, f"what a job uses is not known: {FOREIGN_PIDS}"
        if self.watch():
            return True, f"a job that stays over its lease is told so, and then stopped{but}"
        why = "a job that is over its lease is told so, and not stopped (overuse = warn)"
        return False, f"{why}{but}"

    def _devices(self) -> tuple[bool, str]:
        if self._around.simulated:
            return False, "simulated GPUs have no devices"
        if self._around.no_scopes is not None:
            return False, f"a job can open every GPU: {self._around.no_scopes}"
        own = cgroups.own_directory()
        if own is not None and scopes.kernel_has_them(own) is False:
            return False, "a job can open every GPU: this kernel has no CONFIG_CGROUP_BPF"
        return True, "a job can open its own GPUs alone"


def _leasable(seen: Observation) -> list[GpuReading]:
    """Return the GPUs that can be read, and of one that MIG divides its MIG devices alone."""
    return [each for each in seen.readings if each.fault is None and not each.mig_mode]


def why_no_scopes(confined: bool) -> str | None:
    """Return why jobs are not put into scopes of their own, or None if they are.

    `confined` says that this is the system's service.
    """
    if not scopes.is_to_be_had():
        return "systemd does not run here"
    if os.geteuid() != 0:
        return "a personal daemon makes no scopes"
    return None if confined else "gpuleased was not started by its systemd unit"


_log = logging.getLogger(__name__)


class LimitRemoval:
    """Lifts limits; where a cgroup has gone already, so have its limits."""

    def __init__(self, limiter: MemoryLimiter | None, has_scope: Callable[[JobId], bool]) -> None:
        """`limiter` also where no limit is to be set any more; `has_scope`: one of our making."""
        self._limiter = limiter
        self._has_scope = has_scope
        self._complaints = LogOnce(_log)

    async def of(self, job: JobId, gpus: Iterable[GpuUuid]) -> None:
        """Lift the limits of a job of which no process is left."""
        if self._limiter is None or not self._has_scope(job):
            return
        directory = await asyncio.to_thread(cgroups.directory_of, job)
        if directory is not None:
            await self._lift(job, directory, gpus)

    async def of_all_but(self, live: Collection[JobId], gpus: Collection[GpuUuid]) -> None:
        """Lift what jobs have left that ended while no daemon was there."""
        if self._limiter is None:
            return
        for number, directory in await asyncio.to_thread(lambda: list(cgroups.scopes())):
            if number not in live and self._has_scope(JobId(number)):
                await self._lift(JobId(number), directory, gpus)

    async def _lift(self, job: JobId, directory: Path, gpus: Iterable[GpuUuid]) -> None:
        assert self._limiter is not None
        for gpu in gpus:
            try:
                await asyncio.to_thread(self._limiter.remove_limit, gpu, directory)
                self._complaints.passed(gpu)
            except NotLimited as failure:
                if directory.exists():
                    text = f"job {job}: its limit on {gpu} is not lifted: {failure}"
                    self._complaints.say(gpu, text, why=str(failure))


_SHORT_UUID = len("GPU-12345678")

Note = Callable[[JobId, Mapping[GpuUuid, int | None], str], Awaitable[object]]
"""Stores the limits that a job has now, None for none, and what is to be said of it."""
Tell = Callable[[JobId, str], Awaitable[object]]
"""Tells the owner of a job."""


class LimitRestore:
    """Reads the limits of running jobs back."""

    def __init__(
        self, limiter: MemoryLimiter | None, has_scope: Callable[[JobId], bool], note: Note
    ) -> None:
        """`has_scope` says that the scope of this name is one of our making."""
        self._limiter = limiter
        self._has_scope = has_scope
        self._note = note
        self._complaints = LogOnce(_log)

    async def of(self, jobs: Iterable[Job], tell: Tell) -> None:
        """Look at the limits of those of `jobs` that are on record as limited by the driver.

        Raises:
            RecordUnwritable: what was found cannot be stored now.
        """
        if self._limiter is None:
            return
        for job in jobs:
            limited = [lease for lease in job.leases if lease.driver_limit is not None]
            directory = await asyncio.to_thread(cgroups.directory_of, job.id) if limited else None
            if directory is None or not self._has_scope(job.id):
                continue
            # Of one that ended meanwhile what is left is lifted at its end.
            if await asyncio.to_thread(cgroups.members, job.id):
                await self._renew(job, limited, directory, tell)

    async def _renew(self, job: Job, leases: Iterable[Lease], directory: Path, tell: Tell) -> None:
        answers = await asyncio.gather(
            *(asyncio.to_thread(self._again, job.id, lease, directory) for lease in leases)
        )
        changed = {gpu: now for gpu, now, _ in (each for each in answers if each is not None)}
        said = "; ".join(why for _, _, why in (each for each in answers if each is not None))
        if not changed:
            return
        _log.warning("job %s: %s", job.id, said)
        await self._note(job.id, changed, said)
        if None in changed.values():
            await tell(job.id, said)

    def _again(
        self, job: JobId, lease: Lease, directory: Path
    ) -> tuple[GpuUuid, int | None, str] | None:
        """Set the limit of a lease again; return what it is now, and why. None: it still stands."""
        assert self._limiter is not None
        gpu = lease.gpu
        try:
            kept = self._limiter.current_limit(gpu, directory)
        except NotLimited as failure:
            # It may be in force or not: what is on record is of the launch.
            text = f"job {job}: its limit on {gpu} cannot be read back: {failure}"
            self._complaints.say(gpu, text, why=str(failure))
            return None
        if kept is not None and kept <= lease.memory:
            return None
        short = gpu[:_SHORT_UUID]
        try:
            now = self._limiter.set_limit(gpu, directory, lease.memory)
        except NotLimited as failure:
            return gpu, None, f"the driver limits it no more on {short}: {failure}"
        return gpu, now, f"the driver had dropped its limit on {short}, which is set again"
