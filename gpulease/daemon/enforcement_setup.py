"""What holds jobs to their leases from outside, put together: ladder, enclosure, lifting."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gpulease.config import Settings
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
from gpulease.host.sandbox import Sandbox, UvmNode
from gpulease.host.shim_control import has_scope
from gpulease.host.state_dir import StateDirectory
from gpulease.path_ownership import closed_to_others
from gpulease.service.jobs import note_enclosed, note_limits
from gpulease.service.ports import Clock, GpuProbe, InThread, Store
from gpulease.service.scheduler import Scheduler
from gpulease.worker.environment import HOOKS


@dataclass(frozen=True, slots=True)
class EnforcementSetup:
    """The parts that hold jobs."""

    ladder: EnforcementLevels
    lifting: LimitRemoval
    renewing: LimitRestore
    enclosure: Sandbox | None
    """None where there are no scopes, and so nothing can be put around a job."""
    uvm: UvmNode | None
    """What jobs on real GPUs wait for; None where device rules do not need it."""

    async def lift(self, job: Job) -> None:
        """Take away what the driver holds a job by that has ended."""
        await self.lifting.of(job.id, [lease.gpu for lease in job.leases])

    async def recover(self, keeper: Scheduler) -> None:
        """See to what jobs left behind that ended while no daemon was there, and to those that run.

        Raises:
            RecordUnwritable: what became of their limits cannot be stored now.
        """
        await self.renewing.of(keeper.store.live(), keeper.tell_owner)
        seen = await keeper.recent_look()
        live = {job.id for job in keeper.store.live()}
        await self.lifting.of_all_but(live, [each.uuid for each in seen.readings])


def build_enforcement(
    settings: Settings,
    probe: GpuProbe,
    state: StateDirectory,
    store: Store,
    writing: InThread,
    clock: Clock,
    *,
    confined: bool,
) -> EnforcementSetup:
    """Put together what this machine has."""
    limiter = DriverLimits(probe) if isinstance(probe, NvmlProbe) else None
    # As root: a hook that the user cannot read holds nobody.
    closed = closed_to_others(HOOKS) if os.geteuid() == 0 else None
    no_scopes = why_no_scopes(confined)
    around = Circumstances(settings.simulate is not None, no_scopes, closed)
    ladder = EnforcementLevels(around, limiter, probe.driver, driver_limits=settings.driver_limits)

    async def note(job: JobId, enclosed: AppliedEnforcement) -> None:
        await writing(lambda: note_enclosed(store, job, ladder.everywhere, enclosed, clock))

    async def note_anew(job: JobId, limits: Mapping[GpuUuid, int | None], said: str) -> None:
        await writing(lambda: note_limits(store, job, limits, said, clock))

    uvm = UvmNode()

    def in_scope(job: JobId) -> bool:
        return has_scope(state.job(job))

    return EnforcementSetup(
        ladder,
        LimitRemoval(limiter, in_scope),
        LimitRestore(limiter, in_scope, note_anew),
        Sandbox(ladder.limiter, note, uvm=uvm) if no_scopes is None else None,
        uvm if no_scopes is None and settings.simulate is None else None,
    )
