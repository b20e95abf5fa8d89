"""What the daemon's parts have counted since its start, and its own health, as a wire object."""

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from gpulease import __version__
from gpulease.domain.job import Outcome
from gpulease.domain.lease import State
from gpulease.domain.snapshot import capacity
from gpulease.notifications.app import DaemonNotifications
from gpulease.server.listener import ConnectionCounts
from gpulease.server.view_sources import instant
from gpulease.service.health import HealthWatch
from gpulease.service.metrics import Demand, Histogram, UserMetrics
from gpulease.service.ports import Clock
from gpulease.service.scheduler import Scheduler
from gpulease.store.store import SqlStore
from gpulease.wire.metrics import GpuFaultsView, HistogramView, MetricsView, UserMetricsView

_LIVE: Final = ("queued", "granted", "active", "releasing")


class Metrics:
    """Draws the counts of the parts that count."""

    def __init__(
        self,
        store: SqlStore,
        scheduler: Scheduler,
        health: HealthWatch,
        connections: ConnectionCounts,
        notifications: DaemonNotifications,
        clock: Clock,
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._health = health
        self._connections = connections
        self._notifications = notifications
        self._clock = clock
        self._began_at = _text(clock.now())

    def view(self) -> MetricsView:
        """Return the counts as they are now. Reads files: for a thread."""
        scheduler, store, connections = self._scheduler, self._store, self._connections
        plan = scheduler.plan
        demand: Mapping[str, Demand] = {}
        if plan is not None:
            demand = store.metrics.demand(store.live(), plan.blocked, capacity(plan.gpus))
        return MetricsView(
            version=__version__,
            at=_text(self._clock.now()),
            started_at=self._began_at,
            observed_at=None if scheduler.seen is None else instant(scheduler.seen.at),
            users=list(self._users(demand)),
            faults=[GpuFaultsView(*key, it) for key, it in list(self._health.faults.items())],
            waits=_histogram(store.metrics.waits),
            passes=_histogram(scheduler.passes),
            failed_passes=scheduler.failed_passes,
            commits=_histogram(store.commits.durations),
            failed_commits=store.commits.failed,
            open_connections=connections.open,
            refused_connections=connections.refused,
            failed_connections=connections.failed,
            database=_size(store.path),
            cpu_seconds=_cpu_seconds(),
            resident=_resident(),
            oldest_queued_at=instant(
                min((each.oldest_at for each in demand.values()), default=None)
            ),
            notifications_sent=self._notifications.sending.sent,
            notifications_given_up=self._notifications.sending.given_up,
            notifications_waiting=self._notifications.outbox.waiting(),
        )

    def _users(self, demand: Mapping[str, Demand]) -> Iterator[UserMetricsView]:
        now_s = self._store.metrics.steady_s()
        for user, counted in self._store.metrics.users():
            yield user_view(user, counted, now_s, demand.get(user))


def user_view(
    user: str, counted: UserMetrics, now_s: float, queued: Demand | None = None
) -> UserMetricsView:
    """Return the counts of a user, with zeros for all that has not happened yet."""
    held = counted.held.at(now_s)
    return UserMetricsView(
        user=user,
        submitted=counted.submitted,
        requeued=counted.requeued,
        started=counted.started,
        failed=counted.failed,
        out_of_memory=counted.out_of_memory,
        over_lease=counted.over_lease,
        ended={outcome.value: counted.ended[outcome] for outcome in Outcome},
        jobs={state: counted.states[State(state)] for state in _LIVE},
        gpu_seconds=held.gpu_seconds,
        byte_seconds=held.byte_seconds,
        cpu_seconds=counted.cpu_seconds,
        waits=_histogram(counted.waits),
        queued_memory=0 if queued is None else queued.memory,
        queued_gpus=0 if queued is None else queued.gpus,
    )


def _histogram(of: Histogram) -> HistogramView:
    return HistogramView(list(of.bounds), list(of.counts), of.sum)


def _text(at: datetime) -> str:
    return instant(at) or ""


def _size(database: Path) -> int | None:
    """Return the bytes of the database and its log."""
    sizes = []
    for path in (database, database.with_name(f"{database.name}-wal")):
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return sum(sizes) if sizes else None


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
