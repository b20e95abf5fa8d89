"""What the status of a machine and of a cluster share: the first line, and rows of jobs.

Pages fit into a terminal: GPUs are always shown, jobs that do not fit are counted.
"""

from __future__ import annotations

from gpulease.cli.tables import Column, Hanging, Line, Span, Table, draw, line
from gpulease.drawing.words import UNKNOWN, display_width
from gpulease.errors import BadUsage
from gpulease.record import record, replace
from gpulease.wire.text import ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any, Literal

    from gpulease.cli.tables import Block, Page

    Detail = Literal["all", "no legend", "tight", "bars", "counts"]

FIRST_IN_QUEUE = 20
"""Waiting jobs that are asked for; `wire.machine` has the same number."""
LEAST_JOBS, LEAST_WAITING = 5, 3
"""Rows that a terminal shows before it shows details of GPUs."""
_MOST_DIGITS = 9
_REASON = 24
"""Columns of a terminal that a reason gets; a longer one is cut between words."""
_ALIKE_FROM = 3
"""Similar jobs in the queue that share a row."""


def rows_asked_for(queue: str | None) -> int | None:
    """Return how many rows of the queue to ask for, as --queue says; None: all.

    Raises:
        BadUsage: that is neither a number nor "all".
    """
    if queue is None:
        return FIRST_IN_QUEUE
    if queue == "all":
        return None
    if not (queue.isascii() and queue.isdigit() and len(queue) <= _MOST_DIGITS):
        raise BadUsage(f"cannot show {queue[:40]!r} waiting jobs: that is no number", "--queue 50")
    return int(queue)


def heading(
    parts: Sequence[str], counts: str, width: int | None, least: str | None = None
) -> Iterator[Block]:
    """Lay out the first line: what this is, and at the right how many jobs there are.

    The `least` of the parts is left out where that makes it one line.
    """
    left = " · ".join(parts)
    if width is not None and display_width(f"{left}  {counts}") > width:
        left = " · ".join(part for part in parts if part != least)
    name = parts[0]
    spans = Span(name, "title"), Span(left[len(name) :], "dim")
    room = 2 if width is None else width - display_width(left + counts)
    if room >= 2:
        yield (*spans, Span(" " * room + counts))
    else:
        yield Hanging(spans, 2)
        yield line(counts)


def counts(running: int, waiting: int, own_running: int, own_waiting: int) -> str:
    """Write how many jobs run and wait, and how many of them are the caller's."""
    found = ((running, "running", own_running), (waiting, "waiting", own_waiting))
    return ", ".join(
        f"{count} {what}" + (f" ({own} yours)" if own else "") for count, what, own in found
    )


@record(frozen=True)
class JobRow:
    """A job that holds memory, on one or several GPUs."""

    id: str
    user: str
    name: str
    gpu: str
    lease: str
    left: str
    """The time until its limit; empty for none."""
    uses: str | None = None
    is_over: bool = False
    state: Line = ()
    """Empty if it simply runs."""
    node: str = ""


def jobs_part(rows: Sequence[JobRow], left_out: int) -> Page:
    """Lay out jobs that hold memory, and count those that are left out."""
    return [
        *[line("")] * bool(rows or left_out),
        *([_job_table(rows)] if rows else ()),
        *([_more(left_out, "gpulease list")] if left_out else ()),
    ]


def _more(count: int, verb: str) -> Block:
    return Hanging(line(f"and {count} more: {verb}", "dim"), 2)


def _job_table(rows: Sequence[JobRow]) -> Table:
    has_uses = any(row.uses is not None for row in rows)
    has_nodes = any(row.node for row in rows)
    columns = (
        Column("JOB", right=True),
        Column("user", wraps=True),
        Column("name", leaves=3, shrinks=True, cuts="middle", least=12, below=""),
        *((Column("node", wraps=True),) if has_nodes else ()),
        Column("gpu", wraps=True),
        Column("uses / lease" if has_uses else "lease", right=True),
        Column("left", right=True, leaves=1, below="left "),
        Column("", leaves=4, below=""),
    )
    longest = max((len(row.lease) for row in rows), default=0)
    return Table(
        columns,
        tuple(
            (
                line(row.id),
                line(row.user),
                line(row.name),
                *((line(row.node),) if has_nodes else ()),
                line(row.gpu),
                _uses_of_lease(row, longest),
                line(row.left),
                row.state or line(""),
            )
            for row in rows
        ),
    )


def _uses_of_lease(row: JobRow, longest: int) -> Line:
    if row.uses is None:
        return line(row.lease)
    return (Span(row.uses, "bad" if row.is_over else ""), Span(f" / {row.lease:>{longest}}"))


@record(frozen=True)
class WaitingRow:
    """A job in the queue, elements of an array, or similar jobs."""

    place: int | None
    """None if it may not start, and so has none."""
    ids: str
    user: str
    name: str
    asks: str
    at: str
    """The expected start; empty if unknown."""
    why: str
    jobs: int = 1
    number: int | None = None
    """Its id, if similar jobs may share its row."""


def queue_part(rows: Sequence[WaitingRow], left_out: int) -> Page:
    """Lay out the queue, and count the jobs that are left out."""
    return [
        *[line("")] * bool(rows or left_out > 0),
        *([_queue_table(rows)] if rows else ()),
        *([_more(left_out, "gpulease list --state queued")] if left_out > 0 else ()),
    ]


