"""The life of the daemon: recover, grant, listen, say that it is ready; and leave in order."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

import uvicorn

from gpulease import personal
from gpulease.config import Settings
from gpulease.daemon.assembly import Parts, build
from gpulease.daemon.copies import Copies
from gpulease.daemon.door import Door
from gpulease.daemon.names import warn_of_unknown_names
from gpulease.daemon.notify import Notifier
from gpulease.daemon.reload import Reload
from gpulease.daemon.sampling import IdleWatch
from gpulease.daemon.standing import standing
from gpulease.daemon.tidy import Tidier
from gpulease.errors import GpuleaseError, RecordUnwritable, StateUnwritable
from gpulease.server.entrance import Entrance
from gpulease.server.peer import PeerProtocol
from gpulease.server.routes import build_api
from gpulease.timers import Timer, Timers

_log = logging.getLogger("gpuleased")

_WRITE_SAMPLES_EVERY = timedelta(seconds=15)
_THIN_EVERY = timedelta(minutes=5)
_LOOK_FOR_IDLENESS_EVERY = timedelta(seconds=15)
_LEAVE_CONNECTIONS_AFTER_S = 2
_TRY_AGAIN_AFTER_S = 1
_SAY_AGAIN_AFTER_S = 60
_LOOK_FOR_COPIES_EVERY = timedelta(hours=1)
_TIDY_EVERY = timedelta(minutes=10)
_SHED_OUTPUT_EVERY = timedelta(seconds=30)
_LOOK_AT_THE_DOOR_EVERY = timedelta(seconds=2)
_LATECOMERS_WITHIN_S = 0.2
"""For those who had connected before the socket was taken away to be heard."""


class _Server(uvicorn.Server):
    """uvicorn, on a socket of ours, until it is told; without its own signals and ticking."""

    def __init__(self, config: uvicorn.Config, leave: asyncio.Event) -> None:
        super().__init__(config)
        self._leave = leave
        self._entrance: Entrance | None = None

    async def main_loop(self) -> None:
        await self._leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listening in sockets or ():
            await self.move(listening)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._entrance is not None:
            self._entrance.close()
        await super().shutdown(sockets)

    async def move(self, listening: socket.socket) -> None:
        """Hear callers on `listening` from now on; who is connected stays so."""
        former = self._entrance
        self._entrance = Entrance(
            listening, lambda: PeerProtocol(self.config, self.server_state, self.lifespan.state)
        )
        if former is not None:
            former.close()


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
    parts: Parts,
    notifier: Notifier,
    leave: asyncio.Event,
    read_again: Callable[[], Settings],
) -> None:
    settings = parts.settings
    warn_of_unknown_names(settings)
    recovered = await _recover(parts)
    server = _Server(_uvicorn(parts), leave)
    door = Door(settings.socket, to_all=parts.desk.rights.daemon_uid == 0, move=server.move)
    # Before: whoever started this daemon asks whose it is as soon as something listens.
    personal.note_serving(settings.state, settings.socket, settings.simulate)
    listening = door.open()
    granting = asyncio.create_task(_grant_for_ever(parts, notifier), name="grant")
    timers, sampling = _timers(parts, server, door, leave)
    copies = Copies(parts.store.path, parts.desk.clock)
    timers.every(_LOOK_FOR_COPIES_EVERY, copies.daily)
    copying = asyncio.create_task(copies.at_start(), name="copy")
    try:
        timers.start()
        serving = asyncio.create_task(server.serve([listening]), name="serve")
        gpus = f"simulating {settings.simulate}" if settings.simulate else "on real GPUs"
        _log.info("ready on %s, %s; %d jobs found again", settings.socket, gpus, recovered)
        reload = Reload(parts, sampling, notifier, read_again)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        notifier.ready(standing(parts))
        await serving
    finally:
        granting.cancel()
        timers.stop()
        await asyncio.gather(granting, copying, return_exceptions=True)
        listening.close()
        door.close()


async def _recover(parts: Parts) -> int:
    """Find the jobs on record again; return how many hold memory.

    Raises:
        StateUnwritable: the record cannot be written now.
    """
    try:
        await parts.holding.ladder.ask(await parts.keeper.look())
        await parts.holding.recover(parts.keeper)
        recovered = parts.keeper.followers.recover()
        await parts.askers.recover()
        # Ready means that it can grant: one whole pass, on disk, before the first caller is heard.
        await parts.keeper.one_pass()
    except RecordUnwritable as error:
        raise StateUnwritable(error.message, error.hint) from error
    return recovered


async def _grant_for_ever(parts: Parts, notifier: Notifier) -> None:
    """Run the loop; a pass that failed (a full disk, say) is tried again, and told.

    What has a name is no reason for a watchdog to kill the daemon: a new one would meet the same.
    What has none is a bug, and if it lasts then starting anew is the mend to try.
    """
    complaint, said_at_s, loop = "", 0.0, asyncio.get_running_loop()
    while True:
        try:
            await parts.keeper.run(notifier.rest_s, lambda: notifier.alive(standing(parts)))
        except GpuleaseError as error:
            # A disk may be full for a night: once a minute is often enough to be found.
            if error.message != complaint or loop.time() - said_at_s > _SAY_AGAIN_AFTER_S:
                _log.warning("%s; trying again", error.message)
                complaint, said_at_s = error.message, loop.time()
            notifier.alive(f"{error.message}; trying again")
        except Exception:  # noqa: BLE001  whatever it was, leases must go on being granted
            _log.exception("cannot grant at this moment; trying again")
        await asyncio.sleep(_TRY_AGAIN_AFTER_S)
        parts.keeper.wake()


def _uvicorn(parts: Parts) -> uvicorn.Config:
    return uvicorn.Config(
        build_api(parts.desk),
        http=PeerProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_LEAVE_CONNECTIONS_AFTER_S,
    )


def _timers(
    parts: Parts, server: _Server, door: Door, leave: asyncio.Event
) -> tuple[Timers, Timer]:
    """Return the timers, and the one of them whose pace is a setting."""
    timers, settings = Timers(), parts.settings
    timers.every(_LOOK_AT_THE_DOOR_EVERY, door.look)
    sampling = timers.every(settings.sample_every, parts.sampler.sample)
    timers.every(_WRITE_SAMPLES_EVERY, parts.sampler.write)
    timers.every(_THIN_EVERY, parts.sampler.thin)
    tidier = Tidier(
        parts.state, parts.store, lambda: parts.settings, parts.desk.clock, parts.lanes[0]
    )
    timers.every(_SHED_OUTPUT_EVERY, tidier.shed_output)
    timers.every(_TIDY_EVERY, tidier.remove_what_is_old)
    if settings.leave_when_idle is not None:
        _leave_when_idle(timers, settings.leave_when_idle, parts, server, door, leave)
    return timers, sampling


def _leave_when_idle(
    timers: Timers, span: timedelta, parts: Parts, server: _Server, door: Door, leave: asyncio.Event
) -> None:
    watch = IdleWatch(parts.keeper, parts.desk.clock, lambda: len(server.server_state.connections))

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
