"""The daemon's part of notifications, built and run."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpulease.config import environment
from gpulease.host.launcher import Launcher
from gpulease.host.process_finder import run_of_system
from gpulease.notifications.messages import AdminNotices, JobDetails, TroubleLog
from gpulease.notifications.outbox import Outbox
from gpulease.notifications.sender import Program, Sending
from gpulease.service.ports import Clock, InThread
from gpulease.store.store import SqlStore

_RUNNING = "running"
"""A file with the run of the system, which a daemon that stops removes."""


class DaemonNotifications:
    """The notifications of one daemon, from `start` to `close`."""

    def __init__(
        self,
        store: SqlStore,
        clock: Clock,
        in_writer: InThread,
        state: Path,
        launcher: Launcher,
        details: JobDetails,
        settings: Mapping[str, Any],
        *,
        as_other_users: bool,
        page: Callable[[], str | None],
    ) -> None:
        """`state` is the state directory. `settings` is [notify] of the daemon.

        `page` returns the address of the web page.
        """
        self.admins = AdminNotices(store, clock, in_writer, settings)
        self.program = Program(
            launcher,
            state / "notifications",
            environment(),
            as_other_users=as_other_users,
            details=details.of,
            address=page,
        )
        self.outbox = Outbox(store)
        self.sending = Sending(self.outbox, self.program, clock, in_writer)
        self._store = store
        self._running = state / _RUNNING
        self._trouble_log = TroubleLog(self.admins.of_trouble)

    async def run(self) -> None:
        """Send notifications until cancelled."""
        loop = asyncio.get_running_loop()

        def announced() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.sending.wake)

        self._store.announced = announced
        logging.getLogger("gpulease").addHandler(self._trouble_log)
        await asyncio.to_thread(self._note_start)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.admins.run(), name="notify admins")
            tasks.create_task(self.sending.run(), name="notify")

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
