"""The receivers of notifications: a command, and what Apprise knows.

A reason why a message could not be sent may be shown to others, so it contains nothing of the
user's file. What programs print is the output, which only the user sees.
"""

import hashlib
import importlib.util
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from gpulease.daemon_packages import install_hint
from gpulease.notifications.settings import NotifySettings
from gpulease.wire.notifications import NotificationOrder

_MOST_OUTPUT = 4000
"""Bytes of the output of a program."""


class NotSent(Exception):
    """A receiver did not take the message; the text says why, without secrets."""

    def __init__(
        self, why: str, hint: str | None = None, *, is_final: bool = False, output: str = ""
    ) -> None:
        super().__init__(why)
        self.hint = hint
        self.is_final = is_final
        self.output = output


class Receiver(Protocol):
    """Takes messages."""

    @property
    def name(self) -> str:
        """A name without secrets."""

    @property
    def key(self) -> str:
        """What identifies it in later attempts, without secrets."""

    def send(self, order: NotificationOrder, within_s: float) -> str:
        """Send a message, and return the output of the program that did it.

        Raises:
            NotSent: it did not take the message.
        """


def receivers_of(settings: NotifySettings) -> Sequence[Receiver]:
    """Return the receivers of a user."""
    found: list[Receiver] = []
    if settings.command:
        found.append(_Command(settings.command))
    found += [_Url(number, url) for number, url in enumerate(settings.urls, 1)]
    return found


def title_of(order: NotificationOrder) -> str:
    """Return the title of a message, which begins with the name of this machine."""
    return f"{os.uname().nodename}: {order.title}"


def text_of(order: NotificationOrder) -> str:
    """Return the text of a message."""
    text = f"{order.body}\n{order.details}".rstrip()
    return f"{text}\n{order.link}" if order.link else text


_KINDS = {
    "fail": "failure",
    "oom": "failure",
    "daemon-trouble": "failure",
    "over-lease": "warning",
    "idle": "warning",
    "time-left": "warning",
    "gpu-drained": "warning",
    "gpu-resumed": "success",
}
"""Apprise's types of messages, by which services choose a priority or a colour."""


def kind_of(order: NotificationOrder) -> str:
    """Return the type of a message as Apprise has it: a failed job is a failure."""
    if order.failed is not None:
        return "failure" if order.failed else "success"
    return _KINDS.get(order.event, "info")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True)
class _Command:
    """The user's command: it reads the message from its standard input."""

    argv: tuple[str, ...]
    name: str = "command"

    @property
    def key(self) -> str:
        return _digest("command", *self.argv)

    def send(self, order: NotificationOrder, within_s: float) -> str:
        variables = {
            "GPULEASE_EVENT": order.event,
            "GPULEASE_JOB": "" if order.job is None else str(order.job),
            "GPULEASE_TITLE": title_of(order),
        }
        home = os.environ.get("HOME", "/")
        # A file, and no pipe: what the command leaves behind may keep its output open.
        with tempfile.TemporaryFile() as output:
            to = output if order.verbose else subprocess.DEVNULL
            try:
                process = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.PIPE,
                    stdout=to,
                    stderr=to,
                    cwd=home if Path(home).is_dir() else "/",
                    env={**os.environ, **variables},
                    start_new_session=True,
                )
                text = f"{title_of(order)}\n\n{text_of(order)}\n"
                process.communicate(text.encode(), within_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise NotSent(f"no end within {within_s:.0f}s", output=_end_of(output)) from None
            except OSError as error:
                hint = f"set command in [notify] to a program, instead of {self.argv[0]}"
                raise NotSent(f"its program cannot be run: {error.strerror}", hint) from error
            if status := process.returncode:
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                raise NotSent(how, output=_end_of(output))
            return _end_of(output)


def _end_of(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _MOST_OUTPUT))
    return output.read().decode(errors="replace")


@dataclass(frozen=True)
class _Url:
    """A service that Apprise knows, by its URL, which contains secrets."""

    number: int
    url: str

    @property
    def name(self) -> str:
        scheme = self.url.partition("://")[0]
        return f"url {self.number} ({scheme})" if scheme.isalnum() else f"url {self.number}"

    @property
    def key(self) -> str:
        return _digest("url", self.url)

    def send(self, order: NotificationOrder, within_s: float) -> str:
        if importlib.util.find_spec("apprise") is None:
            raise NotSent(
                "Apprise is not installed",
                install_hint("daemon", "notify"),
                is_final=True,
            )
        import apprise

        # It waits 4 seconds for an answer, and a slow service would get the message twice.
        apprise.URLBase.socket_read_timeout = within_s
        with _log_of_apprise() as log:
            service = apprise.Apprise()
            if not service.add(self.url):
                services = "see https://appriseit.com/services for the URL of your service"
                raise NotSent(
                    "Apprise cannot use the URL", services, is_final=True, output=log.text
                )
            # The body's format is named, or a service that takes HTML runs the lines together.
            if not service.notify(
                title=title_of(order),
                body=text_of(order),
                body_format=apprise.NotifyFormat.TEXT,
                notify_type=getattr(apprise.NotifyType, kind_of(order).upper()),
            ):
                why = "Apprise could not send it"
                where = None if order.verbose else "gpulease notify --test shows what Apprise says"
                raise NotSent(why, where, output=log.text)
            return log.text


_log_here: ContextVar["_Log | None"] = ContextVar("_log_here", default=None)
"""That of the receiver that is served. Apprise copies the context into its threads."""


class _Log(logging.Handler):
    """Keeps what Apprise logs about one receiver; others are served at the same time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if _log_here.get() is self:
            self._lines.append(record.getMessage())

    @property
    def text(self) -> str:
        return "\n".join(self._lines)[-_MOST_OUTPUT:]


@contextmanager
def _log_of_apprise() -> Iterator[_Log]:
    log, handler = logging.getLogger("apprise"), _Log()
    before = _log_here.set(handler)
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        _log_here.reset(before)
