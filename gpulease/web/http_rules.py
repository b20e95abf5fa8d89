"""What holds for every request: methods that read, known names, the base, security headers."""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class HttpRules:
    """Refuses what may not be asked, removes the base from paths, and adds the headers."""

    def __init__(self, app: ASGIApp, base: str, names: Collection[str] | None) -> None:
        """`names` are those by which browsers may know this machine, None for any name."""
        self._app = app
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
        if scope["method"] not in _READS:
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
