"""Sets up what the daemon does on a node of a Slurm cluster. Without Slurm, all of it rests."""

import asyncio
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from gpulease import __version__
from gpulease.config import Settings, SlurmSettings
from gpulease.daemon.enforcement_setup import EnforcementSetup
from gpulease.daemon.foundation import Foundation
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.host.process_finder import Finder
from gpulease.host.processes import ProcessTable, marker
from gpulease.server.machine_views import MachineViews
from gpulease.service.job_supervisor import LauncherOf
from gpulease.service.jobs import note_limits
from gpulease.service.log_once import LogOnce
from gpulease.service.ports import JobLauncher, SlurmPolicy
from gpulease.service.scheduler import Scheduler
from gpulease.service.slurm_gpus import gpus_of_slurm, missing_local_gpus
from gpulease.slurm.allocations import SlurmRefusal
from gpulease.slurm.annotations import GpuSummary, NodeSummary
from gpulease.slurm.node.controller import SlurmController
from gpulease.slurm.node.jobs import SlurmEnforcement, SlurmJobs
from gpulease.slurm.node.leases import SlurmLeases, SlurmRequest
from gpulease.slurm.node.publication import LearntSizes, PublicationPace, SlurmPublication
from gpulease.slurm.node.reconciliation import SlurmReconciliation
from gpulease.timers import Timer, Timers
from gpulease.wire.machine import CheckView, GpuView

_log = logging.getLogger(__name__)

_COMPARE_EVERY = timedelta(seconds=5)
_USE_OTHERS = "in /etc/gpulease/config.toml, use indexes or UUIDs; nvidia-smi -L lists both"
_LOOK_EVERY = timedelta(seconds=2)
"""Between two looks for changed leases; to publish them costs slurmctld less than 1 ms."""


def slurm_settings(settings: Settings) -> SlurmSettings | None:
    """Return the settings about Slurm; None if this is no node of a cluster.

    A personal daemon is none: there, the setting is for the command of its user.
    """
    if settings.cluster != "slurm" or os.geteuid() != 0:
        return None
    return SlurmSettings(**settings.slurm)


def slurm_policy(settings: Settings) -> SlurmPolicy | None:
    """Return what Slurm assigns of this machine; None where the daemon's queue has all GPUs."""
    slurm = slurm_settings(settings)
    return None if slurm is None else SlurmPolicy(slurm.shard, slurm.local_gpus)


@dataclass(frozen=True, slots=True)
class SlurmLaunchers:
    """What follows and stops Slurm's jobs: the scheduler needs it."""

    jobs: SlurmJobs
    enforcement: SlurmEnforcement

    def besides(self, runner: JobLauncher, holds: JobLauncher) -> LauncherOf:
        """Return what tells the launcher of a job."""

        def launcher_of(job: Job) -> JobLauncher:
            if job.slurm is not None:
                return self.jobs
            return runner if job.holder is None else holds

        return launcher_of


def build_launchers(
    base: Foundation, table: ProcessTable, processes: Finder, enforcement: EnforcementSetup
) -> SlurmLaunchers:
    """Build what the scheduler needs."""
    levels = enforcement.levels

    async def note(job: JobId, limits: Mapping[GpuUuid, int | None], said: str) -> None:
        await base.writer(lambda: note_limits(base.store, job, limits, said, base.clock))

    held = SlurmEnforcement(lambda: levels.everywhere, levels.limiter, note)
    jobs = SlurmJobs(
        base.clock,
        table,
        processes.slurm,
        lambda job: marker(base.installation, job, base.secret),
        held.levels,
        enforcement.lift,
        lambda: base.settings().grace,
    )
    return SlurmLaunchers(jobs, held)


