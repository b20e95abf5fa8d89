"""Sets up what holds jobs to their leases: enforcement levels, driver limits and sandboxes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gpulease.daemon.foundation import Foundation
from gpulease.daemon.user_policy import UserPolicy
from gpulease.domain.enforcement import AppliedEnforcement
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.gpu.limits import DriverLimits
from gpulease.gpu.nvml import NvmlProbe
from gpulease.host.enforcement import (
    Circumstances,
    EnforcementLevels,
    LimitRemoval,
    LimitRestore,
    why_no_scopes,
)
from gpulease.host.sandbox import Sandbox, UserSandbox, UvmNode
from gpulease.host.scopes import user_bus
from gpulease.host.shim_control import has_scope
from gpulease.path_ownership import closed_to_others
from gpulease.service.jobs import note_enclosed, note_limits
from gpulease.service.observation import GpuObserver
from gpulease.service.scheduler import Obstacle, Scheduler, no_obstacle
from gpulease.worker.environment import HOOKS


@dataclass(frozen=True, slots=True)
class EnforcementSetup:
    """The parts that hold jobs to their leases."""

    levels: EnforcementLevels
    limit_removal: LimitRemoval
    limit_restore: LimitRestore
    sandbox: Sandbox | UserSandbox | None
    """None without scopes: then nothing outside the job limits it."""
    uvm: UvmNode | None
    """The device node that jobs on real GPUs need; None where no device rules apply."""

    @property
    def obstacle(self) -> Obstacle:
        """What may keep jobs from starting on this machine."""
        return no_obstacle if self.uvm is None else self.uvm.obstacle

    async def lift(self, job: Job) -> None:
        """Remove the driver's limits of a job that has ended."""
        if job.slurm is not None:
            await self.limit_removal.of_slurm(job)
            return
        await self.limit_removal.of(job.id, [lease.gpu for lease in job.leases])

    async def recover(self, scheduler: Scheduler) -> None:
        """Restore the limits of running jobs; remove those of jobs that ended without a daemon.

        Raises:
            RecordUnwritable: a changed limit cannot be recorded now.
        """
        store = scheduler.store
        await self.limit_restore.of(store.live(), scheduler.notify_owner)
        seen = await scheduler.observer.recent()
        live = {job.id for job in store.live()}
        await self.limit_removal.of_all_but(live, [each.uuid for each in seen.readings])


def build_enforcement(
    base: Foundation, user_policy: UserPolicy, observer: GpuObserver, *, confined: bool
) -> EnforcementSetup:
    """Set up the levels that this machine supports."""
    limiter = DriverLimits(base.probe) if isinstance(base.probe, NvmlProbe) else None
    no_scopes = why_no_scopes(confined)
    levels = EnforcementLevels(
        # A hook that users cannot read limits no job. Root itself can read all files.
        Circumstances(
            base.is_simulated, no_scopes, closed_to_others(HOOKS) if os.geteuid() == 0 else None
        ),
        limiter,
        base.probe.driver,
        driver_limits=base.settings().driver_limits,
        watch=lambda: user_policy.stops_overuse,
        watch_varies=lambda: user_policy.differ_on_overuse,
        watch_is_blind=lambda: observer.is_blind,
    )

    async def note(job: JobId, enclosed: AppliedEnforcement) -> None:
        await base.writer(
            lambda: note_enclosed(base.store, job, levels.everywhere, enclosed, base.clock)
        )

    async def note_restored(job: JobId, limits: Mapping[GpuUuid, int | None], said: str) -> None:
        await base.writer(lambda: note_limits(base.store, job, limits, said, base.clock))

    def in_scope(job: JobId) -> bool:
        return has_scope(base.state.job(job))

    uvm = UvmNode()
    return EnforcementSetup(
        levels,
        LimitRemoval(limiter, in_scope),
        LimitRestore(limiter, in_scope, note_restored),
        Sandbox(levels.limiter, note, uvm=uvm) if no_scopes is None else _of_user(),
        uvm if no_scopes is None and not base.is_simulated else None,
    )


def _of_user() -> UserSandbox | None:
    """Return what holds the RAM of jobs by the systemd of the user who runs this daemon."""
    bus = None if os.geteuid() == 0 else user_bus()
    return None if bus is None else UserSandbox(bus)
