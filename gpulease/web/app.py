"""The web application: its routes, and what a browser gets when something fails."""

from collections.abc import Collection

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from gpulease.errors import GpuleaseError
from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.http_rules import HttpRules
from gpulease.web.live import LiveStatus
from gpulease.web.metrics import MetricsPage
from gpulease.web.pages import Pages, failed, not_found
from gpulease.web.static_files import static_file


def routes(daemon: DaemonReader, live: LiveStatus, *, metrics_by_job: bool) -> list[BaseRoute]:
    """Return what is served, below the base."""
    pages = Pages(daemon, live)
    return [
        Route("/", pages.now),
        Route("/events", live),
        Route("/queue", pages.queue),
        Route("/past", pages.past),
        Route("/jobs/{job}", pages.job),
        Route("/gpus/{gpu}", pages.gpu),
        Route("/people", pages.people),
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
) -> ASGIApp:
    """Return the application.

    Args:
        daemon: what is asked.
        live: the live view.
        base: the path of the proxy that it leaves in requests.
        names: those by which browsers may know this machine; None: any.
        metrics_by_job: whether the metrics have series for each job.
    """
    served = routes(daemon, live, metrics_by_job=metrics_by_job)
    app = Starlette(routes=served, exception_handlers={GpuleaseError: failed, 404: not_found})
    # It would redirect to a path without the base, and by http behind a proxy that has https.
    app.router.redirect_slashes = False
    return HttpRules(app, base, names)
