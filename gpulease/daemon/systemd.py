"""What the daemon tells systemd: sd_notify(3), spoken by hand since it is one datagram.

The watchdog is fed by what the daemon is there for: a pass of the loop that grants. A timer beside
that loop would go on ticking while nothing is granted any more.

How the daemon stands, in the one line that `systemctl status` shows.
"""

import contextlib
import socket
import time
from collections.abc import Mapping

from gpulease.daemon.app import DaemonApp
from gpulease.domain.lease import State

REST_S = 5.0
"""How long the loop that grants rests at most, where no watchdog asks for less."""


class Notifier:
    """Speaks to the service manager that started this daemon; to nobody if none did."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """`address` is where the manager listens; `watchdog_s` how long it bears silence."""
        self._address = address
        self._watched = watchdog_s is not None
        self._status = ""
        self.rest_s = REST_S if watchdog_s is None else min(REST_S, watchdog_s / 4)
        """How long the loop may rest between two passes: some may fail and it still lives."""

    @classmethod
    def of(cls, environment: Mapping[str, str], pid: int) -> "Notifier":
        """Read what systemd passes on to its services; a watchdog meant for another is not ours."""
        span = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID") in (None, str(pid))
        watchdog_s = int(span) / 1e6 if ours and span.isdecimal() and int(span) else None
        return cls(environment.get("NOTIFY_SOCKET"), watchdog_s)

    @property
    def is_heard(self) -> bool:
        """Whether there is a service manager."""
        return bool(self._address)

    def waiting(self, status: str) -> None:
        """Tell why it is not ready yet."""
        self._send(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Tell that callers are served, for the first time or again."""
        self._status = status
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Tell that the settings are read anew; `ready` ends it."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def alive(self, status: str) -> None:
        """Feed the watchdog; to be called by the loop that grants, and by nothing else."""
        fields = ["WATCHDOG=1"] if self._watched else []
        if status != self._status:
            self._status = status
            fields.append(f"STATUS={status}")
        if fields:
            self._send(*fields)

    def stopping(self) -> None:
        """Tell that the daemon is on its way out."""
        self._send("STOPPING=1", "STATUS=leaving; running jobs go on")

    def _send(self, *fields: str) -> None:
        if not self._address:
            return
        # A leading @ stands for the NUL byte of an abstract address.
        given = self._address
        target = "\0" + given[1:] if given.startswith("@") else given
        message = "\n".join(field.replace("\n", " ") for field in fields)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            # Full, it would hold up the loop that grants.
            sender.setblocking(False)
            sender.sendto(message.encode(errors="replace"), target)


def status_line(parts: DaemonApp) -> str:
    """Return what is granted, what waits and what cannot be read, in a line."""
    seen, live = parts.keeper.seen, parts.store.live()
    readings = seen.readings if seen is not None else ()
    unread = sum(reading.fault is not None for reading in readings)
    waiting = sum(job.state is State.QUEUED for job in live)
    gpus = _count(len(readings), "simulated GPU" if parts.settings.simulate else "GPU")
    if unread:
        gpus += f" ({unread} cannot be read)"
    return f"{gpus}; {_count(len(live) - waiting, 'job')} running, {waiting} waiting"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
