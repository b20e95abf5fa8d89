"""The rows of the listing, in columns. Pure.

Only the rows on the screen are drawn, so a queue of a thousand jobs costs its sorting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpulease.cli.format import (
    UNKNOWN,
    between,
    clean,
    clock,
    display_width,
    id_of,
    ids_of,
    index_of,
    instant,
    is_above,
    label,
    lacks_limit,
    named,
    reason_of,
    requested,
    size,
    until,
)
from gpulease.cli.top.sections import (
    Item,
    Kind,
    Section,
    Sort,
    SortColumn,
    Stranger,
    name_of,
    user_of,
    where,
)
from gpulease.cli.top.text import Column, Line, Span, row, widths
from gpulease.wire.jobs import JobView

_LONGEST_NAME = 40


class Listing:
    """Draws the rows of one kind, in columns that stay where they are while values change."""

    def __init__(
        self, section: Section, width: int, labels: Mapping[str, str], now: datetime
    ) -> None:
        self._section = section
        self._labels = labels
        self._now = now
        items = section.items
        self._columns = _columns(section.kind, _Widest.of(items, now))
        self._widths = widths(self._columns, width)

    def heading(self, order: Sort) -> Line:
        """Return the titles of the columns; the one that the rows are sorted by is marked."""
        mark = "v" if order.reverse else "^"
        by = _SORTED_COLUMN[self._section.kind].get(order.column)
        columns = [
            (f"{each.title}{mark}" if each.title == by else each.title, "heading")
            for each in self._columns
        ]
        return row(self._columns, columns, self._widths)

    def line(self, item: Item) -> Line:
        """Return one row."""
        if isinstance(item, Stranger):
            cells = self._stranger(item)
        elif self._section.kind == "queue":
            cells = self._waiting(item)
        else:
            cells = self._running(item)
        return row(self._columns, cells, self._widths)

    def _running(self, job: JobView) -> list[Span]:
        used = [lease.used for lease in job.leases if lease.used is not None]
        leased = sum(lease.memory for lease in job.leases)
        above = any((lease.used or 0) > lease.memory for lease in job.leases)
        return [
            (id_of(job), ""),
            (clean(job.user), ""),
            (named(job), ""),
            (where(job, self._labels), ""),
            (size(sum(used)) if used else UNKNOWN, "bad" if above else ""),
            (size(leased), "dim"),
            (_left(job, self._now), ""),
            _state(job, self._now),
        ]

    def _waiting(self, job: JobView) -> list[Span]:
        return [
            ("" if job.position is None else str(job.position), "dim"),
            (ids_of([job]), ""),
            (clean(job.user), ""),
            (named(job), ""),
            (requested(job), ""),
            (clock(job.expected_start_at, self._now) if job.expected_start_at else "", ""),
            (reason_of(job, self._now) or "", "dim"),
        ]

    def _stranger(self, stranger: Stranger) -> list[Span]:
        process = stranger.process
        return [
            (str(process.pid), ""),
            (user_of(stranger), ""),
            (name_of(stranger), ""),
            (index_of(stranger.gpu), ""),
            (size(process.memory), "unmanaged"),
            (between(process.started_at, None, self._now), ""),
        ]


def _id_of(item: Item) -> str:
    return str(item.process.pid) if isinstance(item, Stranger) else ids_of([item])


def _state(job: JobView, now: datetime) -> Span:
    stops = min((lease.stops_at for lease in job.leases if lease.stops_at), default=None)
    if stops is not None:
        return f"over, stops in {until(stops, now)}", "bad"
    if any(lease.over_since_at for lease in job.leases):
        return "over", "bad"
    if job.idle_ends_at is not None:
        return f"idle, ends in {until(job.idle_ends_at, now)}", "warn"
    if lacks_limit(job):
        return "no framework limit", "warn"
    if any(is_above(job, lease) for lease in job.leases) and not job.suspended:
        return "above", "warn"
    return label(job), "" if label(job) == "active" else "warn"


def _left(job: JobView, now: datetime) -> str:
    """Write the time left, without seconds where there are minutes: a row then changes rarely."""
    if job.expires_at is None:
        return ""
    seconds = int((instant(job.expires_at) - now).total_seconds())
    if seconds < 60:
        return f"{max(0, seconds)}s"
    minutes = seconds // 60
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}"


_SORTED_COLUMN: Mapping[Kind, Mapping[SortColumn, str]] = {
    "jobs": {"job": "JOB", "user": "USER", "name": "NAME", "gpu": "GPU", "memory": "USES",
             "time": "LEFT"},
    "strangers": {"job": "PID", "user": "USER", "name": "COMMAND", "gpu": "GPU", "memory": "USES",
                  "time": "AGE"},
    "queue": {"usual": "PLACE", "job": "JOB", "user": "USER", "name": "NAME", "memory": "ASKS",
              "time": "STARTS"},
}  # fmt: skip


@dataclass(frozen=True)
class _Widest:
    """The widest cells of columns that are as wide as these."""

    ids: int
    users: int
    states: int
    asks: int

    @classmethod
    def of(cls, items: Sequence[Item], now: datetime) -> "_Widest":
        jobs = [item for item in items if isinstance(item, JobView)]
        running = [job for job in jobs if job.state != "queued"]
        waiting = [job for job in jobs if job.state == "queued"]
        return cls(
            ids=max((len(_id_of(item)) for item in items), default=0),
            users=max((display_width(user_of(item)) for item in items), default=0),
            states=max((len(_state(job, now)[0]) for job in running), default=0),
            asks=max((len(requested(job)) for job in waiting), default=0),
        )


def _columns(kind: Kind, widest: _Widest) -> tuple[Column, ...]:
    number = Column("JOB", min(16, max(5, widest.ids)), right=True)
    user = Column("USER", min(12, max(5, widest.users)), leaves=1)
    name = Column("NAME", 10, grows=1, most=_LONGEST_NAME, keeps_end=True)
    match kind:
        case "jobs":
            return (
                number,
                user,
                name,
                Column("GPU", 4, right=True),
                Column("USES", 6, right=True),
                Column("LEASE", 6, right=True),
                Column("LEFT", 6, right=True, leaves=2),
                Column("STATE", min(24, max(6, widest.states))),
            )
        case "strangers":
            return (
                Column("PID", max(7, number.width), right=True),
                user,
                Column("COMMAND", 10, grows=1),
                Column("GPU", 4, right=True),
                Column("USES", 6, right=True),
                Column("AGE", 7, right=True, leaves=2),
            )
        case "queue":
            return (
                Column("PLACE", 6, right=True, leaves=3),
                number,
                user,
                name,
                Column("ASKS", min(14, max(4, widest.asks)), right=True),
                Column("STARTS", 9, leaves=2),
                Column("REASON", 16, grows=2),
            )
