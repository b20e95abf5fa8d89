"""The composition root: the parts of the daemon, built from the settings and wired together."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from gpulease.config import Settings
from gpulease.daemon.accounting import Accounting
from gpulease.daemon.askers import Askers
from gpulease.daemon.clock import SystemClock
from gpulease.daemon.enclosure import enclose
from gpulease.daemon.examine import Examination, closed_to_others
from gpulease.daemon.finder import Finder
from gpulease.daemon.holders import Holders
from gpulease.daemon.launchers import Launchers
from gpulease.daemon.living import Ends
from gpulease.daemon.sampling import Sampler
from gpulease.daemon.state import StateDirectory
from gpulease.daemon.workers import Surroundings, Workers
from gpulease.errors import BadConfiguration, BadValue, RecordUnwritable, StateUnwritable
from gpulease.gpu.nvml import NvmlProbe
from gpulease.gpu.simulated import SimulatedGpus, parse_simulation
from gpulease.process import scopes
from gpulease.process.launcher import Launcher
from gpulease.process.record import is_alive
from gpulease.process.table import ProcessTable
from gpulease.server.board import Board
from gpulease.server.fields import Defaults
from gpulease.server.handlers import Desk
from gpulease.server.rights import Rights
from gpulease.server.views import Machine, Views
from gpulease.service.bounds import Bounds
from gpulease.service.keeper import Keeper
from gpulease.service.look import Policy
from gpulease.service.ports import Clock, GpuProbe
from gpulease.store.occupancy import Occupancy
from gpulease.store.repository import FILE_NAME, SqlStore
from gpulease.worker.environment import HOOKS

T = TypeVar("T")


class Lane:
    """One thread: what is given to it happens in order, and never on the event loop."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return the result of `call`, awaited."""
        return asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Let what was given finish."""
        self._pool.shutdown(wait=True)


class LookLane(Lane):
    """A lane for looks at the GPUs; a driver that hangs must not hold up the daemon's end."""

    def close(self) -> None:
        """Leave what hangs behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)


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
    lanes: tuple[Lane, Lane]

    def adopt(self, settings: Settings) -> None:
        """Go on with other settings, of which those that only count at the start are the same.

        How often the GPUs are read is for the timers to follow.
        """
        self.settings = settings
        self.keeper.policy = _policy(settings)
        self.desk.defaults = _defaults(settings)
        self.desk.log_limit = settings.log_limit
        self.desk.rights = _rights(settings)
        self.desk.most_streams = settings.most_streams
        self.workers.adopt(settings.grace, settings.log_limit)

    async def close(self) -> None:
        """Let go of everything; jobs go on."""
        await self.askers.close()
        await self.keeper.stop_following()
        await self.sampler.write()
        await self.launcher.close()
        self.desk.board.close()
        for lane in self.lanes:
            lane.close()
        self.store.close()
        self.state.close()


def open_probe(settings: Settings) -> NvmlProbe | SimulatedGpus:
    """Open the GPUs: the simulated ones if any were asked for, else the real ones.

    Raises:
        NoGpus: there are none.
        BadConfiguration: the simulation asked for makes no sense.
    """
    if settings.simulate is not None:
        return SimulatedGpus.here(_simulated(settings.simulate), str(settings.state))
    return NvmlProbe.open(settings.driver_deadline)


def checked(settings: Settings) -> Settings:
    """Return the settings if a daemon could be started with them.

    Raises:
        BadConfiguration: it could not.
    """
    if settings.simulate is not None:
        _simulated(settings.simulate)
    return settings


def _simulated(text: str) -> tuple[int, ...]:
    try:
        return parse_simulation(text)
    except BadValue as error:
        raise BadConfiguration(error.message, error.hint) from error


def open_record(settings: Settings) -> tuple[StateDirectory, SqlStore, str]:
    """Take the state directory and open the record in it, with the name of this installation.

    Raises:
        StateUnusable: it cannot be used as it is.
        StateUnwritable: it cannot be used now; nothing is held, and it can be tried again.
    """
    with ExitStack() as stack:
        state = StateDirectory(settings.state)
        stack.callback(state.close)
        store = SqlStore(state.path / FILE_NAME)
        stack.callback(store.close)
        try:
            # With a database that is new, or an old one put back, a job must not find another's
            # record.
            store.use_no_id_up_to(state.last_job())
            installation = store.installation()
        except RecordUnwritable as error:
            raise StateUnwritable(error.message, error.hint) from error
        stack.pop_all()
    return state, store, installation


def build(settings: Settings, *, confined: bool = False) -> Parts:
    """Build every part; the first look has not been taken yet.

    `confined` is for a daemon in a mount namespace of its own, in which its jobs are not to be.

    Raises:
        GpuleaseError: something that the daemon needs is not to be had.
    """
    state, store, installation = open_record(settings)
    probe = open_probe(settings)
    clock, launcher = SystemClock(), _launcher(confined)
    ends = Ends()
    lanes = Lane("writer"), LookLane("look")
    table = ProcessTable()
    processes = Finder(table, installation, lambda job: is_alive(state.job(job)))
    accounting = Accounting(store, probe.driver)
    around = _surroundings(settings, probe, lambda: keeper, installation, accounting)
    workers = Workers(launcher, table, state, around, clock)
    keeper = Keeper(
        store,
        probe,
        processes,
        Launchers(workers, Holders(clock, ends)),
        clock,
        _policy(settings),
        writing=lanes[0],
        looking=lanes[1],
    )
    watch_pools = accounting.attach(keeper, state.job, lanes[0])
    askers = Askers(keeper, ends)
    return Parts(
        settings=settings,
        state=state,
        store=store,
        probe=probe,
        launcher=launcher,
        keeper=keeper,
        workers=workers,
        askers=askers,
        sampler=Sampler(keeper, Occupancy(store), clock, lanes[0], (watch_pools,)),
        desk=_desk(settings, keeper, processes, state, clock, workers, askers, accounting),
        lanes=lanes,
    )


def _launcher(confined: bool) -> Launcher:
    """Return the launcher; the jobs of the system's service are in scopes of their own."""
    in_scopes = confined and scopes.is_to_be_had()
    return Launcher(confined=confined, enclose=enclose if in_scopes else None)


