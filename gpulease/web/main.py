"""The command `gpulease-web`: reads arguments, listens, and serves the web page until a signal."""

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gpulease import config
from gpulease.build import described
from gpulease.client import Client
from gpulease.client.discovery import has_daemon
from gpulease.client.unix_socket import trusted_users
from gpulease.errors import BadConfiguration, BadUsage, GpuleaseError
from gpulease.web.app import build
from gpulease.web.daemon_reader import ANSWER_WITHIN_S, DaemonReader
from gpulease.web.listening import (
    is_on_loopback,
    is_passed,
    listen,
    listen_for_own,
    shown,
    ssh_line,
    user_of_peer,
)
from gpulease.web.live import MOST_LISTENERS, LiveStatus

_log = logging.getLogger("gpulease.web")
_DEFAULT = "127.0.0.1:8080"
_OTHER_CONNECTIONS = 500
_ENDS_WITHIN_S = 5
_LARGEST_HEAD = 64 * 1024
"""Bytes of a request's line and headers."""
_EXAMPLES = """\
examples:
  gpulease-web                          serve http://127.0.0.1:8080/
  gpulease-web --listen [::1]:9000      listen on another address
  gpulease-web --listen unix:/run/gpulease-web/socket --base /gpulease
                                        serve a reverse proxy that forwards /gpulease/
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve the web page; exit with 0 at its end, 2 or 78 for bad arguments or settings."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        given = _parser().parse_args(arguments)
        if not given.own_jobs:
            _refuse_root()
        _serve(given)
    except GpuleaseError as error:
        sys.stderr.write(error.text() + "\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _refuse_root() -> None:
    # Anyone who reaches the port would talk to a process of root.
    if os.geteuid() == 0:
        raise BadConfiguration(
            "cannot start gpulease-web as root: it serves the network, and needs no rights",
            "setpriv --reuid nobody --regid nogroup --clear-groups gpulease-web ...",
        )


class BoundedProtocol(HttpToolsProtocol):
    """A browser's connection, which is closed if the head of a request is late or too large.

    uvicorn waits for it without limit. Those who open connections and send nothing would keep all
    others out, since `limit_concurrency` counts them.
    """

    head_within_s: ClassVar[float] = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request its deadline."""
        super().connection_made(transport)
        self._unparsed = 0
        """Bytes received of an incomplete head."""
        self._deadline: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request; what follows one that is answered begins the next."""
        cycle: RequestResponseCycle | None = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if self._deadline is None and is_answered:
            self._await_head()
        self._unparsed += len(data)
        super().data_received(data)
        if self._deadline is not None and self._unparsed > _LARGEST_HEAD:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """Serve a request with a complete head."""
        self._end_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._unparsed = 0
        self._deadline = self.loop.call_later(self.head_within_s, self.transport.abort)

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None


class OwnProtocol(BoundedProtocol):
    """A connection to a page that acts as its user: on a port, only this user is let in."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection of another user."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_INET and user_of_peer(connection) != os.geteuid():
            transport.abort()


class _Server(uvicorn.Server):
    """A server that ends its event streams first, since it waits for all responses to end."""

    def __init__(self, settings: uvicorn.Config, live: LiveStatus) -> None:
        super().__init__(settings)
        self._live = live

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _notify("READY=1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        _notify("STOPPING=1")
        self._live.close()
        await super().shutdown(sockets)


def _serve(given: argparse.Namespace) -> None:
    acts = given.own_jobs
    daemon = DaemonReader(_client(given.socket), is_private=acts)
    live = LiveStatus(daemon, most=given.most_listeners)
    made = listen_for_own(on_port=given.open) if acts else listen(given.listen)
    with contextlib.closing(made) as listening, contextlib.closing(daemon):
        # A page that acts has no other name than those that were given, also behind an ssh that
        # listens on loopback somewhere else.
        is_named = acts or is_on_loopback(listening)
        names = {socket.gethostname().lower(), *given.host} if is_named else None
        base = _base(given.base)
        app = build(daemon, live, base, names, metrics_by_job=given.metrics_jobs, acts=acts)
        settings = uvicorn.Config(
            app, http=OwnProtocol if acts else BoundedProtocol, ws="none", lifespan="off",
            access_log=False, server_header=False, log_config=None, proxy_headers=False,
            timeout_graceful_shutdown=_ENDS_WITHIN_S,
            limit_concurrency=given.most_listeners + _OTHER_CONNECTIONS,
        )  # fmt: skip
        if acts and not is_passed():
            _introduce(listening, opens=given.open)
        else:
            _log.info("serving %s for the daemon on %s", shown(listening), daemon.path)
        _Server(settings, live).run(sockets=[listening])


def _introduce(listening: socket.socket, *, opens: bool) -> None:
    """Say how the user's browser gets here, and open one on this machine if that was asked."""
    if not opens:
        say = (
            f"on your own machine: {ssh_line(listening.getsockname())}\n"
            "in its browser:      http://localhost:8080/\n"
        )
    else:
        say = f"in a browser of this machine: {shown(listening)}\n"
        # Some browsers run in the terminal, or until they are closed.
        threading.Thread(target=webbrowser.open, args=(shown(listening),), daemon=True).start()
    sys.stdout.write(f"{say}Only you can connect. Ctrl-C ends it.\n")
    sys.stdout.flush()


def _client(given: Path | None) -> Client:
    """Return a client of the daemon, which need not run yet."""
    candidates = config.candidate_sockets(given)
    if len(candidates) == 1:
        return Client(candidates[0], answer_within=ANSWER_WITHIN_S)
    system, personal = candidates
    path = personal if personal.exists() and not has_daemon() else system
    return Client(path, trusted=trusted_users(), answer_within=ANSWER_WITHIN_S)


def _base(given: str) -> str:
    base = given.rstrip("/")
    if base and not base.startswith("/"):
        raise BadUsage(f"cannot use the base {given!r}: it is not a path", "--base /gpulease")
    return base


def _notify(message: str) -> None:
    """Notify the service manager that started this process, if one did; see sd_notify(3)."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        target = "\0" + address[1:] if address.startswith("@") else address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(message.encode(), target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpulease-web",
        description="Serve a web page about this machine's GPUs, jobs and queue. It changes "
        "nothing, and shows what any user of the machine may see.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--listen", default=_DEFAULT, metavar="ADDRESS",
        help=f"HOST:PORT, [HOST]:PORT or unix:PATH (default {_DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--socket", type=Path, metavar="PATH",
        help="the daemon's Unix socket (default: GPULEASE_SOCKET, the machine's, or your own)",
    )  # fmt: skip
    parser.add_argument(
        "--base", default="", metavar="PATH",
        help="path under which a reverse proxy serves the page, if it leaves it in requests",
    )  # fmt: skip
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME",
        help="another name that browsers use for a page on loopback; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--most-listeners", type=int, default=MOST_LISTENERS, metavar="N",
        help=f"browsers that may follow the machine at once (default {MOST_LISTENERS})",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-jobs", action="store_true",
        help="add the memory of each job to /metrics, as /metrics?jobs=1 does for one request: "
        "many series, since each job has its own",
    )  # fmt: skip
    # For `gpulease web`, whose help has them.
    parser.add_argument("--own-jobs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--open", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"gpulease-web {described()}")
    return parser
