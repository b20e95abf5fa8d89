"""The composition root: builds the daemon's parts from the settings, in dependency order.

`build` reads from top to bottom. Each part gets all that it depends on when it is constructed, and
depends only on parts above it. Only `DaemonApp.adopt` changes parts later, at a reload.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from gpulease.config import FORMER_QUEUE_KEYS, Settings
from gpulease.daemon.clock import SystemClock
from gpulease.daemon.doctor import Doctor, health_checks
from gpulease.daemon.enforcement_setup import EnforcementSetup, build_enforcement
from gpulease.daemon.foundation import Foundation, open_foundation, simulated_gpus
from gpulease.daemon.housekeeping import PoolWatch, Sampler
from gpulease.daemon.job_output import LogTail, kept_free
from gpulease.daemon.metrics import Metrics
from gpulease.daemon.user_policy import UserPolicy, groups_of, with_names_of_groups
from gpulease.domain.health import HealthAction
from gpulease.domain.host_memory import HostPolicy
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Lease
from gpulease.domain.limits import UserLimits
from gpulease.domain.queue_options import PolicyName, QueuePolicy
from gpulease.errors import BadConfiguration
from gpulease.gpu.nvml_process import NvmlProcess
from gpulease.host.cgroups import holds_ram, in_initial_pid_namespace
from gpulease.host.cores import cores_of
from gpulease.host.holds import HoldLauncher, WaitingClients
from gpulease.host.hook_coverage import HookCoverage, on_record
from gpulease.host.host_memory import HostProbe
from gpulease.host.job_runner import JobRunner
from gpulease.host.launch import LaunchContext
from gpulease.host.launcher import Launcher
from gpulease.host.neighbours import NeighbourFiles
from gpulease.host.process_finder import Finder, ProcessWatch
from gpulease.host.processes import ProcessTable
from gpulease.host.shim_control import has_living_shim, has_scope
from gpulease.host.state_dir import ensure_ledger
from gpulease.notifications.app import DaemonNotifications
from gpulease.notifications.messages import JobDetails, TimeLeftWatch
from gpulease.server.app import ApiParts
from gpulease.server.auth import Rights
from gpulease.server.context import HolderParts, RequestContext
from gpulease.server.http_server import HttpProtocol
from gpulease.server.job_views import JobViews, overuse_view
from gpulease.server.jobs import OutputSettings
from gpulease.server.listings import Listings
from gpulease.server.machine import MachineParts
from gpulease.server.machine_views import MachineViews
from gpulease.server.usage import ReportParts
from gpulease.server.validation import Defaults
from gpulease.server.view_sources import ViewSources
from gpulease.service.drains import Drains, Pauses
from gpulease.service.enforcement import EnforcementLoop
from gpulease.service.health import HealthPolicy, HealthWatch
from gpulease.service.hook_reports import HookReports
from gpulease.service.idleness import IdleWatch
from gpulease.service.job_accounting import JobAccounting
from gpulease.service.job_samples import MeanUtilization
from gpulease.service.job_supervisor import LauncherOf
from gpulease.service.observation import GpuObserver, Observation
from gpulease.service.overuse import OveruseWatch
from gpulease.service.ports import Policy, Quotas
from gpulease.service.scheduler import Scheduler
from gpulease.service.sharing import Sharing
from gpulease.service.usage import Usage
from gpulease.service.windows import Windows
from gpulease.slurm.node.node import SlurmNode, build_launchers, slurm_policy
from gpulease.store.memory_history import MemoryHistory, MemorySeries
from gpulease.store.usage import PoolUsage, UsageTotals
from gpulease.timers import LocalTime
from gpulease.units import Share, format_size
from gpulease.worker.environment import HOOKS

_LONGEST_ABSENCE = timedelta(minutes=10)
"""After this time without a daemon, its latest sample no longer says which memory is unmanaged."""


@dataclass(frozen=True, slots=True)
class DaemonApp:
    """The parts that run, and that are closed at the end."""

    base: Foundation
    launcher: Launcher
    runner: JobRunner
    scheduler: Scheduler
    waiting_clients: WaitingClients
    sampler: Sampler
    health: HealthWatch
    user_policy: UserPolicy
    enforcement: EnforcementSetup
    slurm: SlurmNode
    notifications: DaemonNotifications
    api: ApiParts

    def adopt(self, settings: Settings) -> None:
        """Use new settings, in which those that need a restart have not changed.

        The caller changes the period of the sampling timer.
        """
        self.base.settings.replace(settings)
        self.user_policy.adopt(settings)
        self.health.policy = health_policy(settings)
        self.runner.adopt(settings.grace, settings.log_limit, kept_free(settings))
        self.enforcement.levels.driver_limits = settings.driver_limits
        self.api.context.defaults = request_defaults(settings)
        self.api.output.log_limit = settings.log_limit
        self.api.context.rights = rights(settings)
        self.api.output.most_streams = settings.most_streams
        self.slurm.adopt()
        self.notifications.admins.adopt(settings.notify)

    async def close(self) -> None:
        """Close everything, in this order; jobs continue."""
        await self.slurm.close()
        await self.waiting_clients.close()
        await self.scheduler.supervisor.stop()
        await self.sampler.write()
        await self.launcher.close()
        self.notifications.close()
        self.api.context.listings.close()
        self.base.writer.close()
        self.base.observation_thread.close()
        self.base.store.close()
        self.base.state.close()


@dataclass(frozen=True, slots=True)
class _UsageRecords:
    """What frameworks and jobs used, now and in the past."""

    pools: PoolUsage
    usage: Usage
    accounts: UsageTotals
    utilization: MeanUtilization
    hooks: HookReports


def build(settings: Settings, *, confined: bool = False) -> DaemonApp:
    """Build every part; the caller takes the first observation.

    `confined`: the daemon has a mount namespace of its own, which its jobs must not share.

    Raises:
        GpuleaseError: the daemon cannot run.
    """
    base, user_policy = open_foundation(settings, SystemClock()), UserPolicy(settings)
    table, process_ends = ProcessTable(base.secret), ProcessWatch()
    processes = _process_finder(base, table)
    unmanaged = MemoryHistory(base.store).last_unmanaged(base.clock.now() - _LONGEST_ABSENCE)
    observer = GpuObserver(
        base.store, base.probe, processes, base.clock, base.observation_thread, unmanaged,
        _sharing(base),
        HostProbe(processes.root_of, lambda job: has_scope(base.state.job(job))),
    )  # fmt: skip
    records = _usage_records(base)
    overuse, idleness = _overuse_watch(base, user_policy, records), IdleWatch(user_policy.idleness)
    enforcement = build_enforcement(base, user_policy, observer, confined=confined)
    launcher = Launcher(confined=confined, sandbox=enforcement.sandbox)
    notifications = _notifications(base, launcher, observer)
    launch_context = _launch_context(base, observer, enforcement, records.usage, overuse)
    runner = JobRunner(launcher, table, base.state, launch_context, base.clock)
    of_slurm = build_launchers(base, table, processes, enforcement)
    holds = HoldLauncher(base.clock, process_ends, launch_context.levels)
    launcher_of = of_slurm.besides(runner, holds)
    scheduler = _scheduler(
        base, observer, enforcement, launcher, launcher_of, overuse, records, user_policy
    )
    slurm = SlurmNode(base, scheduler, processes, of_slurm)
    health = _health_watch(base, scheduler, notifications)
    clients = WaitingClients(scheduler, process_ends)
    coverage = _hook_coverage(base, enforcement, scheduler, records.hooks)
    sources = _view_sources(base, enforcement, coverage, records, overuse, idleness)
    sampler = _sampler(base, scheduler, overuse, idleness, records, health, enforcement, coverage)
    api = _api_parts(
        base, scheduler, processes, sources, records, slurm, health, notifications, sampler,
        runner=runner, watch_client=clients.watch,
    )  # fmt: skip
    return DaemonApp(
        base=base, launcher=launcher, runner=runner, scheduler=scheduler, waiting_clients=clients,
        sampler=sampler, health=health, user_policy=user_policy, enforcement=enforcement,
        slurm=slurm, notifications=notifications, api=api,
    )  # fmt: skip


def _notifications(
    base: Foundation, launcher: Launcher, observer: GpuObserver
) -> DaemonNotifications:
    details = JobDetails(
        base.store,
        lambda: base.settings().smallest_lease,
        observer.readings,
        LogTail(base.state.job).of,
    )
    return DaemonNotifications(
        base.store, base.clock, base.writer, base.state.path, launcher, details,
        base.settings().notify, as_other_users=os.geteuid() == 0,
        page=lambda: base.settings().web.get("address"),
    )  # fmt: skip


def _sharing(base: Foundation) -> Sharing | None:
    """Return what daemons of several users need on GPUs that no daemon of root's leases."""
    if base.is_simulated or os.geteuid() == 0:
        return None
    return Sharing(NeighbourFiles(), base.store, os.getuid())


