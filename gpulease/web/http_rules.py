"""What holds for every response: reading only, no scripts but ours, and the path of the proxy."""

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_READS = ("GET", "HEAD")
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
    """Refuses methods that write, removes the base from paths, and adds the headers."""

    def __init__(self, app: ASGIApp, base: str) -> None:
        self._app = app
        self._base = base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        app = self._app if scope["method"] in _READS else _refusal
        await app(self._without_base(scope), receive, send_with_headers)

    def _without_base(self, scope: Scope) -> Scope:
        """Remove the base, which some proxies remove themselves."""
        path = scope["path"]
        if self._base and path.startswith(f"{self._base}/"):
            return {**scope, "path": path[len(self._base) :], "raw_path": None}
        return scope


_refusal = PlainTextResponse(
    "cannot change anything here: this page only reads\n", 405, {"allow": ", ".join(_READS)}
)