def _queue_table(rows: Sequence[WaitingRow]) -> Table:
    # A reason beside a time may be left out, one that stands alone not.
    least = max(display_width(row.at or row.why[:_REASON]) for row in rows)
    columns = (
        Column("WAITING"),
        Column("job"),
        Column("user", wraps=True),
        Column(
            "name", leaves=3, shrinks=True, cuts="middle", least=12, narrows_first=True, below=""
        ),
        Column("asks"),
        Column("starts", leaves=4, shrinks=True, cuts="parts", least=least, below=""),
    )
    return Table(
        columns,
        tuple(
            (
                line(_places(row)),
                line(row.ids),
                line(row.user),
                line(row.name),
                line(row.asks),
                _starts(row),
            )
            for row in rows
        ),
    )


def _starts(row: WaitingRow) -> Line:
    if row.at and row.why:
        return (Span(row.at), Span(f", {row.why}"))
    return line(row.at or row.why or UNKNOWN)


def _places(row: WaitingRow) -> str:
    if row.place is None:
        return ""
    is_range = row.number is None and row.jobs > 1 and "[" not in row.ids
    return f"{row.place}-{row.place + row.jobs - 1}" if is_range else str(row.place)


def with_similar_folded(rows: Sequence[WaitingRow]) -> list[WaitingRow]:
    """Return the queue, where similar jobs that follow each other share a row."""
    groups: list[list[WaitingRow]] = []
    for row in rows:
        if groups and _are_similar(groups[-1][-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [
        row
        for group in groups
        for row in ([_folded(group)] if len(group) >= _ALIKE_FROM else group)
    ]


def _are_similar(one: WaitingRow, other: WaitingRow) -> bool:
    if one.number is None or other.number is None or one.place is None:
        return False
    follows = other.place == one.place + 1
    return follows and _likeness(one) == _likeness(other)


_DIGITS = dict.fromkeys(map(ord, "0123456789"))


def _likeness(row: WaitingRow) -> tuple[str, ...]:
    return row.user, row.name.translate(_DIGITS), row.asks, row.why


def _folded(group: Sequence[WaitingRow]) -> WaitingRow:
    first, last = group[0], group[-1]
    differ = "" if all(row.name == first.name for row in group) else " ..."
    at = first.at if first.at == last.at else f"{first.at} - {last.at or UNKNOWN}"
    return replace(
        first,
        ids=ranges(sorted(row.number or 0 for row in group)),
        name=f"{first.name}{differ} ({len(group)})",
        at=at,
        jobs=len(group),
        number=None,
    )


@record(frozen=True)
class Rows:
    """A part of a page that may be cut: rows, and how the first of them are laid out."""

    rows: Sequence[Any]
    lay_out: Callable[[Sequence[Any]], Page]
    least: int = 0
    """Rows that matter more than details of GPUs."""
    is_tight: bool = False

    def page(self, count: int) -> Page:
        """Lay out the first `count` rows."""
        page = self.lay_out(self.rows[:count])
        return _tight(page) if self.is_tight else page


DETAILS: tuple[Detail, ...] = ("all", "no legend", "tight", "bars", "counts")
"""How much a page says of the machine, from the most to the least."""


def first_that_fits(
    layouts: Iterable[Sequence[Page | Rows]], width: int | None, height: int | None
) -> Page:
    """Return the first page that has room for the least rows of its parts, or else the last."""
    page: Page = []
    for parts in layouts:
        page, has_least = _fitted(parts, width, height)
        if has_least:
            break
    return page


def tightened(parts: Sequence[Page | Rows]) -> list[Page | Rows]:
    """Return a layout without empty lines, and with one line for each row but for its state."""
    return [
        replace(part, is_tight=True) if isinstance(part, Rows) else _tight(part) for part in parts
    ]


def _tight(page: Page) -> Page:
    return [
        replace(block, columns=tuple(map(_in_one_line, block.columns)))
        if isinstance(block, Table)
        else block
        for block in page
        if block != line("")
    ]


def _in_one_line(column: Column) -> Column:
    if column.title:
        return replace(column, below=None)
    return replace(column, wraps=False, shrinks=column.wraps or column.shrinks)


def _fitted(
    parts: Sequence[Page | Rows], width: int | None, height: int | None
) -> tuple[Page, bool]:
    """Return the parts as one page, and whether it has their least rows.

    It has as many rows as fit into a terminal. The first part with rows has its least rows if
    those of the second fit as well, or if there is no room for both; beyond these it leaves at
    least half of the lines to the second.
    """
    cuttable = [part for part in parts if isinstance(part, Rows)]
    counts = {id(part): len(part.rows) for part in cuttable}
    if height is not None:
        fixed = [block for part in parts if not isinstance(part, Rows) for block in part]
        # One line is for the prompt.
        room = height - 1 - _lines(fixed, width)
        wanted = [_lines(part.page(height), width) for part in cuttable]
        least = [_lines(part.page(part.least), width) for part in cuttable]
        if sum(least) > room:
            least[1:] = [_lines(part.page(0), width) for part in cuttable[1:]]
        for number, part in enumerate(cuttable):
            later = sum(wanted[number + 1 :])
            share = room - min(later, room // 2)
            share = max(share, min(least[number], room - sum(least[number + 1 :])))
            counts[id(part)], taken = _fitting(part, share, width)
            room -= taken
    page = [
        block
        for part in parts
        for block in (part.page(counts[id(part)]) if isinstance(part, Rows) else part)
    ]
    has_least = (counts[id(part)] >= min(part.least, len(part.rows)) for part in cuttable)
    return page, all(has_least)


def _fitting(part: Rows, room: int, width: int | None) -> tuple[int, int]:
    """Return how many rows of a part fit into `room` lines, and the lines that they take."""
    count = min(len(part.rows), max(0, room))
    while True:
        taken = _lines(part.page(count), width)
        if taken <= room or not count:
            return count, taken
        count -= max(1, (taken - room) // 3)
        count = max(0, count)


def _lines(page: Page, width: int | None) -> int:
    return draw(page, width).count("\n")