def _overuse_watch(
    base: Foundation, user_policy: UserPolicy, records: _UsageRecords
) -> OveruseWatch:
    def overhead(job: Job, lease: Lease, seen: Observation) -> int:
        return records.usage.excess_overhead(job, lease, records.hooks.of(job.id), seen)

    return OveruseWatch(user_policy.overuse, base.store.metrics.went_over, overhead)


def _process_finder(base: Foundation, table: ProcessTable) -> Finder:
    return Finder(
        table,
        base.installation,
        lambda job: has_living_shim(base.state.job(job), base.store.job(job)),
        lambda job: has_scope(base.state.job(job)),
        own_pids=base.is_simulated or in_initial_pid_namespace(),
    )


def _usage_records(base: Foundation) -> _UsageRecords:
    pools = PoolUsage(base.store)
    return _UsageRecords(
        pools,
        Usage(base.probe.driver, pools.observed()),
        UsageTotals(base.store),
        MeanUtilization(base.store.holding),
        HookReports(base.store, base.clock, base.writer, by_driver=not base.is_simulated),
    )


def _launch_context(
    base: Foundation,
    observer: GpuObserver,
    enforcement: EnforcementSetup,
    usage: Usage,
    overuse: OveruseWatch,
) -> LaunchContext:
    settings, is_root = base.settings(), os.geteuid() == 0
    return LaunchContext(
        installation=base.installation,
        secret=base.secret,
        as_other_users=is_root,
        simulated=base.is_simulated,
        driver=base.probe.driver,
        readings=observer.readings,
        hooks=HOOKS,
        grace=settings.grace,
        log_limit=settings.log_limit,
        keep_free=kept_free(settings),
        levels=lambda: enforcement.levels.everywhere,
        remove_limits=enforcement.lift,
        socket=str(settings.socket),
        overhead=usage.beside,
        holding=base.store.holding,
        # The systemd of a user holds RAM alone, and other jobs need not wait for it.
        needs_sandbox=lambda job: is_root or job.claim.ram is not None,
        ram_grace_s=lambda job: (
            overuse.policy(job).grace.total_seconds() if overuse.stops(job) else None
        ),
        ledger=lambda job: ensure_ledger(
            base.state.job(job.id), (job.owner.uid, job.owner.gid) if is_root else None
        ),
    )


