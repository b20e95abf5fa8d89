"""Notifications of the daemon: the parts that send them, and what admins are notified of.

Admins are notified when a GPU is drained or resumed, when the daemon logs an error or cannot write
its database, and when it starts after a crash.
"""

import asyncio
import logging
import pwd
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from gpulease.config import environment
from gpulease.daemon.accounting import LogTail
from gpulease.daemon.foundation import Foundation
from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.domain.health import GpuAvailability
from gpulease.domain.notifications import about_gpu, about_trouble
from gpulease.errors import RecordUnwritable
from gpulease.host.launcher import Launcher
from gpulease.host.notification_sender import NotificationSender
from gpulease.host.process_watch import run_of_system
from gpulease.service.notification_delivery import PAUSES, NotificationDelivery
from gpulease.service.notifications import JobDetails
from gpulease.service.ports import Transaction
from gpulease.store.notifications import Notifications

_log = logging.getLogger(__name__)

_DIRECTORY = "notifications"
_RUNNING = "running"
"""A file with the run of the system, which a daemon that stops removes."""
_OF_THE_DISK = "gpulease.daemon.worker_threads"
"""Logs as warnings that the database cannot be written: that may pass, but no job starts."""
_MOST_TROUBLES = 20
_TRY_AGAIN_S = 5.0


class AdminNotices:
    """Stores messages to the admins of the settings."""

    def __init__(self, base: Foundation) -> None:
        self._base = base
        self._uids: tuple[int, ...] = ()
        self._troubles: deque[str] = deque(maxlen=_MOST_TROUBLES)
        self._has_troubles = asyncio.Event()
        self.adopt(base.settings().notify)

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Use these settings from now on."""
        self._uids = tuple(_uids(settings.get("admins", ())))

    def of_gpu(
        self, tx: Transaction, label: str, before: GpuAvailability, after: GpuAvailability
    ) -> None:
        """Store messages if a GPU was drained or resumed."""
        now = self._base.clock.now()
        found = [about_gpu(uid, label, before, after) for uid in self._uids]
        tx.add_messages([(message, now) for message in found if message is not None])

    def of_trouble(self, what: str) -> None:
        """Store messages as soon as the database can be written."""
        if self._uids:
            self._troubles.append(what)
            self._has_troubles.set()

    async def run(self) -> None:
        """Store the messages about troubles, without end."""
        while True:
            await self._has_troubles.wait()
            self._has_troubles.clear()
            while self._troubles:
                try:
                    await self._base.writer(partial(self._store, self._troubles[0]))
                    self._troubles.popleft()
                except RecordUnwritable:
                    await asyncio.sleep(_TRY_AGAIN_S)

    def _store(self, what: str) -> None:
        now = self._base.clock.now()
        with self._base.store.write() as tx:
            tx.add_messages([(about_trouble(uid, what), now) for uid in self._uids])


def _uids(names: tuple[str, ...]) -> Iterator[int]:
    for name in names:
        try:
            yield pwd.getpwnam(name).pw_uid
        except (KeyError, ValueError):
            _log.warning("the settings: [notify] admins: no user named %r", name)


class _TroubleLog(logging.Handler):
    """Passes on what the daemon logs about troubles, from any thread."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify = notify
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.name == _OF_THE_DISK:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._notify, record.getMessage())


class DaemonNotifications:
    """The notifications of one daemon, from `start` to `close`."""

    def __init__(
        self,
        base: Foundation,
        launcher: Launcher,
        readings: Callable[[], Mapping[GpuUuid, GpuReading]],
        *,
        as_other_users: bool,
    ) -> None:
        self.admins = AdminNotices(base)
        details = JobDetails(
            base.store, lambda: base.settings().smallest_lease, readings, LogTail(base.state.job).of
        )
        self.sender = NotificationSender(
            launcher,
            base.state.path / _DIRECTORY,
            environment(),
            as_other_users=as_other_users,
            details=details.of,
        )
        self.delivery = NotificationDelivery(
            Notifications(base.store), self.sender, base.clock, base.writer, PAUSES
        )
        self._base = base
        self._running = base.state.path / _RUNNING
        self._trouble_log = _TroubleLog(self.admins.of_trouble)

    async def run(self) -> None:
        """Send notifications until cancelled."""
        loop = asyncio.get_running_loop()

        def announced() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.delivery.wake)

        self._base.store.announced = announced
        logging.getLogger("gpulease").addHandler(self._trouble_log)
        await asyncio.to_thread(self._note_start)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.admins.run(), name="notify admins")
            tasks.create_task(self.delivery.run(), name="notify")

    def _note_start(self) -> None:
        """Notify admins if the last daemon did not stop."""
        with suppress(OSError):
            before = self._running.read_text() if self._running.exists() else None
            self._running.write_text(run_of_system())
            if before == run_of_system():
                self.admins.of_trouble("gpuleased was started again after it crashed or was killed")
            elif before is not None:
                self.admins.of_trouble("the machine went down without stopping gpuleased")

    def close(self) -> None:
        """Note that the daemon stops."""
        logging.getLogger("gpulease").removeHandler(self._trouble_log)
        with suppress(OSError):
            self._running.unlink(missing_ok=True)
