"""What the listing of `gpulease top` has: jobs, processes without a lease, the queue. Pure.

The rows are filtered and sorted here; `rows` draws those on the screen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpulease.drawing.words import (
    UNKNOWN,
    alike,
    clean,
    id_of,
    index_of,
    jobs_in,
    label,
    labels_of,
    named,
)
from gpulease.errors import BadUsage
from gpulease.wire.jobs import ArrayWaitingView, JobView
from gpulease.wire.machine import GpuView, ProcessView, StatusView
from gpulease.wire.text import ranges, shown_command, unmanaged_processes

Kind = Literal["jobs", "strangers", "queue"]
SortColumn = Literal["usual", "job", "user", "name", "gpu", "memory", "util", "ran", "time"]
SORT_COLUMNS: tuple[SortColumn, ...] = (
    "usual", "job", "user", "name", "gpu", "memory", "util", "ran", "time",
)  # fmt: skip
"""In the order of their keys, 1 to 9."""
FAR = "9999"
"""After every instant that the daemon sends."""
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

    def by(self, column: SortColumn) -> "Sort":
        """Return the order by a column; by the one that it is already, turned around."""
        return Sort(column, self.column == column and not self.reverse)


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
    """Jobs, or processes, that the filter hides."""
    more: int = 0
    """Jobs of the queue that the daemon was not asked for."""
    wanted: Filter = Filter()
    """The filter that hides them."""

    @property
    def title(self) -> str:
        """What the section is, and how many jobs the filter shows of how many."""
        count = count_of(self.items)
        if self.left_out:
            return f"{_TITLES[self.kind]} {count} of {count + self.left_out + self.more}"
        return f"{_TITLES[self.kind]} {count + self.more}"


def sections(view: StatusView, wanted: Filter, order: Sort) -> list[Section]:
    """Return the parts of the listing; those without any row before the filter are left out."""
    labels = labels_of(view.gpus)
    running = [job for job in view.jobs if job.state != "queued"]
    waiting = [_row(group) for group in alike(job for job in view.jobs if job.state == "queued")]
    outside = [Stranger(gpu, it) for gpu in view.gpus for it in unmanaged_processes(gpu, view)]
    more = max(0, (view.waiting or 0) - jobs_in(waiting))
    found: list[Section] = []
    every: tuple[tuple[Kind, Sequence[Item], int], ...] = (
        ("jobs", running, 0),
        ("strangers", outside, 0),
        ("queue", waiting, more),
    )
    for kind, items, unseen in every:
        if items or kind == "jobs":
            kept = [item for item in items if matches(item, wanted, labels)]
            hidden = count_of(items) - count_of(kept)
            found.append(Section(kind, ordered(kept, order, labels), hidden, unseen, wanted))
    return found


def _row(group: Sequence[JobView]) -> JobView:
    """Return what stands for elements of an array that are alike."""
    first = group[0]
    if len(group) == 1 or first.queue is None:
        return first
    indices = ranges(sorted(job.queue.array_index or 0 for job in group if job.queue is not None))
    elements = ArrayWaitingView(indices, len(group))
    return replace(first, queue=replace(first.queue, array_waiting=elements))


def count_of(items: Iterable[Item]) -> int:
    """Return how many jobs, or processes, rows stand for: one may be for many of an array."""
    return sum(1 if isinstance(item, Stranger) else jobs_in([item]) for item in items)


def matches(item: Item, wanted: Filter, labels: Mapping[str, str]) -> bool:
    """Tell whether a row passes the filter."""
    if isinstance(item, Stranger):
        user, gpus = item.process.user or UNKNOWN, {index_of(item.gpu)}
        text = f"{item.process.pid} {user} {item.process.command or item.process.name}"
    else:
        user, gpus = item.user, {labels.get(uuid, UNKNOWN) for uuid in gpus_of(item)}
        text = f"#{id_of(item)} {user} {item.name} {item.command} {label(item)} {item.reason}"
    if wanted.user is not None and user != wanted.user:
        return False
    if wanted.gpu is not None and wanted.gpu not in gpus:
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


def _usual(item: Item) -> tuple[bool, int, int]:
    if isinstance(item, Stranger):
        return False, item.gpu.index, item.process.pid
    return item.position is None, item.position or 0, item.id


def _memory(item: Item, _labels: Mapping[str, str]) -> int:
    """Return what a row uses, or asks for, below zero: those with the most come first."""
    if isinstance(item, Stranger):
        return -(item.process.memory or 0)
    if item.state == "queued":
        return -(item.claim.memory or 0) * item.claim.gpus
    return -sum(lease.used or 0 for lease in item.leases)


def _util(item: Item, _labels: Mapping[str, str]) -> int:
    """Return the utilization of a job below zero: the busiest come first, unknown last."""
    known = None if isinstance(item, Stranger) else item.utilization
    return 1 if known is None else -known


def _ran(item: Item, _labels: Mapping[str, str]) -> str:
    """Return when a job started, when one was submitted, or when a process began."""
    if isinstance(item, Stranger):
        return item.process.started_at or FAR
    return item.started_at or item.submitted_at


def _time(item: Item, _labels: Mapping[str, str]) -> str:
    """Return when a job ends, when one is expected to start, or when a process began."""
    if isinstance(item, Stranger):
        return item.process.started_at or FAR
    return (item.expected_start_at if item.state == "queued" else item.expires_at) or FAR


def user_of(item: Item) -> str:
    """Return the user of a row."""
    return clean((item.process.user if isinstance(item, Stranger) else item.user) or UNKNOWN)


def name_of(item: Item) -> str:
    """Return the name of a job, or the command of a process."""
    if isinstance(item, Stranger):
        container = item.process.container
        inside = f" (in container {container})" if container else ""
        return shown_command(item.process.command or item.process.name or UNKNOWN) + clean(inside)
    return named(item)


def where(item: Item, labels: Mapping[str, str]) -> str:
    """Return the indexes of the GPUs of a row."""
    if isinstance(item, Stranger):
        return index_of(item.gpu)
    return ",".join(labels.get(uuid, UNKNOWN) for uuid in gpus_of(item)) or UNKNOWN


_KEYS: Mapping[str, Callable[[Item, Mapping[str, str]], Any]] = {
    "job": lambda item, _: item.process.pid if isinstance(item, Stranger) else item.id,
    "user": lambda item, _: user_of(item),
    "name": lambda item, _: name_of(item).lower(),
    "gpu": where,
    "memory": _memory,
    "util": _util,
    "ran": _ran,
    "time": _time,
}


def key_of(item: Item) -> tuple[str, int]:
    """Return what a row is known by while it moves."""
    return ("pid", item.process.pid) if isinstance(item, Stranger) else ("job", item.id)
