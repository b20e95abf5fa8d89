"""The composition root: the parts of the daemon, built from the settings and wired together.

The server's side of the daemon: what answers requests, wired to the parts that it asks.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from gpulease.config import Settings
from gpulease.daemon.accounting import Accounting
from gpulease.daemon.clock import SystemClock
from gpulease.daemon.disk_space import kept_free
from gpulease.daemon.doctor import Doctor, health_checks, health_policy, watch_health
from gpulease.daemon.enforcement_setup import EnforcementSetup, build_enforcement
from gpulease.daemon.housekeeping import Sampler
from gpulease.daemon.open_database import open_record
from gpulease.daemon.user_policy import UserPolicy
from gpulease.daemon.worker_threads import ObservationThread, WorkerThread, WriterThread
from gpulease.errors import BadConfiguration, BadValue
from gpulease.gpu.nvml import NvmlProbe
from gpulease.gpu.simulated import SimulatedGpus, parse_simulation
from gpulease.host.cgroups import has_first_pids
from gpulease.host.holds import HoldLauncher, WaitingClients
from gpulease.host.hook_coverage import HookCoverage, on_record
from gpulease.host.job_runner import JobRunner
from gpulease.host.launch import LaunchContext
from gpulease.host.launcher import Launcher
from gpulease.host.launchers import Launchers
from gpulease.host.process_finder import Finder, claims
from gpulease.host.process_watch import ProcessWatch
from gpulease.host.processes import ProcessTable
from gpulease.host.shim_control import has_living_shim, has_scope
from gpulease.host.state_dir import StateDirectory
from gpulease.server.auth import Rights
from gpulease.server.context import RequestContext
from gpulease.server.job_views import JobViews, ViewSources, overuse_view
from gpulease.server.listings import Listings
from gpulease.server.machine_views import MachineViews
from gpulease.server.validation import Defaults
from gpulease.service.enforcement import EnforcementLoop
from gpulease.service.health import Drains, HealthWatch
from gpulease.service.idleness import IdleWatch
from gpulease.service.observation import Policy
from gpulease.service.overuse import OveruseWatch
from gpulease.service.ports import Clock, GpuProbe, InThread
from gpulease.service.quotas import Quotas
from gpulease.service.scheduler import Scheduler
from gpulease.store.memory_history import MemoryHistory
from gpulease.store.store import SqlStore
from gpulease.units import Share, format_size
from gpulease.worker.environment import HOOKS


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What stands around the desk."""

    keeper: Scheduler
    processes: Finder
    clock: Clock
    workers: JobRunner
    askers: WaitingClients
    health: HealthWatch
    sources: ViewSources
    accounting: Accounting
    writing: InThread


def rights(settings: Settings) -> Rights:
    """Return who may do what."""
    uid = os.geteuid()
    return Rights(uid, settings.admins if uid == 0 else None, settings.hide_commands)


def defaults(settings: Settings) -> Defaults:
    """Return what a request gets that does not say."""
    # What everyone gets who does not ask cannot be too long to ask for.
    return Defaults(settings.default_memory, max(settings.longest_grace, settings.grace))


