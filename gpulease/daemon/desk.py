"""The server's side of the daemon: what answers requests, wired to the parts that it asks."""

import os
from dataclasses import dataclass

from gpulease.config import Settings
from gpulease.daemon.askers import Askers
from gpulease.daemon.examine import Examination, closed_to_others
from gpulease.daemon.finder import Finder
from gpulease.daemon.health import health_checks
from gpulease.daemon.state import StateDirectory
from gpulease.daemon.workers import Workers
from gpulease.server.board import Board
from gpulease.server.fields import Defaults
from gpulease.server.handlers import Desk
from gpulease.server.rights import Rights
from gpulease.server.views import Machine, Views, Watches
from gpulease.service.drains import Drains
from gpulease.service.health import HealthWatch
from gpulease.service.keeper import Keeper
from gpulease.service.ports import Clock, InThread
from gpulease.worker.environment import HOOKS


@dataclass(frozen=True, slots=True)
class Room:
    """What stands around the desk."""

    keeper: Keeper
    processes: Finder
    state: StateDirectory
    clock: Clock
    workers: Workers
    askers: Askers
    health: HealthWatch
    watches: Watches
    writing: InThread


def rights(settings: Settings) -> Rights:
    """Return who may do what."""
    uid = os.geteuid()
    return Rights(uid, settings.admins if uid == 0 else None, settings.hide_commands)


def defaults(settings: Settings) -> Defaults:
    """Return what a request gets that does not say."""
    # What everyone gets who does not ask cannot be too long to ask for.
    return Defaults(settings.default_memory, max(settings.longest_grace, settings.grace))


def build_desk(settings: Settings, room: Room) -> Desk:
    """Return what the routes are answered with."""
    simulated = settings.simulate is not None
    # As root: a hook that the user cannot read holds nobody.
    hooked = not simulated and (os.geteuid() != 0 or closed_to_others(HOOKS) is None)
    enforced_by = ("framework",) if hooked else ()
    machine = Machine(room.keeper.probe.driver, simulated, room.state.job, enforced_by)
    examination = Examination(
        lambda: room.keeper.seen,
        room.keeper.probe.driver,
        settings.simulate,
        room.state.path,
        HOOKS,
        lambda: health_checks(room.keeper, room.health, room.clock),
        room.keeper.probe.library,
    )
    return Desk(
        keeper=room.keeper,
        views=Views(room.keeper, room.processes, machine, room.watches),
        # With views of its own: it draws in a thread.
        board=Board(Views(room.keeper, room.processes, machine, room.watches), room.clock),
        clock=room.clock,
        defaults=defaults(settings),
        rights=rights(settings),
        directory_of=room.state.job,
        log_limit=settings.log_limit,
        most_streams=settings.most_streams,
        doctor=examination.results,
        processes=room.processes,
        drains=Drains(room.keeper.store, room.clock, room.writing, room.keeper.wake),
        environment=room.workers.environment,
        watch_asker=room.askers.watch,
    )
