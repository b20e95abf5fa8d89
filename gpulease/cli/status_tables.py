"""The status of a machine or of a cluster, from rows: the first line, jobs, the queue.

Pages fit into a terminal: GPUs are always shown, jobs that do not fit are counted.
"""

from __future__ import annotations

from gpulease.cli.render import print_stdout, show_page, stdout_screen
from gpulease.cli.tables import Column, Hanging, Line, Span, Table, draw, line
from gpulease.drawing.words import UNKNOWN, display_width
from gpulease.errors import BadUsage
from gpulease.light_json import indent
from gpulease.record import record, replace
from gpulease.wire.text import ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, Literal, TypeVar

    from gpulease.cli.render import Screen
    from gpulease.cli.tables import Block, Page

    View = TypeVar("View")
    Detail = Literal["all", "no legend", "tight", "bars", "counts"]

_FIRST_IN_QUEUE = 20
"""Waiting jobs that are asked for; `wire.machine` has the same number."""
_LEAST_JOBS, _LEAST_WAITING = 5, 3
"""_Rows that a terminal shows before it shows details of GPUs."""
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
        return _FIRST_IN_QUEUE
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


def _jobs_part(rows: Sequence[JobRow], left_out: int) -> Page:
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
    """When it probably starts; empty if unknown."""
    why: str
    jobs: int = 1
    number: int | None = None
    """Its id, if similar jobs may share its row."""


def _queue_part(rows: Sequence[WaitingRow], left_out: int) -> Page:
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


def _with_similar_folded(rows: Sequence[WaitingRow]) -> list[WaitingRow]:
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
    at = first.at if first.at == last.at else f"{first.at} and later"
    return replace(
        first,
        ids=ranges(sorted(row.number or 0 for row in group)),
        name=f"{first.name}{differ} ({len(group)})",
        at=at,
        jobs=len(group),
        number=None,
    )


@record(frozen=True)
class _Rows:
    """A part of a page that may be cut: rows, and how the first of them are laid out."""

    rows: Sequence[Any]
    lay_out: Callable[[Sequence[Any]], Page]
    least: int = 0
    """_Rows that matter more than details of GPUs."""
    is_tight: bool = False

    def page(self, count: int) -> Page:
        """Lay out the first `count` rows."""
        page = self.lay_out(self.rows[:count])
        return _tight(page) if self.is_tight else page


_DETAILS: tuple[Detail, ...] = ("all", "no legend", "tight", "bars", "counts")


def status_page(
    machine: Callable[[Detail], Page],
    jobs: Sequence[JobRow],
    queue: Sequence[WaitingRow],
    *,
    user: str,
    waiting: int,
    outside: Callable[[Detail], Page] = lambda _: [],
    details: Sequence[Detail] = _DETAILS,
    width: int | None,
    height: int | None,
) -> Page:
    """Lay out a status: what is said of the machine first, then jobs, and the queue at the end.

    For a terminal of a known height, what is alike shares rows, and rows that do not fit are
    counted.

    Args:
        machine: the first line and the GPUs, as far as a detail says.
        jobs: those that hold memory, in the order in which they are shown.
        queue: the first rows of the queue.
        user: whose jobs matter more than details of GPUs.
        waiting: how many jobs the whole queue has.
        outside: what stands between the jobs and the queue.
        details: how much may be said of the machine, from the most to the least.
        width: columns, if they are limited.
        height: lines, if they are limited.
    """
    own = sum(row.user == user for row in jobs)
    jobs_rows = _Rows(
        jobs, lambda rows: _jobs_part(rows, len(jobs) - len(rows)), min(own, _LEAST_JOBS)
    )
    queue_rows = _Rows(
        queue if height is None else _with_similar_folded(queue),
        lambda rows: _queue_part(rows, waiting - sum(row.jobs for row in rows)),
        _LEAST_WAITING,
    )
    page: Page = []
    for detail in details:
        parts: list[Page | _Rows] = [machine(detail), jobs_rows, outside(detail), queue_rows]
        is_tight = detail not in ("all", "no legend")
        page, has_least = _fitted(_tightened(parts) if is_tight else parts, width, height)
        if has_least:
            break
    return page


def print_status(
    read: Callable[[int | None], View],
    read_json: Callable[[int | None], bytes],
    lay_out: Callable[[View, Screen], Page],
    *,
    queue: str | None,
    json: bool,
    watch: str | None,
    every: str,
) -> int:
    """Print a status, with the first jobs of the queue: a number, or "all".

    With `watch`, a span such as 2s or empty for `every`, it is printed again after each span.
    """
    first = rows_asked_for(queue)
    if watch is not None:
        from gpulease.cli.watch import watch_page

        return watch_page(lambda: read(first), lay_out, watch or every, json=json)
    if json:
        print_stdout(indent(read_json(first)))
        return 0
    screen = stdout_screen()
    # A queue that was asked for is shown, although the first lines scroll off.
    fitted = screen if queue is None else replace(screen, height=None)
    show_page(lay_out(read(first), fitted), screen)
    return 0


def _tightened(parts: Sequence[Page | _Rows]) -> list[Page | _Rows]:
    """Return a layout without empty lines, and with one line for each row but for its state."""
    return [
        replace(part, is_tight=True) if isinstance(part, _Rows) else _tight(part) for part in parts
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
    parts: Sequence[Page | _Rows], width: int | None, height: int | None
) -> tuple[Page, bool]:
    """Return the parts as one page, and whether it has their least rows.

    It has as many rows as fit into a terminal. The first part with rows has its least rows if
    those of the second fit as well, or if there is no room for both; beyond these it leaves at
    least half of the lines to the second.
    """
    cuttable = [part for part in parts if isinstance(part, _Rows)]
    counts = {id(part): len(part.rows) for part in cuttable}
    if height is not None:
        fixed = [block for part in parts if not isinstance(part, _Rows) for block in part]
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
        for block in (part.page(counts[id(part)]) if isinstance(part, _Rows) else part)
    ]
    has_least = (counts[id(part)] >= min(part.least, len(part.rows)) for part in cuttable)
    return page, all(has_least)


def _fitting(part: _Rows, room: int, width: int | None) -> tuple[int, int]:
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