class SlurmNode:
    """This machine as a node of a Slurm cluster."""

    def __init__(
        self,
        base: Foundation,
        scheduler: Scheduler,
        processes: Finder,
        launchers: SlurmLaunchers,
    ) -> None:
        self._base = base
        self._scheduler = scheduler
        self._processes = processes.slurm
        self._launchers = launchers
        self._controller = SlurmController()
        self._views: MachineViews | None = None
        self._publishing: Timer | None = None
        self._complaints = LogOnce(_log)
        self.leases = SlurmLeases(
            scheduler, processes, base.clock, base.writer, self._controller, launchers.jobs.ended,
            launchers.enforcement.limit, self._running,
        )  # fmt: skip
        self._learnt = LearntSizes(base.store, base.writer, base.clock)
        self._publication = SlurmPublication(self._summary, self._name)
        self._pace = PublicationPace()
        self._reconciliation = SlurmReconciliation(
            base.store.holding,
            self._processes,
            self._lease_running,
            launchers.jobs.lost,
            self._name,
            self._controller.take_up,
        )

    def start(self, timers: Timers, views: MachineViews) -> None:
        """Compare leases with jobs, and publish what `views` show, every few seconds."""
        self._views = views
        timers.often(_COMPARE_EVERY, self._compare)
        self._publishing = timers.often(self._look_every(), self._publish)

    def adopt(self) -> None:
        """Use the settings after a reload."""
        if self._publishing is not None:
            self._publishing.change(self._look_every())

    async def close(self) -> None:
        """Stop waiting for Slurm."""
        await self._controller.close()

    def checks(self) -> Iterator[CheckView]:
        """Return a line for `doctor`; none without Slurm."""
        name, failure = self._name(), self._publication.failure
        if name is None:
            return
        if missing := self._missing():
            yield CheckView("slurm", "warning", missing, _USE_OTHERS)
        if failure is None:
            yield CheckView(
                "slurm", "ok", f"Slurm assigns the GPUs of this machine, its node {name}"
            )
            return
        yield CheckView(
            "slurm", "warning", f"{failure}; leases continue, and jobs of Slurm cannot start",
            "scontrol ping shows whether slurmctld answers; if the node has another name: "
            '[slurm] node = "NAME" in /etc/gpulease/config.toml',
        )  # fmt: skip

    def _missing(self) -> str | None:
        """Return which of `local_gpus` this machine does not have."""
        seen, policy = self._scheduler.seen, self._scheduler.policy.slurm
        missing = (
            () if seen is None or policy is None else missing_local_gpus(seen.readings, policy)
        )
        return f"local_gpus: this machine has no GPU {' or '.join(missing)}" if missing else None

    def _name(self) -> str | None:
        slurm = slurm_settings(self._base.settings())
        return None if slurm is None else slurm.node_name

    def _publish_every(self) -> timedelta:
        return SlurmSettings(**self._base.settings().slurm).publish_every

    def _look_every(self) -> timedelta:
        return min(_LOOK_EVERY, self._publish_every())

    async def _publish(self) -> None:
        if self._name() is None:
            return
        held = frozenset(job.id for job in self._base.store.holding())
        if self._pace.is_due(held, round(self._publish_every() / self._look_every())):
            await self._learnt.update()
            await self._publication.publish()

    async def _compare(self) -> None:
        if missing := self._missing():
            self._complaints.say("local_gpus", f"{missing}; {_USE_OTHERS}")
        else:
            self._complaints.passed("local_gpus")
        if self._name() is not None:
            await self._launchers.enforcement.ask()
        await self._reconciliation.look()
        for job in self._base.store.holding():
            if job.slurm is not None:
                await self._launchers.enforcement.limit(job)

    async def _running(self, number: int, pid: int) -> SlurmRequest | None:
        """Return a running job as Slurm describes it; None if a process does not belong to it.

        The process is checked first, by its slurmstepd, so that users cannot make the daemon ask
        slurmctld about arbitrary jobs.
        """
        node = self._name()
        if node is None or await asyncio.to_thread(self._processes.job_of, pid) != number:
            return None
        return await self._reconciliation.running(number, node)

    async def _lease_running(self, running: SlurmRequest) -> None:
        """Grant a lease to a job that runs without one: no daemon ran when it began.

        Raises:
            SlurmFailed: Slurm does not answer.
        """
        try:
            job = await self.leases.grant(running)
        except SlurmRefusal as refusal:
            _log.warning("job %s of Slurm runs without a lease: %s", running.job.id, refusal)
        else:
            _log.info("job %s of Slurm ran without a lease, and has one now", running.job.id)
            await self._launchers.enforcement.limit(job)

    def _summary(self) -> NodeSummary | None:
        seen, policy = self._scheduler.seen, self._scheduler.policy.slurm
        slurm = slurm_settings(self._base.settings())
        if seen is None or policy is None or slurm is None or self._views is None:
            return None
        of_slurm = {each.uuid for each in gpus_of_slurm(seen.readings, policy)}
        views = self._views.status(self._base.store.holding(), self._base.clock.now()).gpus
        return NodeSummary(
            at=0.0,
            shard=slurm.shard,
            gpus=tuple(_gpu(view, of_slurm) for view in views if view.parent is None),
            version=__version__,
            publish_every=slurm.publish_every.total_seconds(),
            learnt=self._learnt.sizes,
            used=self._used(),
        )

    def _used(self) -> Mapping[str, int]:
        """Return the bytes that jobs of Slurm used at most, those that run included."""
        peaks, used = self._scheduler.peaks.by_lease, dict(self._learnt.used)
        for job in self._base.store.holding():
            found = [peaks.get((job.id, lease.gpu), 0) for lease in job.leases]
            if job.slurm is not None and (most := max(found, default=0)):
                used[str(job.slurm.id)] = most
        return used


def _gpu(view: GpuView, of_slurm: Collection[str]) -> GpuSummary:
    memory = view.memory
    return GpuSummary(
        index=view.index,
        uuid=view.uuid,
        name=view.name,
        state=view.state,
        total=memory.total,
        allocatable=memory.allocatable,
        leased=memory.leased,
        used=memory.used,
        unmanaged=memory.unmanaged,
        local=view.uuid not in of_slurm,
        detail=view.detail,
    )