def _scheduler(
    base: Foundation,
    observer: GpuObserver,
    enforcement: EnforcementSetup,
    launcher: Launcher,
    launcher_of: LauncherOf,
    overuse: OveruseWatch,
    records: _UsageRecords,
    user_policy: UserPolicy,
) -> Scheduler:
    latest: tuple[Settings, Policy] | None = None

    def policy() -> Policy:
        nonlocal latest
        settings = base.settings()
        if latest is None or latest[0] is not settings:  # it is asked for with each job of a list
            latest = settings, leasing_policy(settings, user_policy.limits)
        return latest[1]

    async def obstacle() -> str | None:
        return await enforcement.obstacle() or launcher.obstacle()

    accounting = JobAccounting(
        base.store,
        observer,
        policy,
        LogTail(base.state.job).of,
        records.usage.idle,
        overuse.stops,
        records.utilization.of,
        records.hooks.settled,
    )
    return Scheduler(
        base.store,
        observer,
        launcher_of,
        base.clock,
        policy,
        in_writer=base.writer,
        settle_exit=accounting.settle_exit,
        obstacle=obstacle,
        windows=_windows(base).current,
    )


def _windows(base: Foundation) -> Windows:
    return Windows(base.store, base.clock, LocalTime(), groups_of, base.writer)


