"""The scripts and styles of the page, read at the start: a sandbox may hide their files later."""

from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


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