def build_desk(settings: Settings, room: Dependencies) -> RequestContext:
    """Return what the routes are answered with."""
    examination = Doctor(
        lambda: room.keeper.seen,
        room.sources.driver,
        settings.simulate,
        settings.state,
        HOOKS,
        room.sources.enforcement.rungs,
        lambda: health_checks(room.keeper, room.health, room.clock),
        room.keeper.probe.library,
        lambda: room.keeper.closed,
    )
    from_scheduler = (room.keeper, room.processes, room.sources)
    machine_views = MachineViews(*from_scheduler)
    return RequestContext(
        scheduler=room.keeper,
        job_views=JobViews(*from_scheduler),
        machine_views=machine_views,
        # Job views keep what they have drawn, and are for one thread each.
        listings=Listings(JobViews(*from_scheduler), machine_views, room.clock),
        clock=room.clock,
        defaults=defaults(settings),
        rights=rights(settings),
        directory_of=room.sources.directory_of,
        log_limit=settings.log_limit,
        most_streams=settings.most_streams,
        doctor=examination.results,
        overuse_of=lambda owner: overuse_view(room.sources.overuse.policy_of(owner)),
        processes=room.processes,
        drains=Drains(room.keeper.store, room.clock, room.writing, room.keeper.wake),
        environment=room.workers.environment,
        watch_holder=room.askers.watch,
        usage=room.accounting.usage,
        stored_pools=room.accounting.pools.of,
        usage_by_user=room.accounting.accounts.by_user,
    )


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DaemonApp:
    """What the daemon runs, and what it closes at the end, in this order."""

    settings: Settings
    state: StateDirectory
    store: SqlStore
    probe: GpuProbe
    launcher: Launcher
    keeper: Scheduler
    workers: JobRunner
    askers: WaitingClients
    sampler: Sampler
    desk: RequestContext
    health: HealthWatch
    rules: UserPolicy
    holding: EnforcementSetup
    lanes: tuple[WorkerThread, WorkerThread]

    def adopt(self, settings: Settings) -> None:
        """Go on with other settings, of which those that only count at the start are the same.

        How often the GPUs are read is for the timers to follow.
        """
        self.settings = settings
        self.keeper.policy = _policy(settings)
        self.health.policy = health_policy(settings)
        self.desk.defaults = defaults(settings)
        self.desk.log_limit = settings.log_limit
        self.desk.rights = rights(settings)
        self.desk.most_streams = settings.most_streams
        self.rules.adopt(settings)
        self.workers.adopt(settings.grace, settings.log_limit, kept_free(settings))
        self.holding.ladder.driver_limits = settings.driver_limits

    async def close(self) -> None:
        """Let go of everything; jobs go on."""
        await self.askers.close()
        await self.keeper.followers.stop()
        await self.sampler.write()
        await self.launcher.close()
        self.desk.listings.close()
        for lane in self.lanes:
            lane.close()
        self.store.close()
        self.state.close()


def open_probe(settings: Settings, store: SqlStore) -> NvmlProbe | SimulatedGpus:
    """Open the GPUs: the simulated ones if any were asked for, else the real ones.

    Raises:
        NoGpus: there are none.
        BadConfiguration: the simulation asked for makes no sense.
    """
    if settings.simulate is not None:
        sizes = _simulated(settings.simulate)
        return SimulatedGpus.here(sizes, str(settings.state), lambda: claims(store.live()))
    return NvmlProbe.open(settings.driver_deadline)


def checked(settings: Settings) -> Settings:
    """Return the settings if a daemon could be started with them.

    Raises:
        BadConfiguration: it could not.
    """
    if settings.simulate is not None:
        _simulated(settings.simulate)
    usual, least = settings.default_memory, settings.smallest_lease
    if not isinstance(usual, Share) and usual < least:
        raise BadConfiguration(
            f"cannot use the settings: default_memory is {format_size(usual)}, and no lease is "
            f"smaller than smallest_lease, {format_size(least)}",
            "raise default_memory, or lower smallest_lease",
        )
    return settings


def _simulated(text: str) -> tuple[int, ...]:
    try:
        return parse_simulation(text)
    except BadValue as error:
        raise BadConfiguration(error.message, error.hint) from error


