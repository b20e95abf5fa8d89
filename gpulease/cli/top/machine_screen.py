"""The first screen of `gpulease top`: the GPUs above, and the listing below."""

from datetime import datetime
from socket import gethostname
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize

from gpulease.cli.chart import on_average
from gpulease.cli.status_tables import counts
from gpulease.cli.top.gpus import (
    SMALL,
    Trends,
    gpu_lines,
    layout,
    most_lines,
    shown_gpus,
)
from gpulease.cli.top.host import Host
from gpulease.cli.top.jobs import Jobs, lines_of
from gpulease.cli.top.lines import Line, Lines, Terminal, apart
from gpulease.cli.top.screens import TopScreen
from gpulease.cli.top.sections import (
    SORT_COLUMNS,
    Filter,
    Item,
    Section,
    Sort,
    SortColumn,
    count_of,
    sections,
)
from gpulease.drawing.gpus import models
from gpulease.drawing.words import clean, index_of, labels_of, shorten
from gpulease.wire.history import GpuHistoryView
from gpulease.wire.machine import StatusView
from gpulease.wire.text import model

_WIDE = 160
"""From this width on, the queue is beside the jobs."""
_CLOCK = 8


class MachineScreen(TopScreen):
    """Shows the machine."""

    DEFAULT_CSS = f"""
    #top {{ height: 1; }}
    #head {{ width: 1fr; }}
    #clock {{ width: {_CLOCK}; }}
    #gpus {{ height: 1; }}
    .beside {{ layout: horizontal; }}
    .beside #queue {{ margin-left: 2; }}
    """
    KEYS = (
        "Enter open  c cancel  e extend  k keep  a attach  s sort  / find  ? help  q quit  "
        "p processes"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", show=False),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", show=False),
        *(
            Binding(str(number), f"sort_by('{column}')", show=False)
            for number, column in enumerate(SORT_COLUMNS, 1)
        ),
        Binding("m", "mine", show=False),
        Binding("escape", "clear", show=False),
        Binding("tab,right,left,shift+tab", "side", show=False, priority=True),
    ]

    def __init__(self, user: str, terminal: Terminal) -> None:
        super().__init__(terminal)
        self.wanted = Filter()
        self._order = Sort()
        self._user = user
        self._status: StatusView | None = None
        self._now = 0.0
        self._trends: dict[str, Trends] = {}
        self._head = Lines(terminal, id="head")
        self._clock = Lines(terminal, id="clock")
        self._gpus = Lines(terminal, id="gpus")
        self._jobs = Jobs(terminal, id="jobs")
        self._queue = Jobs(terminal, id="queue")
        self._listing = Vertical(self._jobs, self._queue)
        self._host = Host()
        self._busy = ""
        """What its CPU and RAM do."""
        self._at_queue = False
        """Whether keys go to the queue."""
        self._is_covered = False

    def compose(self) -> ComposeResult:
        """Put the parts below each other."""
        yield Horizontal(self._head, self._clock, id="top")
        yield self._gpus
        yield self._listing
        yield self.note
        yield self.keys

    def on_mount(self) -> None:
        """Let keys go to the listing."""
        self._jobs.focus()

    def on_resize(self, event: Resize) -> None:
        """Arrange everything for the new size."""
        super().on_resize(event)
        self._draw()

    @property
    def selected(self) -> Item | None:
        """The selected row."""
        return (self._queue if self._at_queue else self._jobs).selected

    @property
    def needs_all(self) -> bool:
        """Whether more than the first jobs of the queue have to be known."""
        is_usual = self.wanted == Filter() and self._order == Sort()
        return not is_usual or self._queue.is_near_end

    def cover(self, *, is_covered: bool) -> None:
        """Draw nothing from now on, or what was seen meanwhile."""
        self._is_covered = is_covered
        self._draw()

    def see(self, status: StatusView, at: float) -> None:
        """Show the present state of the machine."""
        self._status, self._now = status, at
        # The daemon may be another machine's, by a forwarded socket.
        self._busy = self._host.see() if status.host == gethostname() else ""
        for gpu in status.gpus:
            self._trends.setdefault(gpu.uuid, Trends()).see(gpu, at)
        self._draw()

    def fill(self, histories: list[GpuHistoryView]) -> None:
        """Take in the last minutes before the start."""
        for history in histories:
            trends = self._trends.setdefault(history.gpu, Trends())
            begin = datetime.fromisoformat(history.begins_at).timestamp()
            trends.utilization.fill(begin, history.step, on_average(history, "utilization"))
            if total := history.total:
                amounts = on_average(history, "used")
                used = [None if value is None else 100 * value / total for value in amounts]
                trends.memory.fill(begin, history.step, used)
        self._draw()

    def filter_by(self, wanted: Filter) -> None:
        """Show only what matches."""
        self.wanted = wanted
        self._draw()

    def action_sort(self, step: int) -> None:
        """Sort by another column."""
        self._order = self._order.other(step)
        self._draw()
        self.say(f"sorted by {self._order.column}")

    def action_sort_by(self, column: SortColumn) -> None:
        """Sort by one column; the key again turns the order around."""
        self._order = self._order.by(column)
        self._draw()

    def action_reverse(self) -> None:
        """Turn the order around."""
        self._order = Sort(self._order.column, not self._order.reverse)
        self._draw()

    def action_mine(self) -> None:
        """Show only the user's own rows, or all again."""
        mine = None if self.wanted.user == self._user else self._user
        self.filter_by(Filter(mine, self.wanted.gpu, self.wanted.text))

    def action_clear(self) -> None:
        """Show all rows."""
        self.filter_by(Filter())

    def action_side(self) -> None:
        """Go to the other part of the listing."""
        self._at_queue = not self._at_queue
        self._draw()

    def on_jobs_clicked(self, message: Jobs.Clicked) -> None:
        """Go to the part that was clicked."""
        if (message.jobs is self._queue) is not self._at_queue:
            self.action_side()

    def on_jobs_left(self, message: Jobs.Left) -> None:
        """Go on to the part below or above."""
        if (message.by > 0) is not self._at_queue and not self._is_wide:
            self.action_side()

    @property
    def _is_wide(self) -> bool:
        return self.size.width >= _WIDE

    def _draw(self) -> None:
        # The focus that drawing sets would have the screen above painted anew.
        if self._status is None or not self.size.width or self._is_covered:
            return
        status = self._status
        now = datetime.fromtimestamp(self._now).astimezone()
        found = sections(status, self.wanted, self._order)
        self._head.show([self._title(status)])
        self._clock.show([((f"{now:%H:%M:%S}", "dim"),)])
        self._draw_gpus(status)
        self._draw_rows(found, status, now)

    def _draw_gpus(self, status: StatusView) -> None:
        arranged = layout(len(status.gpus), self.size.width, self.size.height)
        shown = shown_gpus(status, self._trends)
        lines = gpu_lines(shown, arranged, self._now)
        if len(lines) > (most := most_lines(self.size.height)):
            hidden = sum(number % len(lines) >= most - 1 for number in range(len(shown)))
            lines = [*lines[: most - 1], ((f"    and {hidden} more GPUs", "dim"),)]
        self._set_height(self._gpus, len(lines))
        self._gpus.show(lines)

    def _draw_rows(self, found: list[Section], status: StatusView, now: datetime) -> None:
        queue = [section for section in found if section.kind == "queue"]
        jobs = [section for section in found if section.kind != "queue"]
        self._arrange(lines_of(jobs), lines_of(queue))
        for each in (self._jobs, self._queue):
            each.is_small = self.size.height < SMALL
        labels = labels_of(status.gpus)
        self._jobs.show_sections(jobs, labels, self._order, now)
        self._queue.show_sections(queue, labels, self._order, now)

    def _arrange(self, jobs: int, queue: int) -> None:
        """Put the queue beside or below the jobs; each gets half of the lines if it needs them.

        On a small screen, the part with the selected row is shown.
        """
        self._at_queue = self._at_queue and queue > 0
        lines = self.size.height - 2 - len(self._gpus.lines)
        both = queue > 0 and (self._is_wide or self.size.height >= SMALL)
        self._listing.set_class(self._is_wide, "beside")
        self._jobs.display = both or not self._at_queue
        self._queue.display = both or self._at_queue
        share = max(lines - queue, lines // 2)
        is_below = both and not self._is_wide
        self._set_height(self._jobs, min(jobs, share) if is_below else "1fr")
        listing = self._queue if self._at_queue else self._jobs
        if not listing.has_focus:
            listing.focus()

    def _set_height(self, widget: Lines, height: int | str) -> None:
        if str(widget.styles.height) != str(height):
            widget.styles.height = height

    def _title(self, status: StatusView) -> Line:
        """Return the first line: the machine, and how many jobs it has."""
        waiting = [job for job in status.jobs if job.state == "queued"]
        count = max(status.waiting or 0, count_of(waiting))
        mine = sum(each.jobs for each in status.waiting_by_user if each.user == self._user)
        running = [job for job in status.jobs if job.state != "queued"]
        own = sum(job.user == self._user for job in running)
        right = f"{counts(len(running), count, own, mine)}  "
        gpus = [(index_of(gpu), model(gpu.name, gpu.memory.total)) for gpu in status.gpus]
        left = f"{clean(status.host)} · {models(gpus) or 'no GPUs'}"
        if self._busy:
            left += f" · {self._busy}"
        if status.driver:
            left += f" · driver {clean(status.driver)}"
        if status.closed is not None:
            left += f"  no job starts: {clean(status.closed)}"
        width = self.size.width - _CLOCK
        if len(right) > width:
            right = f"{counts(len(running), count, 0, 0)}  "
        space = width - len(right) - 2
        if space <= 0:
            return ((right, ""),)
        return apart(((shorten(left, space), "title"),), ((right, ""),), width)
