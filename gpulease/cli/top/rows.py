"""The rows of the listing, in columns. Pure.

Only the rows on the screen are drawn, so a queue of a thousand jobs costs its sorting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpulease.cli.status_page import why_waiting
from gpulease.cli.top.lines import Column, Line, Span, row, widths
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
from gpulease.drawing.words import (
    UNKNOWN,
    amount,
    between,
    clean,
    display_width,
    id_of,
    ids_of,
    index_of,
    instant,
    label,
    lease_of,
    named,
    remark_on,
    requested,
    rough_span,
    starts_in,
    until,
)
from gpulease.wire.jobs import JobView
from gpulease.wire.text import most_of

_LONGEST_NAME = 40
_WIDE = 96
"""From this width on, jobs have their utilization and run time beside a name of some length."""
_NARROW = 60
"""From this width on, there is room for the states of jobs while none has one."""


class Listing:
    """Draws the rows of one kind, in columns that stay where they are while values change."""

    def __init__(
        self, section: Section, width: int, labels: Mapping[str, str], now: datetime
    ) -> None:
        self._section = section
        self._labels = labels
        self._now = now
        items = section.items
        self._columns = _columns(section.kind, _Widest.of(items, now), width)
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
        above = any((lease.used or 0) > most_of(lease) for lease in job.leases)
        return [
            (id_of(job), ""),
            (clean(job.user), ""),
            (named(job), ""),
            (where(job, self._labels), ""),
            (amount(sum(used)) if used else UNKNOWN, "bad" if above else ""),
            (lease_of(job.leases), "dim"),
            ("" if job.utilization is None else f"{job.utilization}%", ""),
            (rough_span(self._now - instant(job.started_at)) if job.started_at else "", "dim"),
            (until(job.expires_at, self._now, write=rough_span) if job.expires_at else "", ""),
            _state(job, self._now),
        ]

    def _waiting(self, job: JobView) -> list[Span]:
        starts = filter(None, (starts_in(job, self._now), why_waiting(job, self._now)))
        return [
            ("" if job.position is None else str(job.position), "dim"),
            (ids_of([job]), ""),
            (clean(job.user), ""),
            (named(job), ""),
            (requested(job), ""),
            (", ".join(starts) or UNKNOWN, "dim"),
        ]

    def _stranger(self, stranger: Stranger) -> list[Span]:
        process = stranger.process
        return [
            (str(process.pid), ""),
            (user_of(stranger), ""),
            (name_of(stranger), ""),
            (index_of(stranger.gpu), ""),
            (amount(process.memory), "unmanaged"),
            (between(process.started_at, None, self._now), ""),
        ]


def _state(job: JobView, now: datetime) -> Span:
    """Write the state of a job; nothing if it simply runs."""
    if not job.leases:
        return label(job), "warn"
    return remark_on(job, job.leases, now, write=rough_span)


_SORTED_COLUMN: Mapping[Kind, Mapping[SortColumn, str]] = {
    "jobs": {"job": "JOB", "user": "user", "name": "name", "gpu": "gpu", "memory": "uses",
             "util": "util", "ran": "ran", "time": "left"},
    "strangers": {"job": "PID", "user": "user", "name": "command", "gpu": "gpu", "memory": "uses",
                  "ran": "age", "time": "age"},
    "queue": {"usual": "PLACE", "job": "job", "user": "user", "name": "name", "memory": "asks",
              "time": "starts"},
}  # fmt: skip


@dataclass(frozen=True)
class _Widest:
    """The widest cells of columns that are as wide as these."""

    ids: int
    users: int
    states: int
    asks: int
    leases: int

    @classmethod
    def of(cls, items: Sequence[Item], now: datetime) -> "_Widest":
        jobs = [item for item in items if isinstance(item, JobView)]
        running = [job for job in jobs if job.state != "queued"]
        waiting = [job for job in jobs if job.state == "queued"]
        return cls(
            ids=max(
                (
                    len(ids_of([it]) if isinstance(it, JobView) else str(it.process.pid))
                    for it in items
                ),
                default=0,
            ),
            users=max((display_width(user_of(item)) for item in items), default=0),
            states=max((len(_state(job, now)[0]) for job in running), default=0),
            asks=max((len(requested(job)) for job in waiting), default=0),
            leases=max((len(lease_of(job.leases)) for job in running), default=0),
        )


def _columns(kind: Kind, widest: _Widest, width: int) -> tuple[Column, ...]:
    number = Column("job" if kind == "queue" else "JOB", min(16, max(5, widest.ids)), right=True)
    user = Column("user", min(12, max(5, widest.users)), leaves=1)
    is_wide = width >= _WIDE
    name = Column("name", 10, grows=1, most=_LONGEST_NAME, keeps_end=True)
    match kind:
        case "jobs":
            return (
                number,
                user,
                name,
                Column("gpu", 4, right=True),
                Column("uses", 6, right=True),
                Column("lease", min(14, max(6, widest.leases)), right=True),
                Column("util", 5 if is_wide else 0, right=True),
                Column("ran", 7 if is_wide else 0, right=True),
                Column("left", 7, right=True, leaves=2),
                Column("", min(24, max(6 if width >= _NARROW else 0, widest.states))),
            )
        case "strangers":
            return (
                Column("PID", max(7, number.width), right=True),
                user,
                Column("command", 10, grows=1),
                Column("gpu", 4, right=True),
                Column("uses", 6, right=True),
                Column("age", 7, right=True, leaves=2),
            )
        case "queue":
            return (
                Column("PLACE", 6, right=True, leaves=3),
                number,
                user,
                name,
                Column("asks", min(14, max(4, widest.asks)), right=True),
                Column("starts", 20, grows=1),
            )