def build(settings: Settings, *, confined: bool = False) -> DaemonApp:
    """Build every part; the first look has not been taken yet.

    `confined` is for a daemon in a mount namespace of its own, in which its jobs are not to be.

    Raises:
        GpuleaseError: something that the daemon needs is not to be had.
    """
    state, store, installation = open_record(settings)
    probe = open_probe(settings, store)
    clock, ends = SystemClock(), ProcessWatch()
    lanes = WriterThread("writer"), ObservationThread("look")
    holding = build_enforcement(settings, probe, state, store, lanes[0], clock, confined=confined)
    launcher = Launcher(confined=confined, enclose=holding.enclosure)
    table = ProcessTable()
    processes = Finder(
        table,
        installation,
        lambda job: has_living_shim(state.job(job), store.job(job)),
        lambda job: has_scope(state.job(job)),
        own_pids=settings.simulate is not None or has_first_pids(),
    )
    accounting = Accounting(store, probe.driver)
    around = _surroundings(settings, probe, lambda: keeper, installation, holding, accounting)
    workers = JobRunner(launcher, table, state, around, clock)
    keeper = Scheduler(
        store,
        probe,
        processes,
        Launchers(workers, HoldLauncher(clock, ends, around.rungs)),
        clock,
        _policy(settings),
        writing=lanes[0],
        looking=lanes[1],
    )
    if holding.uvm is not None:
        keeper.obstacle = holding.uvm.obstacle
    askers = WaitingClients(keeper, ends)
    health = watch_health(settings, keeper, clock, lanes)
    rules = UserPolicy(settings)
    holding.ladder.watch = lambda: rules.stops_overuse
    holding.ladder.watch_is_blind = lambda: keeper.seen is not None and keeper.seen.is_blind
    holding.ladder.watch_varies = lambda: rules.differ_on_overuse
    overuse = OveruseWatch(rules.overuse)
    watch_pools = accounting.attach(keeper, state.job, overuse.stops, lanes[0])
    rests = IdleWatch(rules.idleness)
    overseer = EnforcementLoop(keeper, overuse, rests, clock, lanes[0])
    unhooked = HookCoverage(
        store.live, around.rungs, HOOKS, keeper.tell_owner, lambda job: on_record(store, job)
    )
    observers = [
        overseer.look_for_overuse,
        overseer.look_for_idleness,
        overseer.look_for_shortfalls,
        health.observe,
        holding.ladder.ask,
        unhooked.look,
        watch_pools,
    ]
    simulated = settings.simulate is not None
    sources = ViewSources(
        driver=probe.driver,
        simulated=simulated,
        directory_of=state.job,
        enforcement=holding.ladder,
        overuse=overuse,
        idleness=rests,
        unheld=unhooked.of,
        pools_of=accounting.pools_of,
    )
    return DaemonApp(
        settings=settings,
        state=state,
        store=store,
        probe=probe,
        launcher=launcher,
        keeper=keeper,
        workers=workers,
        askers=askers,
        sampler=Sampler(keeper, MemoryHistory(store), clock, lanes[0], observers),
        health=health,
        rules=rules,
        holding=holding,
        desk=build_desk(
            settings,
            Dependencies(
                keeper,
                processes,
                clock,
                workers,
                askers,
                health,
                sources,
                accounting,
                lanes[0],
            ),
        ),
        lanes=lanes,
    )


def _policy(settings: Settings) -> Policy:
    bounds = Quotas(
        waiting=settings.most_waiting,
        waiting_bytes=settings.most_waiting_bytes,
        holds=settings.most_holds,
        unbounded=frozenset({0, os.geteuid()}),
    )
    return Policy(settings.margin, settings.smallest_lease, bounds)


def _surroundings(
    settings: Settings,
    probe: GpuProbe,
    keeper: Callable[[], Scheduler],
    installation: str,
    holding: EnforcementSetup,
    accounting: Accounting,
) -> LaunchContext:
    return LaunchContext(
        installation=installation,
        as_other_users=os.geteuid() == 0,
        simulated=settings.simulate is not None,
        driver=probe.driver,
        readings=lambda: {
            reading.uuid: reading for seen in (keeper().seen,) if seen for reading in seen.readings
        },
        hooks=HOOKS,
        grace=settings.grace,
        log_limit=settings.log_limit,
        keep_free=kept_free(settings),
        rungs=lambda: holding.ladder.everywhere,
        lift=holding.lift,
        socket=str(settings.socket),
        beside=accounting.usage.beside,
    )
