"""The life of the daemon: recover, grant, listen, report ready, and leave in order.

SIGHUP reloads the settings.
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
from gpulease.daemon.housekeeping import Backups, FileWatch
from gpulease.daemon.job_output import DiskSpace, StateCleaner
from gpulease.daemon.systemd import Notifier, status_line
from gpulease.daemon.user_policy import warn_of_what_has_no_effect
from gpulease.errors import GpuleaseError, RecordUnwritable, StateUnwritable
from gpulease.host.process_finder import run_of_system
from gpulease.notifications.messages import WeeklyReports
from gpulease.server.app import build_api
from gpulease.server.http_server import HttpServer
from gpulease.server.listener import SocketGuard
from gpulease.service.jobs import take_back_grants
from gpulease.service.log_once import LogOnce
from gpulease.store.usage import UsageTotals
from gpulease.timers import Timer, Timers

_log = logging.getLogger(__name__)

_WRITE_SAMPLES_EVERY = timedelta(seconds=15)
_THIN_SAMPLES_EVERY = timedelta(minutes=5)
_CHECK_IDLENESS_EVERY = timedelta(seconds=15)
_TRY_AGAIN_AFTER_S = 1
_CHECK_BACKUPS_EVERY = timedelta(hours=1)
_REPORT_AT = "0 8 * * *"
_REMOVE_OLD_EVERY = timedelta(minutes=10)
_CHECK_FILES_EVERY = timedelta(seconds=2)
_LIMIT_OUTPUT_EVERY = timedelta(seconds=30)
_LIMIT_RUNNING_OUTPUT_EVERY = timedelta(seconds=2)
_FREE_SPACE_EVERY = timedelta(seconds=5)
_CHECK_SOCKET_EVERY = timedelta(seconds=2)
_LATE_CONNECTIONS_S = 0.2
"""Time to accept connections that were made just before the socket was closed."""


class Reload:
    """Reads the settings again at each call; invalid ones change nothing."""

    def __init__(
        self, app: DaemonApp, sampling: Timer, notifier: Notifier, read: Callable[[], Settings]
    ) -> None:
        self._app = app
        self._sampling = sampling
        self._notifier = notifier
        self._read = read

    def __call__(self) -> None:
        """Read and use the settings, and log the result."""
        self._notifier.reloading()
        try:
            fresh = self._read()
        except GpuleaseError as error:
            _log.error("the settings have not changed: %s", error.text())
        else:
            self._use(fresh)
        self._notifier.ready(status_line(self._app))

    def _use(self, fresh: Settings) -> None:
        before = self._app.base.settings()
        settings, changed, needs_restart = renew(before, fresh)
        self._app.adopt(settings)
        if settings.sample_every != before.sample_every:
            self._sampling.change(settings.sample_every)
        # Jobs that did not fit may fit now.
        self._app.scheduler.wake()
        _log.info("read the settings again; changed: %s", ", ".join(changed) or "nothing")
        warn_of_what_has_no_effect(settings)
        if needs_restart:
            _log.warning("a change of these needs a restart: %s", ", ".join(needs_restart))


async def serve(
    settings: Settings,
    notifier: Notifier,
    read_again: Callable[[], Settings],
    *,
    confined: bool = False,
) -> None:
    """Run the daemon until SIGTERM, SIGINT, or idleness if the settings say so.

    SIGHUP makes it use the settings that `read_again` returns, except those that need a restart.

    Raises:
        GpuleaseError: the daemon cannot run.
    """
    leave = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, leave.set)
    app = build(settings, confined=confined)
    try:
        await _run(app, notifier, leave, read_again)
    except StateUnwritable:
        # Another attempt follows, so the service manager must not see an end.
        await app.close()
        raise
    except BaseException:
        notifier.stopping()
        await app.close()
        raise
    notifier.stopping()
    await app.close()
    _log.info("stopped; running jobs continue")


async def _run(
    app: DaemonApp,
    notifier: Notifier,
    leave: asyncio.Event,
    read_again: Callable[[], Settings],
) -> None:
    settings = app.base.settings()
    _log.info("gpuleased %s", described())
    warn_of_what_has_no_effect(settings)
    recovered = await _recover(app)
    server = HttpServer(build_api(app.api), leave)
    guard = SocketGuard(
        settings.socket, to_all=app.api.context.rights.daemon_uid == 0, move=server.move
    )
    # Before the socket: a command that starts this daemon reads this as soon as it can connect.
    user_daemon.note_serving(settings.state, settings.socket, settings.simulate)
    listening = guard.open()
    timers, sampling = _timers(app, server, guard, leave)
    backups = Backups(app.base.store, app.base.clock)
    timers.every(_CHECK_BACKUPS_EVERY, backups.daily)
    notifying = asyncio.create_task(app.notifications.run(), name="notifications")
    granting = asyncio.create_task(_keep_granting(app, notifier), name="scheduler")
    tasks = [
        granting,
        notifying,
        asyncio.create_task(backups.daily(), name="backup"),
        asyncio.create_task(_stop_granting(app, granting, leave), name="leave"),
    ]
    try:
        timers.start()
        serving = asyncio.create_task(server.serve([listening]), name="serve")
        # Before it says that it is ready: without a handler, SIGHUP would end the daemon.
        reload = Reload(app, sampling, notifier, read_again)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        gpus = f"simulating {settings.simulate}" if settings.simulate else "on real GPUs"
        _log.info("ready on %s, %s; recovered jobs: %d", settings.socket, gpus, recovered)
        notifier.ready(status_line(app))
        await serving
    finally:
        leave.set()
        notifying.cancel()
        timers.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        listening.close()
        guard.close()


async def _recover(app: DaemonApp) -> int:
    """Follow the running jobs on record again; return how many hold memory.

    Raises:
        StateUnwritable: the database cannot be written now.
    """
    try:
        _take_back_grants(app)
        await app.enforcement.levels.ask(await app.scheduler.observer.observe())
        await app.enforcement.recover(app.scheduler)
        recovered = app.scheduler.supervisor.recover()
        await app.waiting_clients.recover()
        await _grant_first(app)
    except RecordUnwritable as error:
        raise StateUnwritable(error.message, error.hint) from error
    return recovered


async def _grant_first(app: DaemonApp) -> None:
    """Make a pass. Ready means that the daemon can grant: it is on disk before the first request.

    After an unexpected failure the daemon serves without grants, and later passes try again: users
    see and cancel their jobs meanwhile, those that make passes fail included.
    """
    try:
        await app.scheduler.one_pass()
    except GpuleaseError:
        raise
    except Exception:  # noqa: BLE001  a daemon that ends at each start helps nobody
        _log.exception("cannot grant leases now; serving without grants, and trying again")


def _take_back_grants(app: DaemonApp) -> None:
    """Queue jobs again that were granted before a reboot and never launched."""
    base = app.base
    boot, before = run_of_system(), base.store.boot()
    if before == boot:
        return
    if before is not None and (
        number := take_back_grants(base.store, app.runner.was_launched, base.clock)
    ):
        _log.info("queued again after the reboot, since they had not started: %d jobs", number)
    base.store.note_boot(boot)


async def _stop_granting(
    app: DaemonApp, granting: asyncio.Task[None], leave: asyncio.Event
) -> None:
    """Stop granting and launching as soon as the daemon is asked to leave.

    At a shutdown this happens before the first job is stopped, so no queued job takes its place.
    """
    await leave.wait()
    granting.cancel()
    await app.scheduler.supervisor.stop()


async def _keep_granting(app: DaemonApp, notifier: Notifier) -> None:
    """Run the scheduler; after a failed pass (a full disk, say), log it and try again.

    A known failure keeps the watchdog fed, since a restart would not help. After an unknown one,
    which is a bug, the watchdog restarts the daemon if it lasts.
    """
    failures = LogOnce(_log)

    def alive() -> None:
        failures.passed("grant")
        notifier.alive(status_line(app))

    while True:
        try:
            await app.scheduler.run(notifier.rest_s, alive)
        except RecordUnwritable as error:
            # The writer thread has logged it.
            notifier.alive(f"{error.message}; trying again")
        except GpuleaseError as error:
            failures.say("grant", f"{error.message}; trying again")
            notifier.alive(f"{error.message}; trying again")
        except Exception as error:  # noqa: BLE001  the daemon must continue to grant leases
            failures.say(
                "grant", "cannot grant leases now; trying again",
                why=repr(error), bug=error, level=logging.ERROR,
            )  # fmt: skip
        await asyncio.sleep(_TRY_AGAIN_AFTER_S)
        app.scheduler.wake()


def _timers(
    app: DaemonApp, server: HttpServer, guard: SocketGuard, leave: asyncio.Event
) -> tuple[Timers, Timer]:
    """Return all timers, and the sampling timer, whose period is a setting."""
    timers, base = Timers(), app.base
    timers.often(_CHECK_SOCKET_EVERY, guard.look)
    sampling = timers.often(base.settings().sample_every, app.sampler.sample)
    # Not late after the clock is set back: only an hour of samples is kept in memory.
    timers.often(_WRITE_SAMPLES_EVERY, app.sampler.write_batch)
    timers.every(_THIN_SAMPLES_EVERY, app.sampler.thin)
    cleaner = StateCleaner(base.state, base.store, base.settings, base.clock, base.writer)
    timers.every(_LIMIT_OUTPUT_EVERY, cleaner.limit_output)
    timers.every(_REMOVE_OLD_EVERY, cleaner.remove_old)
    timers.every(_REMOVE_OLD_EVERY, app.notifications.sending.delete_old)
    totals = UsageTotals(base.store).totals
    reports = WeeklyReports(
        base.store, totals, base.clock, base.writer, lambda: base.settings().notify
    )
    timers.at(_REPORT_AT, reports.daily)
    timers.often(_CHECK_FILES_EVERY, FileWatch(base.store, base.state, base.writer).check)
    space = DiskSpace(base.store, base.settings, app.scheduler.notify_owner)
    timers.often(_LIMIT_RUNNING_OUTPUT_EVERY, space.limit_running)
    timers.often(_FREE_SPACE_EVERY, space.keep_free)
    app.slurm.start(timers, app.api.context.machine_views)
    span = base.settings().leave_when_idle
    if span is not None:
        _leave_when_idle(timers, span, app, server, guard, leave)
    return timers, sampling


def _leave_when_idle(
    timers: Timers,
    span: timedelta,
    app: DaemonApp,
    server: HttpServer,
    guard: SocketGuard,
    leave: asyncio.Event,
) -> None:
    busy_at = app.base.clock.steady()

    def is_idle() -> bool:
        """Return whether there was neither a live job nor a connection for this span."""
        nonlocal busy_at
        now = app.base.clock.steady()
        if app.base.store.live() or server.open_connections:
            busy_at = now
        return now - busy_at >= span

    async def check() -> None:
        if not is_idle():
            return
        # Close the socket first, then serve callers that connected just before, and stay for them.
        guard.close()
        await asyncio.sleep(_LATE_CONNECTIONS_S)
        if is_idle():
            _log.info("stopping: no job and no request for a while")
            leave.set()

    timers.every(min(span, _CHECK_IDLENESS_EVERY), check)
