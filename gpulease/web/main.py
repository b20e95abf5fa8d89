"""The command `gpulease-web`: reads arguments, listens, and serves the web page until a signal."""

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpulease import config
from gpulease.build import described
from gpulease.client import Client
from gpulease.client.discovery import has_daemon
from gpulease.client.unix_socket import trusted_users
from gpulease.errors import BadConfiguration, BadUsage, GpuleaseError
from gpulease.web.app import build
from gpulease.web.daemon_reader import ANSWER_WITHIN_S, DaemonReader
from gpulease.web.live import MOST_LISTENERS, LiveStatus

_log = logging.getLogger("gpulease.web")
_DEFAULT = "127.0.0.1:8080"
_OTHER_CONNECTIONS = 500
_UNACKNOWLEDGED_MS = 30_000
"""Time without an acknowledgement after which the kernel drops a connection and its buffers."""
_ENDS_WITHIN_S = 5
_LARGEST_PORT = 65535
_BACKLOG = 256
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
        """Read a part of a request. No request has a body: what follows a head begins the next."""
        if self._deadline is None:
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
    daemon = DaemonReader(_client(given.socket))
    live = LiveStatus(daemon, most=given.most_listeners)
    with contextlib.closing(listen(given.listen)) as listening, contextlib.closing(daemon):
        names = {socket.gethostname().lower(), *given.host} if _is_on_loopback(listening) else None
        base = _base(given.base)
        app = build(daemon, live, base, names, metrics_by_job=given.metrics_jobs)
        settings = uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", access_log=False,
            server_header=False, log_config=None, proxy_headers=False,
            timeout_graceful_shutdown=_ENDS_WITHIN_S,
            limit_concurrency=given.most_listeners + _OTHER_CONNECTIONS,
        )  # fmt: skip
        _log.info("serving %s for the daemon on %s", _shown(listening), daemon.path)
        _Server(settings, live).run(sockets=[listening])


def _is_on_loopback(listening: socket.socket) -> bool:
    is_unix = listening.family == socket.AF_UNIX
    return not is_unix and ipaddress.ip_address(listening.getsockname()[0]).is_loopback


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


def listen(address: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT, [HOST]:PORT or unix:PATH.

    Raises:
        BadUsage: that is no address.
        GpuleaseError: nothing can listen there.
    """
    try:
        if address.startswith("unix:"):
            return _listen_on_path(Path(address.removeprefix("unix:")))
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > _LARGEST_PORT:
            raise BadUsage(
                f"cannot listen on {address!r}: it is not an address",
                "--listen 127.0.0.1:8080, --listen [::1]:8080, --listen unix:/path",
            )
        return _listen_on_port(host.strip("[]"), int(port))
    except OSError as error:
        raise GpuleaseError(
            f"cannot listen on {address}: {error.strerror or error}",
            "--listen names another address",
        ) from error


def _listen_on_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # Connections inherit it. It ends those to browsers that stopped reading, too.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    return listening


def _listen_on_path(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    if path.is_socket():
        path.unlink()  # of a process that was killed
    try:
        listening.bind(str(path))
        path.chmod(0o666)  # its directory decides who may connect; a port is open to all as well
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _shown(listening: socket.socket) -> str:
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


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
    parser.add_argument("--version", action="version", version=f"gpulease-web {described()}")
    return parser