def _health_watch(
    base: Foundation, scheduler: Scheduler, notifications: DaemonNotifications
) -> HealthWatch:
    return HealthWatch(
        base.store,
        base.probe,
        base.clock,
        health_policy(base.settings()),
        scheduler.notify_owner,
        wake=scheduler.wake,
        in_writer=base.writer,
        in_observer=base.observation_thread,
        notify_admins=notifications.admins.of_gpu,
    )


def _hook_coverage(
    base: Foundation, enforcement: EnforcementSetup, scheduler: Scheduler, hooks: HookReports
) -> HookCoverage:
    return HookCoverage(
        base.store.holding,
        lambda: enforcement.levels.everywhere,
        HOOKS,
        scheduler.notify_owner,
        lambda job: on_record(base.store, job),
        hooks.hear_absent,
    )


def _sampler(
    base: Foundation,
    scheduler: Scheduler,
    overuse: OveruseWatch,
    idleness: IdleWatch,
    records: _UsageRecords,
    health: HealthWatch,
    enforcement: EnforcementSetup,
    coverage: HookCoverage,
) -> Sampler:
    loop = EnforcementLoop(scheduler, overuse, idleness, base.clock, base.writer)
    pools = PoolWatch(records.usage, records.pools, base.store, base.writer)
    return Sampler(
        scheduler,
        MemoryHistory(base.store),
        base.clock,
        base.writer,
        records.usage.in_use,
        (
            loop.check_overuse,
            loop.check_idleness,
            loop.check_shortfalls,
            TimeLeftWatch(base.store, base.clock, base.writer).observe,
            health.observe,
            enforcement.levels.ask,
            coverage.look,
            records.hooks.observe,
            pools.observe,
            records.utilization.observe,
        ),
    )


def _view_sources(
    base: Foundation,
    enforcement: EnforcementSetup,
    coverage: HookCoverage,
    records: _UsageRecords,
    overuse: OveruseWatch,
    idleness: IdleWatch,
) -> ViewSources:
    return ViewSources(
        driver=base.probe.driver,
        simulated=base.is_simulated,
        directory_of=base.state.job,
        enforcement=enforcement.levels,
        overuse=overuse,
        idleness=idleness,
        hooks=records.hooks,
        utilization=records.utilization.of,
        cores=lambda job: cores_of(base.state.job(job)),
        ram_held_by=lambda job: "kernel" if holds_ram(job.id, job.shim_pid) else "watch",
        unheld=coverage.of,
        pools_of=lambda job: records.usage.of(job.id),
    )


def _api_parts(  # noqa: PLR0913  requests reach every part
    base: Foundation, scheduler: Scheduler, processes: Finder, sources: ViewSources,
    records: _UsageRecords, slurm: SlurmNode, health: HealthWatch,
    notifications: DaemonNotifications, sampler: Sampler, *, runner: JobRunner,
    watch_client: Callable[[Job], None],
) -> ApiParts:  # fmt: skip
    settings, explainer = base.settings(), scheduler.explainer
    accounts, job_views = records.accounts, _job_views(scheduler, sources)
    windows, store, clock = _windows(base), base.store, base.clock
    machine_views = MachineViews(scheduler, processes, sources, windows.current, clock)
    context = RequestContext(
        scheduler=scheduler,
        job_views=job_views(processes.is_stopped),
        machine_views=machine_views,
        listings=Listings(job_views, machine_views, clock, explainer, processes.is_stopped),
        clock=clock,
        defaults=request_defaults(settings),
        rights=rights(settings),
        processes=processes,
        look=sampler.look,
        usage=records.usage,
        hooks=records.hooks,
        stored_pools=records.pools.of,
    )
    machine = MachineParts(
        doctor=_doctor(base, scheduler, health, sources, slurm).results,
        metrics=Metrics(store, scheduler, health, HttpProtocol.counts, notifications, clock).view,
        overuse_of=lambda owner: overuse_view(sources.overuse.policy_of(owner)),
        drains=Drains(store, clock, base.writer, scheduler.wake, notifications.admins.of_gpu),
        pauses=Pauses(store, clock, base.writer, scheduler.wake),
        test_notification=notifications.program.test,
    )
    return ApiParts(
        context,
        machine,
        ReportParts(with_names_of_groups(accounts.totals), accounts.predictions, accounts.waits),
        HolderParts(runner.environment, runner.command, watch_client),
        OutputSettings(base.state.job, settings.log_limit, settings.most_streams),
        windows,
        memory_series=lambda: MemorySeries(store, *sampler.unwritten()),
        slurm=slurm.leases if os.geteuid() == 0 else None,
    )


