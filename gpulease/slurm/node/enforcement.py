"""The enforcement levels of Slurm's jobs: what Slurm enforces itself, and the driver's limits.

The driver's limits are set on Slurm's cgroup of the job (version 2), which exists once its first
step has started. Slurm's device rules hold where cgroup.conf says so.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

from gpulease.domain.enforcement import EnforcementLevel, in_level_order
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.errors import SlurmFailed
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import MemoryLimiter, NotLimited
from gpulease.slurm.node.commands import RunSlurm, run_slurm
from gpulease.slurm.node.processes import directory_of

_log = logging.getLogger(__name__)

_CONSTRAINED = re.compile(r"^ConstrainDevices\s*=\s*yes\s*$", re.MULTILINE | re.IGNORECASE)
_TASK_CGROUP = re.compile(r"^TaskPlugin\s*=.*\btask/cgroup\b", re.MULTILINE)

Note = Callable[[JobId, Mapping[GpuUuid, int | None], str], Awaitable[object]]
"""Stores the driver's limits of a job, and a sentence about them."""


class SlurmEnforcement:
    """Knows the levels of Slurm's jobs, and sets their limits."""

    def __init__(
        self,
        everywhere: Callable[[], tuple[str, ...]],
        limiter: Callable[[], MemoryLimiter | None],
        note: Note,
        run: RunSlurm = run_slurm,
    ) -> None:
        """`everywhere` are the levels of all jobs; without a `limiter` the driver limits none."""
        self._everywhere = everywhere
        self._limiter = limiter
        self._note = note
        self._run = run
        self._has_device_rules: bool | None = None
        """None: Slurm was not asked yet."""
        self._complaints = LogOnce(_log)

    def levels(self) -> tuple[str, ...]:
        """Return the levels of a job of Slurm that starts now, before limits are set."""
        devices = {EnforcementLevel.DEVICES} if self._has_device_rules else set()
        return in_level_order({*self._everywhere(), *devices})

    async def ask(self) -> None:
        """Ask Slurm once whether it lets jobs open only their own GPUs."""
        if self._has_device_rules is not None:
            return
        try:
            shown = await self._run("scontrol", "show", "config")
        except SlurmFailed as error:
            _log.debug("device rules of Slurm are not known yet: %s", error)
            return
        found = _TASK_CGROUP.search(shown) and _CONSTRAINED.search(shown)
        self._has_device_rules = found is not None

    async def limit(self, job: Job) -> None:
        """Let the driver limit a job that has a cgroup and no limit yet.

        Raises:
            RecordUnwritable: the limits cannot be stored now; they are in force.
        """
        limiter = self._limiter()
        if limiter is None or job.slurm is None:
            return
        directory = await asyncio.to_thread(directory_of, job.slurm.id)
        if directory is None:
            return
        limits: dict[GpuUuid, int | None] = {}
        for lease in job.leases:
            if lease.driver_limit is not None:
                continue
            try:
                limits[lease.gpu] = await asyncio.to_thread(
                    limiter.set_limit, lease.gpu, directory, lease.memory
                )
                self._complaints.passed(lease.gpu)
            except NotLimited as error:
                text = f"job {job.id}: no limit of the driver on {lease.gpu}: {error}"
                self._complaints.say(lease.gpu, text, why=str(error))
        if limits:
            await self._note(job.id, limits, "the driver limits it, in Slurm's cgroup")
