"""The composition root: the parts of the daemon, built from the settings and wired together."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from gpulease.config import Settings
from gpulease.daemon.accounting import Accounting
from gpulease.daemon.askers import Askers
from gpulease.daemon.clock import SystemClock
from gpulease.daemon.desk import Room, build_desk, defaults, rights
from gpulease.daemon.finder import Finder, claims
from gpulease.daemon.health import health_policy, watch_health
from gpulease.daemon.holders import Holders
from gpulease.daemon.holding import Holding, build_holding
from gpulease.daemon.lanes import Lane, LookLane, WriterLane
from gpulease.daemon.launchers import Launchers
from gpulease.daemon.launching import Surroundings
from gpulease.daemon.living import Ends
from gpulease.daemon.opening import open_record
from gpulease.daemon.rules import Rules
from gpulease.daemon.sampling import Sampler
from gpulease.daemon.shims import has_living_shim, has_scope
from gpulease.daemon.space import kept_free
from gpulease.daemon.state import StateDirectory
from gpulease.daemon.unhooked import Unhooked, on_record
from gpulease.daemon.watch import Overseer
from gpulease.daemon.workers import Workers
from gpulease.errors import BadConfiguration, BadValue
from gpulease.gpu.nvml import NvmlProbe
from gpulease.gpu.simulated import SimulatedGpus, parse_simulation
from gpulease.process.launcher import Launcher
from gpulease.process.namespaces import has_first_pids
from gpulease.process.table import ProcessTable
from gpulease.server.desk import Desk
from gpulease.server.leased import Machine, Watches
from gpulease.service.bounds import Bounds
from gpulease.service.health import HealthWatch
from gpulease.service.idleness import RestWatch
from gpulease.service.keeper import Keeper
from gpulease.service.look import Policy
from gpulease.service.overuse import OveruseWatch
from gpulease.service.ports import GpuProbe
from gpulease.store.occupancy import Occupancy
from gpulease.store.repository import SqlStore
from gpulease.units import Share, format_size
from gpulease.worker.environment import HOOKS

_log = logging.getLogger("gpuleased")


@dataclass(slots=True)
class Parts:
    """What the daemon runs, and what it closes at the end, in this order."""

    settings: Settings
    state: StateDirectory
    store: SqlStore
    probe: GpuProbe
    launcher: Launcher
    keeper: Keeper
    workers: Workers
    askers: Askers
    sampler: Sampler
    desk: Desk
    health: HealthWatch
    rules: Rules
    holding: Holding
    lanes: tuple[Lane, Lane]

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
        self.desk.board.close()
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


def build(settings: Settings, *, confined: bool = False) -> Parts:
    """Build every part; the first look has not been taken yet.

    `confined` is for a daemon in a mount namespace of its own, in which its jobs are not to be.

    Raises:
        GpuleaseError: something that the daemon needs is not to be had.
    """
    state, store, installation = open_record(settings)
    probe = open_probe(settings, store)
    clock, ends = SystemClock(), Ends()
    lanes = WriterLane("writer"), LookLane("look")
    holding = build_holding(settings, probe, state, store, lanes[0], clock, confined=confined)
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
    workers = Workers(launcher, table, state, around, clock)
    keeper = Keeper(
        store,
        probe,
        processes,
        Launchers(workers, Holders(clock, ends, around.rungs)),
        clock,
        _policy(settings),
        writing=lanes[0],
        looking=lanes[1],
    )
    if holding.uvm is not None:
        keeper.obstacle = holding.uvm.obstacle
    askers = Askers(keeper, ends)
    health = watch_health(settings, keeper, clock, lanes)
    rules = Rules(settings)
    holding.ladder.watch = lambda: rules.stops_overuse
    holding.ladder.watch_is_blind = lambda: keeper.seen is not None and keeper.seen.is_blind
    holding.ladder.watch_varies = lambda: rules.differ_on_overuse
    overuse = OveruseWatch(rules.overuse)
    watch_pools = accounting.attach(keeper, state.job, overuse.stops, lanes[0])
    rests = RestWatch(rules.idleness)
    overseer = Overseer(keeper, overuse, rests, clock, lanes[0])
    unhooked = Unhooked(
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
    machine = Machine(
        probe.driver, simulated, state.job, holding.ladder, unhooked.of, accounting.pools_of
    )
    watches = Watches(overuse, rests)
    return Parts(
        settings=settings,
        state=state,
        store=store,
        probe=probe,
        launcher=launcher,
        keeper=keeper,
        workers=workers,
        askers=askers,
        sampler=Sampler(keeper, Occupancy(store), clock, lanes[0], observers),
        health=health,
        rules=rules,
        holding=holding,
        desk=build_desk(
            settings,
            Room(
                keeper,
                processes,
                clock,
                workers,
                askers,
                health,
                machine,
                watches,
                accounting,
                lanes[0],
            ),
        ),
        lanes=lanes,
    )


def _policy(settings: Settings) -> Policy:
    bounds = Bounds(
        waiting=settings.most_waiting,
        waiting_bytes=settings.most_waiting_bytes,
        holds=settings.most_holds,
        unbounded=frozenset({0, os.geteuid()}),
    )
    return Policy(settings.margin, settings.smallest_lease, bounds)


def _surroundings(
    settings: Settings,
    probe: GpuProbe,
    keeper: Callable[[], Keeper],
    installation: str,
    holding: Holding,
    accounting: Accounting,
) -> Surroundings:
    return Surroundings(
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
