"""The web application: its routes, and what a browser gets when something fails."""

from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.http_rules import HttpRules
from gpulease.web.live import LiveStatus

_HERE = Path(__file__).parent


def routes(daemon: DaemonReader, live: LiveStatus) -> list[BaseRoute]:
    """Return what is served, below the base."""
    return [
        Mount("/static", StaticFiles(directory=_HERE / "static")),
    ]


def build(daemon: DaemonReader, live: LiveStatus, base: str = "") -> ASGIApp:
    """Return the application; `base` is the path of the proxy that it leaves in requests."""
    return HttpRules(Starlette(routes=routes(daemon, live)), base)
