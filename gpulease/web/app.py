"""The web application: its routes, its scripts and styles, and what holds for every request."""

import ipaddress
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease.errors import GpuleaseError
from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.live import LiveStatus
from gpulease.web.metrics import MetricsPage
from gpulease.web.own_jobs import OwnJobs
from gpulease.web.pages import Pages, failed, not_found

_READS = ("GET", "HEAD")
_LONGEST_PATH = 1000
HEADERS = {
    # No inline script or style, no other origin, no form, no frame.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Without any referrer, a form of the page itself would be sent with "Origin: null".
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def routes(
    pages: Pages, daemon: DaemonReader, live: LiveStatus, *, metrics_by_job: bool
) -> list[BaseRoute]:
    """Return what is served, below the base."""
    return [
        Route("/", pages.now),
        Route("/events", live),
        Route("/find", pages.find),
        Route("/jobs", pages.jobs),
        Route("/past", pages.past),
        Route("/jobs/{job}", pages.job),
        Route("/gpus/{gpu}", pages.gpu),
        Route("/people", pages.people),
        Route("/users/{user:path}", pages.user),
        Route("/health", pages.health),
        Route("/metrics", MetricsPage(daemon, by_job=metrics_by_job).metrics),
        Route("/static/{name}", static_file),
    ]


def build(
    daemon: DaemonReader,
    live: LiveStatus,
    base: str = "",
    names: Collection[str] | None = None,
    *,
    metrics_by_job: bool = False,
    acts: bool = False,
) -> ASGIApp:
    """Return the application.

    Args:
        daemon: what is asked.
        live: the live view.
        base: the path of the proxy that it leaves in requests.
        names: those by which browsers may know this machine; None: any.
        metrics_by_job: whether the metrics have series for each job.
        acts: whether this page is for the user of this process alone, who can act on jobs there.
    """
    pages = Pages(daemon, live)
    served = routes(pages, daemon, live, metrics_by_job=metrics_by_job)
    if acts:
        own = OwnJobs(pages, daemon.path)
        pages.actions_on, pages.own_user = own.actions, own.user
        served += own.routes()
    app = Starlette(routes=served, exception_handlers={GpuleaseError: failed, 404: not_found})
    # It would redirect to a path without the base, and by http behind a proxy that has https.
    app.router.redirect_slashes = False
    return HttpRules(app, base, names, (*_READS, "POST") if acts else _READS)


class HttpRules:
    """Refuses what may not be asked, removes the base from paths, and adds the headers."""

    def __init__(
        self, app: ASGIApp, base: str, names: Collection[str] | None, methods: Collection[str]
    ) -> None:
        """`names` are those by which browsers may know this machine, None for any name."""
        self._app = app
        self._methods = methods
        self._base = base
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._application(scope)(self._without_base(scope), receive, send_with_headers)

    def _application(self, scope: Scope) -> ASGIApp:
        if scope["method"] not in self._methods:
            return _NO_WRITES
        if len(scope["path"]) > _LONGEST_PATH:
            return _TOO_LONG
        asked = Headers(scope=scope).get("host", "")
        if self._names is not None and not is_known(asked, self._names):
            return _NO_SUCH_NAME
        if self._base and scope["path"] == self._base:
            return RedirectResponse(f"{self._base}/")
        return self._app

    def _without_base(self, scope: Scope) -> Scope:
        """Remove the base, which some proxies remove themselves."""
        path = scope["path"]
        if self._base and path.startswith(f"{self._base}/"):
            return {**scope, "path": path[len(self._base) :], "raw_path": None}
        return scope


def is_known(host: str, names: Collection[str]) -> bool:
    """Tell whether a Host header has an address, or a name of this machine.

    The site of an attacker can have its own name point here, and so have browsers read for it what
    listens on loopback (DNS rebinding). An address in the header cannot be such a name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names or name == "localhost" or name.endswith(".localhost")
    return True


_NO_WRITES = PlainTextResponse(
    "cannot change anything here: this page only reads\n", 405, {"allow": ", ".join(_READS)}
)
_TOO_LONG = PlainTextResponse("cannot find this page: its path is too long\n", 414)
_NO_SUCH_NAME = PlainTextResponse(
    "cannot serve this name: on loopback, gpulease-web answers to localhost, addresses and the "
    "name of this machine\n\nhint: start gpulease-web with --host NAME\n",
    421,
)


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


def _read(path: Path) -> _File:
    content = path.read_bytes()
    headers = {
        "content-type": f"{_TYPES[path.suffix]}; charset=utf-8",
        # Browsers ask each time, and get an empty answer until an upgrade.
        "cache-control": "no-cache",
        "etag": f'"{sha256(content).hexdigest()[:20]}"',
    }
    return _File(content, headers)


_FILES = {
    path.name: _read(path)
    for path in (Path(__file__).parent / "static").iterdir()
    if path.suffix in _TYPES
}


async def static_file(request: Request) -> Response:
    """Return a script or style."""
    found = _FILES.get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    if request.headers.get("if-none-match") == found.headers["etag"]:
        return Response(status_code=304, headers=found.headers)
    return Response(found.content, headers=found.headers)
