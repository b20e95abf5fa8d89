"""The server's side of the daemon: what answers requests, wired to the parts that it asks."""

import os
from dataclasses import dataclass

from gpulease.config import Settings
from gpulease.daemon.accounting import Accounting
from gpulease.daemon.askers import Askers
from gpulease.daemon.examine import Examination
from gpulease.daemon.finder import Finder
from gpulease.daemon.health import health_checks
from gpulease.daemon.workers import Workers
from gpulease.server.board import Board
from gpulease.server.desk import Desk
from gpulease.server.fields import Defaults
from gpulease.server.leased import Machine, Watches, overuse_view
from gpulease.server.rights import Rights
from gpulease.server.views import Views
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
    clock: Clock
    workers: Workers
    askers: Askers
    health: HealthWatch
    machine: Machine
    watches: Watches
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


def build_desk(settings: Settings, room: Room) -> Desk:
    """Return what the routes are answered with."""
    examination = Examination(
        lambda: room.keeper.seen,
        room.machine.driver,
        settings.simulate,
        settings.state,
        HOOKS,
        room.machine.holds.rungs,
        lambda: health_checks(room.keeper, room.health, room.clock),
        room.keeper.probe.library,
        lambda: room.keeper.closed,
    )
    return Desk(
        keeper=room.keeper,
        views=Views(room.keeper, room.processes, room.machine, room.watches),
        # With views of its own: it draws in a thread.
        board=Board(Views(room.keeper, room.processes, room.machine, room.watches), room.clock),
        clock=room.clock,
        defaults=defaults(settings),
        rights=rights(settings),
        directory_of=room.machine.directory_of,
        log_limit=settings.log_limit,
        most_streams=settings.most_streams,
        doctor=examination.results,
        overuse_of=lambda owner: overuse_view(room.watches.overuse.policy_of(owner)),
        processes=room.processes,
        drains=Drains(room.keeper.store, room.clock, room.writing, room.keeper.wake),
        environment=room.workers.environment,
        watch_asker=room.askers.watch,
        usage=room.accounting.usage,
        stored_pools=room.accounting.pools.of,
        uses=room.accounting.accounts.by_user,
    )
