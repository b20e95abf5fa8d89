"""Notifications to systemd by sd_notify(3), and the status line of `systemctl status`.

The scheduler's passes feed the watchdog. A separate timer would feed it even while the scheduler
grants nothing any more.
"""

import contextlib
import socket
import time
from collections.abc import Mapping

from gpulease.daemon.app import DaemonApp
from gpulease.units import counted

REST_S = 5.0
"""The longest time between two passes of the scheduler, unless a watchdog needs a shorter one."""


class Notifier:
    """Notifies the service manager that started this daemon, if one did."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """`address` is the socket of the manager; `watchdog_s` its timeout."""
        self._address = address
        self._watched = watchdog_s is not None
        self._status = ""
        self.rest_s = REST_S if watchdog_s is None else min(REST_S, watchdog_s / 4)
        """The longest time between two passes: some may fail before the watchdog expires."""

    @classmethod
    def of(cls, environment: Mapping[str, str], pid: int) -> "Notifier":
        """Read the variables that systemd sets; a watchdog of another process is not ours."""
        span = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID") in (None, str(pid))
        watchdog_s = int(span) / 1e6 if ours and span.isdecimal() and int(span) else None
        return cls(environment.get("NOTIFY_SOCKET"), watchdog_s)

    @property
    def is_heard(self) -> bool:
        """Whether a service manager started this daemon."""
        return bool(self._address)

    def waiting(self, status: str) -> None:
        """Report why the daemon is not ready yet."""
        self._send(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Report that callers are served, for the first time or after a reload."""
        self._status = status
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Report the start of a reload; `ready` reports its end."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def alive(self, status: str) -> None:
        """Feed the watchdog; only the scheduler calls this."""
        fields = ["WATCHDOG=1"] if self._watched else []
        if status != self._status:
            self._status = status
            fields.append(f"STATUS={status}")
        if fields:
            self._send(*fields)

    def stopping(self) -> None:
        """Report that the daemon stops."""
        self._send("STOPPING=1", "STATUS=stopping; running jobs continue")

    def _send(self, *fields: str) -> None:
        if not self._address:
            return
        # A leading @ means the NUL byte of an abstract address.
        given = self._address
        target = "\0" + given[1:] if given.startswith("@") else given
        message = "\n".join(field.replace("\n", " ") for field in fields)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            # A full socket must not block the scheduler.
            sender.setblocking(False)
            sender.sendto(message.encode(errors="replace"), target)


def status_line(app: DaemonApp) -> str:
    """Return the numbers of GPUs, of running jobs and of queued jobs."""
    seen, running = app.scheduler.seen, len(app.base.store.holding())
    readings = seen.readings if seen is not None else ()
    unread = sum(reading.fault is not None for reading in readings)
    queued = max(0, len(app.base.store.live()) - running)
    gpus = counted(len(readings), "simulated GPU" if app.base.is_simulated else "GPU")
    if unread:
        gpus += f" ({unread} cannot be read)"
    return f"{gpus}; {counted(running, 'job')} running, {queued} queued"
