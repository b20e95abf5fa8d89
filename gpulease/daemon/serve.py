"""The life of the daemon: recover, grant, listen, say that it is ready; and leave in order.

SIGHUP: the settings are read anew, and what can change under a running daemon changes.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from datetime import timedelta

from gpulease import user_daemon
from gpulease.build import described
from gpulease.config import Settings, renew
from gpulease.daemon.app import DaemonApp, build
from gpulease.daemon.disk_space import DiskSpace
from gpulease.daemon.housekeeping import Backups, FileWatch, IdleTimer, StateCleaner
from gpulease.daemon.systemd import Notifier, status_line
from gpulease.daemon.user_policy import warn_of_unknown_names
from gpulease.errors import GpuleaseError, RecordUnwritable, StateUnwritable
from gpulease.host.process_watch import run_of_system
from gpulease.server.app import build_api
from gpulease.server.http_server import HttpServer
from gpulease.server.listener import SocketGuard
from gpulease.service.jobs import take_back_grants
from gpulease.service.log_once import LogOnce
from gpulease.timers import Timer, Timers

_log = logging.getLogger(__name__)


class Reload:
    """Takes over new settings each time that it is called; with bad ones nothing changes."""

    def __init__(
        self, parts: DaemonApp, sampling: Timer, notifier: Notifier, read: Callable[[], Settings]
    ) -> None:
        self._parts = parts
        self._sampling = sampling
        self._notifier = notifier
        self._read = read

    def __call__(self) -> None:
        """Read the settings and take them over, and say in the log what came of it."""
        self._notifier.reloading()
        try:
            fresh = self._read()
        except GpuleaseError as error:
            _log.error("the settings stay as they were: %s", error.text())
        else:
            self._take_over(fresh)
        self._notifier.ready(status_line(self._parts))

    def _take_over(self, fresh: Settings) -> None:
        before = self._parts.settings
        settings, taken, left = renew(before, fresh)
        self._parts.adopt(settings)
        if settings.sample_every != before.sample_every:
            self._sampling.change(settings.sample_every)
        # What was refused for want of memory may fit now.
        self._parts.keeper.wake()
        _log.info("settings read again; changed: %s", ", ".join(taken) or "nothing")
        warn_of_unknown_names(settings)
        if left:
            _log.warning("%s: a restart is needed for this to change", ", ".join(left))


_WRITE_SAMPLES_EVERY = timedelta(seconds=15)
_THIN_EVERY = timedelta(minutes=5)
_LOOK_FOR_IDLENESS_EVERY = timedelta(seconds=15)
_LEAVE_CONNECTIONS_AFTER_S = 2
_TRY_AGAIN_AFTER_S = 1
_LOOK_FOR_COPIES_EVERY = timedelta(hours=1)
_TIDY_EVERY = timedelta(minutes=10)
_LOOK_AT_THE_FILE_EVERY = timedelta(seconds=2)
_SHED_OUTPUT_EVERY = timedelta(seconds=30)
_BOUND_OUTPUT_EVERY = timedelta(seconds=2)
_FREE_SPACE_EVERY = timedelta(seconds=5)
_LOOK_AT_THE_DOOR_EVERY = timedelta(seconds=2)
_LATECOMERS_WITHIN_S = 0.2
"""For those who had connected before the socket was taken away to be heard."""


async def serve(
    settings: Settings,
    notifier: Notifier,
    read_again: Callable[[], Settings],
    *,
    confined: bool = False,
) -> None:
    """Run the daemon until SIGTERM, SIGINT, or idleness if the settings say so.

    SIGHUP has it take over what `read_again` returns, as far as that can be done at run time.

    Raises:
        GpuleaseError: it cannot be run as the settings say.
    """
    leave = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, leave.set)
    parts = build(settings, confined=confined)
    try:
        await _run(parts, notifier, leave, read_again)
    except StateUnwritable:
        # On its way to another try, which a service manager is not to take for the end.
        await parts.close()
        raise
    except BaseException:
        notifier.stopping()
        await parts.close()
        raise
    notifier.stopping()
    await parts.close()
    _log.info("left; running jobs go on")


async def _run(
    parts: DaemonApp,
    notifier: Notifier,
    leave: asyncio.Event,
    read_again: Callable[[], Settings],
) -> None:
    settings = parts.settings
    _log.info("gpuleased %s", described())
    warn_of_unknown_names(settings)
    recovered = await _recover(parts)
    server = HttpServer(build_api(parts.desk), leave)
    door = SocketGuard(settings.socket, to_all=parts.desk.rights.daemon_uid == 0, move=server.move)
    # Before: whoever started this daemon asks whose it is as soon as something listens.
    user_daemon.note_serving(settings.state, settings.socket, settings.simulate)
    listening = door.open()
    granting = asyncio.create_task(_grant_for_ever(parts, notifier), name="grant")
    timers, sampling = _timers(parts, server, door, leave)
    copies = Backups(parts.store, parts.desk.clock)
    timers.every(_LOOK_FOR_COPIES_EVERY, copies.daily)
    copying = asyncio.create_task(copies.at_start(), name="copy")
    leaving = asyncio.create_task(_launch_nothing_more(parts, granting, leave), name="leave")
    try:
        timers.start()
        serving = asyncio.create_task(server.serve([listening]), name="serve")
        gpus = f"simulating {settings.simulate}" if settings.simulate else "on real GPUs"
        _log.info("ready on %s, %s; %d jobs found again", settings.socket, gpus, recovered)
        reload = Reload(parts, sampling, notifier, read_again)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        notifier.ready(status_line(parts))
        await serving
    finally:
        leave.set()
        timers.stop()
        await asyncio.gather(granting, copying, leaving, return_exceptions=True)
        listening.close()
        door.close()


async def _recover(parts: DaemonApp) -> int:
    """Find the jobs on record again; return how many hold memory.

    Raises:
        StateUnwritable: the record cannot be written now.
    """
    try:
        _take_back_grants(parts)
        await parts.holding.ladder.ask(await parts.keeper.look())
        await parts.holding.recover(parts.keeper)
        recovered = parts.keeper.followers.recover()
        await parts.askers.recover()
        # Ready means that it can grant: one whole pass, on disk, before the first caller is heard.
        await parts.keeper.one_pass()
    except RecordUnwritable as error:
        raise StateUnwritable(error.message, error.hint) from error
    return recovered


def _take_back_grants(parts: DaemonApp) -> None:
    """Queue again what was granted before a reboot and never launched."""
    boot, before = run_of_system(), parts.store.boot()
    if before == boot:
        return
    if before is not None and (
        number := take_back_grants(parts.store, parts.workers.was_launched, parts.desk.clock)
    ):
        _log.info("jobs that were granted before the reboot and not started: %d, queued", number)
    parts.store.note_boot(boot)


async def _launch_nothing_more(
    parts: DaemonApp, granting: asyncio.Task[None], leave: asyncio.Event
) -> None:
    """Grant and launch nothing from the moment on at which the daemon is asked to leave.

    At a shutdown that is before the first job is asked to go.
    """
    await leave.wait()
    granting.cancel()
    await parts.keeper.followers.stop()


async def _grant_for_ever(parts: DaemonApp, notifier: Notifier) -> None:
    """Run the loop; a pass that failed (a full disk, say) is tried again, and told.

    What has a name is no reason for a watchdog to kill the daemon: a new one would meet the same.
    What has none is a bug, and if it lasts then starting anew is the mend to try.
    """
    complaints = LogOnce(_log)

    def alive() -> None:
        complaints.passed("grant")
        notifier.alive(status_line(parts))

    while True:
        try:
            await parts.keeper.run(notifier.rest_s, alive)
        except RecordUnwritable as error:
            # The log has it from who writes.
            notifier.alive(f"{error.message}; trying again")
        except GpuleaseError as error:
            complaints.say("grant", f"{error.message}; trying again")
            notifier.alive(f"{error.message}; trying again")
        except Exception as error:  # noqa: BLE001  whatever it was, leases must go on being granted
            complaints.say(
                "grant", "cannot grant at this moment; trying again",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip
        await asyncio.sleep(_TRY_AGAIN_AFTER_S)
        parts.keeper.wake()


def _timers(
    parts: DaemonApp, server: HttpServer, door: SocketGuard, leave: asyncio.Event
) -> tuple[Timers, Timer]:
    """Return the timers, and the one of them whose pace is a setting."""
    timers, settings = Timers(), parts.settings
    timers.every(_LOOK_AT_THE_DOOR_EVERY, door.look)
    sampling = timers.every(settings.sample_every, parts.sampler.sample)
    timers.every(_WRITE_SAMPLES_EVERY, parts.sampler.write)
    timers.every(_THIN_EVERY, parts.sampler.thin)
    tidier = StateCleaner(
        parts.state, parts.store, lambda: parts.settings, parts.desk.clock, parts.lanes[0]
    )
    timers.every(_SHED_OUTPUT_EVERY, tidier.shed_output)
    timers.every(_TIDY_EVERY, tidier.remove_what_is_old)
    watch = FileWatch(parts.store, parts.state, parts.lanes[0])
    timers.every(_LOOK_AT_THE_FILE_EVERY, watch.look)
    space = DiskSpace(parts.store, lambda: parts.settings, parts.keeper.tell_owner)
    timers.every(_BOUND_OUTPUT_EVERY, space.bound_running)
    timers.every(_FREE_SPACE_EVERY, space.keep_free)
    if settings.leave_when_idle is not None:
        _leave_when_idle(timers, settings.leave_when_idle, parts, server, door, leave)
    return timers, sampling


def _leave_when_idle(
    timers: Timers,
    span: timedelta,
    parts: DaemonApp,
    server: HttpServer,
    door: SocketGuard,
    leave: asyncio.Event,
) -> None:
    watch = IdleTimer(parts.keeper, parts.desk.clock, lambda: len(server.server_state.connections))

    async def look() -> None:
        if watch.idle_s() < span.total_seconds():
            return
        # First nobody can come any more; who came just before is heard, and then we stay.
        door.close()
        await asyncio.sleep(_LATECOMERS_WITHIN_S)
        if watch.idle_s() >= span.total_seconds():
            _log.info("leaving: nobody has asked for anything in a while")
            leave.set()

    timers.every(min(span, _LOOK_FOR_IDLENESS_EVERY), look)