def _rights(settings: Settings) -> Rights:
    uid = os.geteuid()
    return Rights(uid, settings.admins if uid == 0 else None, settings.hide_commands)


def _policy(settings: Settings) -> Policy:
    bounds = Bounds(
        waiting=settings.most_waiting,
        waiting_bytes=settings.most_waiting_bytes,
        holds=settings.most_holds,
        unbounded=frozenset({0, os.geteuid()}),
    )
    return Policy(settings.margin, settings.smallest_lease, bounds)


def _defaults(settings: Settings) -> Defaults:
    # What everyone gets who does not ask cannot be too long to ask for.
    return Defaults(settings.default_memory, max(settings.longest_grace, settings.grace))


def _surroundings(
    settings: Settings,
    probe: GpuProbe,
    keeper: Callable[[], Keeper],
    installation: str,
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
        socket=str(settings.socket),
        beside=accounting.usage.beside,
    )


def _desk(
    settings: Settings,
    keeper: Keeper,
    processes: Finder,
    state: StateDirectory,
    clock: Clock,
    workers: Workers,
    askers: Askers,
    accounting: Accounting,
) -> Desk:
    simulated = settings.simulate is not None
    # As root: a hook that the user cannot read holds nobody.
    hooked = not simulated and (os.geteuid() != 0 or closed_to_others(HOOKS) is None)
    enforced_by = ("framework",) if hooked else ()
    machine = Machine(keeper.probe.driver, simulated, state.job, enforced_by, accounting.pools_of)
    examination = Examination(
        lambda: keeper.seen, keeper.probe.driver, settings.simulate, state.path, HOOKS
    )
    return Desk(
        keeper=keeper,
        views=Views(keeper, processes, machine),
        # With views of its own: it draws in a thread.
        board=Board(Views(keeper, processes, machine), clock),
        clock=clock,
        defaults=_defaults(settings),
        rights=_rights(settings),
        directory_of=state.job,
        log_limit=settings.log_limit,
        most_streams=settings.most_streams,
        doctor=examination.results,
        processes=processes,
        environment=workers.environment,
        watch_asker=askers.watch,
        usage=accounting.usage,
        stored_pools=accounting.pools.of,
        uses=accounting.accounts.by_user,
    )