def _job_views(
    scheduler: Scheduler, sources: ViewSources
) -> Callable[[Callable[[int], bool]], JobViews]:
    """Return what makes views for a function that tells which processes are stopped."""
    return lambda is_stopped: JobViews(scheduler, is_stopped, sources, scheduler.explainer)


def _doctor(
    base: Foundation,
    scheduler: Scheduler,
    health: HealthWatch,
    sources: ViewSources,
    slurm: SlurmNode,
) -> Doctor:
    return Doctor(
        seen=lambda: scheduler.seen,
        driver=base.probe.driver,
        simulated=base.settings().simulate,
        state=base.state.path,
        hooks=HOOKS,
        levels=sources.enforcement.views,
        health=lambda: health_checks(scheduler, health, base.clock),
        library=base.probe.library,
        restriction=base.probe.restriction if isinstance(base.probe, NvmlProcess) else lambda: None,
        # A pause is no fault of the machine.
        closed=lambda: None if base.store.pause() is not None else scheduler.closed,
        slurm=slurm.checks,
    )


# What the parts take from the settings, at the start and at each reload.


def leasing_policy(settings: Settings, limits_of: Callable[[Owner], UserLimits]) -> Policy:
    """Return what may be leased, and to whom."""
    quotas = Quotas(
        waiting_bytes=settings.most_waiting_bytes,
        holds=settings.most_holds,
        exempt=frozenset({0, os.geteuid()}),
    )
    return Policy(
        settings.margin,
        settings.smallest_lease,
        quotas,
        queue_policy(settings),
        limits_of,
        slurm_policy(settings),
        HostPolicy(**settings.host),
    )


def queue_policy(settings: Settings) -> QueuePolicy:
    """Return the order of the queue, the reservation and the sharing of GPUs."""
    # Simulated GPUs compute nothing, so jobs do not slow each other down on them.
    unguarded = {"most_sharing": sys.maxsize, "most_utilization": float(sys.maxsize)}
    asked = {key: each for key, each in settings.queue.items() if key not in FORMER_QUEUE_KEYS}
    given = {**(unguarded if settings.simulate is not None else {}), **asked}
    name = PolicyName(given.pop("policy", PolicyName.FAIR))
    return QueuePolicy(name, **given)


def health_policy(settings: Settings) -> HealthPolicy:
    """Return the reaction to hardware faults."""
    return HealthPolicy(HealthAction(settings.health), settings.health_quiet)


def rights(settings: Settings) -> Rights:
    """Return who may call what."""
    uid = os.geteuid()
    return Rights(uid, settings.admins if uid == 0 else None, settings.hide_commands)


def request_defaults(settings: Settings) -> Defaults:
    """Return the values of fields that a request leaves out, and their limits."""
    # A job may always ask for the default grace, even if it is over longest_grace.
    return Defaults(settings.default_memory, max(settings.longest_grace, settings.grace))


def checked(settings: Settings) -> Settings:
    """Return the settings after the checks that need more than one of them.

    Raises:
        BadConfiguration: a daemon cannot start with them.
    """
    if settings.simulate is not None:
        simulated_gpus(settings.simulate)
    usual, least = settings.default_memory, settings.smallest_lease
    if not isinstance(usual, Share) and usual < least:
        raise BadConfiguration(
            f"cannot use the settings: default_memory, {format_size(usual)}, is less than "
            f"smallest_lease, {format_size(least)}",
            "raise default_memory, or lower smallest_lease",
        )
    return settings
