"""The web application: its routes, and what a browser gets when something fails."""

from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.http_rules import HttpRules
from gpulease.web.live import LiveStatus
from gpulease.web.metrics import MetricsPage

_HERE = Path(__file__).parent


def routes(daemon: DaemonReader, live: LiveStatus, *, metrics_by_job: bool) -> list[BaseRoute]:
    """Return what is served, below the base."""
    return [
        Route("/metrics", MetricsPage(daemon, by_job=metrics_by_job).metrics),
        Mount("/static", StaticFiles(directory=_HERE / "static")),
    ]


def build(
    daemon: DaemonReader, live: LiveStatus, base: str = "", *, metrics_by_job: bool = False
) -> ASGIApp:
    """Return the application; `base` is the path of the proxy that it leaves in requests."""
    served = routes(daemon, live, metrics_by_job=metrics_by_job)
    return HttpRules(Starlette(routes=served), base)
