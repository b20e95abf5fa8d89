"""The rows of the listing: jobs, processes without a lease, and the queue. Pure.

Only the rows on the screen are drawn, so a queue of a thousand jobs costs its sorting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

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
    named,
    reason_of,
    requested,
    shown_command,
    size,
    until,
)
from gpulease.cli.status_page import without_lease
from gpulease.cli.top.text import Column, Line, Span, row, widths
from gpulease.errors import BadUsage
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import GpuView, ProcessView, StatusView

Kind = Literal["jobs", "strangers", "queue"]
SortColumn = Literal["usual", "job", "user", "name", "gpu", "memory", "time"]
SORT_COLUMNS: tuple[SortColumn, ...] = ("usual", "job", "user", "name", "gpu", "memory", "time")
_FAR = "9999"
"""After every instant that the daemon sends."""
_LONGEST_NAME = 40
_TITLES: Mapping[Kind, str] = {
    "jobs": "RUNNING",
    "strangers": "WITHOUT A LEASE",
    "queue": "WAITING",
}


@dataclass(frozen=True)
class Stranger:
    """A process that uses a GPU without a lease there."""

    gpu: GpuView
    process: ProcessView


Item = JobView | Stranger


@dataclass(frozen=True)
class Sort:
    """The order of the rows."""

    column: SortColumn = "usual"
    """usual: jobs by number, the queue by place."""
    reverse: bool = False

    def other(self, step: int) -> "Sort":
        """Return the order by a column further on."""
        place = SORT_COLUMNS.index(self.column) + step
        return Sort(SORT_COLUMNS[place % len(SORT_COLUMNS)])


@dataclass(frozen=True)
class Filter:
    """Which rows are shown: those that match all that is given."""

    user: str | None = None
    gpu: str | None = None
    text: str = ""

    def __str__(self) -> str:
        parts = [f"user={self.user}" * bool(self.user), f"gpu={self.gpu}" * bool(self.gpu)]
        return " ".join(each for each in (*parts, self.text) if each)


def parse_filter(words: str) -> Filter:
    """Read a filter such as "user=bob gpu=1 sweep".

    Raises:
        BadUsage: an unknown field is given.
    """
    found: dict[str, str] = {}
    texts = []
    for word in words.split():
        name, equals, value = word.partition("=")
        if equals and name in {"user", "gpu"}:
            found[name] = value
        elif equals:
            raise BadUsage(f"cannot filter by {name!r}", "fields are user and gpu: user=bob gpu=1")
        else:
            texts.append(word)
    return Filter(found.get("user") or None, found.get("gpu") or None, " ".join(texts).lower())


@dataclass(frozen=True)
class Section:
    """One part of the listing, with all its rows."""

    kind: Kind
    items: Sequence[Item]
    left_out: int
    """Rows that the filter hides."""
    more: int = 0
    """Jobs of the queue that the daemon was not asked for."""

    @property
    def title(self) -> str:
        """What the section is, and how many rows are shown of how many."""
        count = len(self.items)
        if self.left_out:
            return f"{_TITLES[self.kind]} {count} of {count + self.left_out + self.more}"
        return f"{_TITLES[self.kind]} {count + self.more}"


def sections(view: StatusView, wanted: Filter, order: Sort) -> list[Section]:
    """Return the parts of the listing; those without any row before the filter are left out."""
    labels = labels_of(view)
    running = [job for job in view.jobs if job.state != "queued"]
    waiting = [job for job in view.jobs if job.state == "queued"]
    outside = [Stranger(gpu, it) for gpu in view.gpus for it in without_lease(gpu, view)]
    more = max(0, (view.waiting or 0) - sum(map(stands_for, waiting)))
    found: list[Section] = []
    every: tuple[tuple[Kind, Sequence[Item], int], ...] = (
        ("jobs", running, 0),
        ("strangers", outside, 0),
        ("queue", waiting, more),
    )
    for kind, items, unseen in every:
        if items or kind == "jobs":
            kept = [item for item in items if matches(item, wanted, labels)]
            hidden = len(items) - len(kept)
            found.append(Section(kind, ordered(kept, order, labels), hidden, unseen))
    return found


def labels_of(view: StatusView) -> dict[str, str]:
    """Return the index of each GPU, as people see it, by its UUID."""
    return {gpu.uuid: index_of(gpu) for gpu in view.gpus}


def stands_for(job: JobView) -> int:
    """Return how many queued jobs a row is for."""
    elements = None if job.queue is None else job.queue.array_waiting
    return 1 if elements is None else elements.jobs


def matches(item: Item, wanted: Filter, labels: Mapping[str, str]) -> bool:
    """Tell whether a row passes the filter."""
    if isinstance(item, Stranger):
        user, where = item.process.user or UNKNOWN, {index_of(item.gpu)}
        text = f"{item.process.pid} {user} {item.process.command or item.process.name}"
    else:
        user, where = item.user, {labels.get(uuid, UNKNOWN) for uuid in gpus_of(item)}
        text = f"{id_of(item)} {user} {item.name} {item.command} {label(item)} {item.reason}"
    if wanted.user is not None and user != wanted.user:
        return False
    if wanted.gpu is not None and wanted.gpu not in where:
        return False
    return wanted.text in text.lower()


def gpus_of(job: JobView) -> list[str]:
    """Return the GPUs that a job leases; of one that waits, those that it names."""
    return [lease.gpu for lease in job.leases] or list(job.claim.named)


def ordered(items: Sequence[Item], order: Sort, labels: Mapping[str, str]) -> list[Item]:
    """Return rows in an order; equal ones stay in the usual order."""
    usual = sorted(items, key=_usual)
    if order.column != "usual":
        usual.sort(key=lambda item: _KEYS[order.column](item, labels))
    return usual[::-1] if order.reverse else usual


def _usual(item: Item) -> tuple[int, int]:
    if isinstance(item, Stranger):
        return item.gpu.index, item.process.pid
    return (item.position or 0, item.id)


def _memory(item: Item, _labels: Mapping[str, str]) -> int:
    """Return what a row uses, or asks for, below zero: those with the most come first."""
    if isinstance(item, Stranger):
        return -(item.process.memory or 0)
    if item.state == "queued":
        return -(item.claim.memory or 0) * item.claim.gpus
    return -sum(lease.used or 0 for lease in item.leases)


def _time(item: Item, _labels: Mapping[str, str]) -> str:
    """Return when a job ends, when one is expected to start, or when a process began."""
    if isinstance(item, Stranger):
        return item.process.started_at or _FAR
    return (item.expected_start_at if item.state == "queued" else item.expires_at) or _FAR


def _user_of(item: Item) -> str:
    return clean((item.process.user if isinstance(item, Stranger) else item.user) or UNKNOWN)


def _name_of(item: Item) -> str:
    if isinstance(item, Stranger):
        where = f" (in container {item.process.container})" if item.process.container else ""
        return shown_command(item.process.command or item.process.name or UNKNOWN) + clean(where)
    return named(item)


def _where(item: Item, labels: Mapping[str, str]) -> str:
    if isinstance(item, Stranger):
        return index_of(item.gpu)
    return ",".join(labels.get(uuid, UNKNOWN) for uuid in gpus_of(item)) or UNKNOWN


_KEYS: Mapping[str, Callable[[Item, Mapping[str, str]], Any]] = {
    "job": lambda item, _: item.process.pid if isinstance(item, Stranger) else item.id,
    "user": lambda item, _: _user_of(item),
    "name": lambda item, _: _name_of(item).lower(),
    "gpu": _where,
    "memory": _memory,
    "time": _time,
}


def key_of(item: Item) -> tuple[str, int]:
    """Return what a row is known by while it moves."""
    return ("pid", item.process.pid) if isinstance(item, Stranger) else ("job", item.id)


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
            (_where(job, self._labels), ""),
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
            (_user_of(stranger), ""),
            (_name_of(stranger), ""),
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
    if job.hook in {"failed", "absent"}:
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
            users=max((display_width(_user_of(item)) for item in items), default=0),
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
