"""The screen of one job: its details and events, its memory against its lease, and its output."""

from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize

from gpulease.cli.chart import Times, job_layers, memory_chart
from gpulease.cli.job_page import page
from gpulease.cli.tables import draw
from gpulease.cli.top.lines import Line, Lines, Terminal, styled
from gpulease.cli.top.poll import OutputFollower
from gpulease.cli.top.screens import TopScreen
from gpulease.client import Client
from gpulease.drawing.words import clean, id_of, instant, label, labels_of, named
from gpulease.wire.history import JobGpuSeriesView, JobMemoryView
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import StatusView

_OUTPUT_EVERY_S = 0.5
_WIDE, _HIGH = 120, 30
"""From this size on, all panes are shown at once."""
_CHART_ROWS = 12


class Pane(Lines, can_focus=True):
    """Lines that can be scrolled, under a title; may stay at the end."""

    DEFAULT_CSS = "Pane { height: 1fr; width: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "scroll(-1000000)", show=False),
        Binding("end", "scroll(1000000)", show=False),
    ]

    def __init__(self, title: str, terminal: Terminal, *, follows: bool = False) -> None:
        super().__init__(terminal, id=title)
        self._title = title
        self._content: Sequence[Line] = ()
        self._offset = 0
        self._at_end = follows

    def show_content(self, content: Sequence[Line]) -> None:
        """Show these lines from where they were scrolled to."""
        self._content = content
        self.action_scroll(len(content) if self._at_end else 0)

    def action_scroll(self, by: int) -> None:
        """Scroll down by some lines; up, if below zero."""
        room = max(1, self.size.height - 1)
        last = max(0, len(self._content) - room)
        self._offset = max(0, min(self._offset + by, last))
        self._at_end = self._at_end if not by else by > 0 and self._offset == last
        below = len(self._content) - self._offset - room
        more = f"  {below} more below" if below > 0 else ""
        title: Line = (
            (f"{self._title.upper()}", "title" if self.has_focus else "heading"),
            (more, "dim"),
        )
        self.show([title, *self._content[self._offset : self._offset + room]])

    def action_page(self, by: int) -> None:
        """Scroll by a screen."""
        self.action_scroll(by * max(1, self.size.height - 2))

    def on_resize(self, _event: Resize) -> None:
        """Draw for the new size."""
        self.show_content(self._content)

    def on_focus(self) -> None:
        """Mark the title."""
        self.action_scroll(0)

    def on_blur(self) -> None:
        """Take the mark away."""
        self.action_scroll(0)


class JobScreen(TopScreen):
    """Shows one job until it is left."""

    DEFAULT_CSS = "JobScreen #right { width: 1fr; } JobScreen #memory { height: auto; }"
    KEYS = "Esc back  Tab next pane  c cancel  e extend  k keep  a attach  ? help"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,left,backspace", "back", show=False),
        Binding("tab", "pane(1)", show=False, priority=True),
        Binding("shift+tab", "pane(-1)", show=False, priority=True),
    ]

    def __init__(self, job: JobView, client: Client, terminal: Terminal) -> None:
        super().__init__(terminal)
        self.job = job
        self._memory_view: JobMemoryView | None = None
        self._labels: dict[str, str] = {}
        self._now = instant(job.submitted_at)
        self._terminal = terminal
        self._head = Lines(terminal, id="head")
        self._details = Pane("details", terminal)
        self._memory = Pane("memory", terminal)
        self._output = Pane("output", terminal, follows=True)
        self._client = client
        self._follower: OutputFollower | None = None
        self._shown_pane = 0

    def compose(self) -> ComposeResult:
        """Put the details on the left; memory and output on the right."""
        yield self._head
        yield Horizontal(self._details, Vertical(self._memory, self._output, id="right"))
        yield self.note
        yield self.keys

    def on_mount(self) -> None:
        """Follow the output."""
        if self.job.kind == "run":
            self._follower = OutputFollower(self._client, self.job.id)
            self.set_interval(_OUTPUT_EVERY_S, self._take_output)
        self._panes()[0].focus()

    def on_unmount(self) -> None:
        """Stop following the output."""
        if self._follower is not None:
            self._follower.stop()

    def on_resize(self, event: Resize) -> None:
        """Show all panes, or one of them."""
        super().on_resize(event)
        self._arrange()

    def see(
        self, job: JobView, memory: JobMemoryView | None, status: StatusView, now: datetime
    ) -> None:
        """Show the present state of the job."""
        self.job, self._labels, self._now = job, labels_of(status.gpus), now
        self._memory_view = memory or self._memory_view
        self._draw()

    def action_back(self) -> None:
        """Leave the job."""
        self.dismiss(None)

    def action_pane(self, by: int) -> None:
        """Go to the next pane."""
        self._shown_pane = (self._shown_pane + by) % len(self._panes())
        self._arrange()
        self._panes()[self._shown_pane].focus()

    def _panes(self) -> list[Pane]:
        return [self._details, self._memory, self._output]

    def _arrange(self) -> None:
        all_fit = self.size.width >= _WIDE and self.size.height >= _HIGH
        for number, pane in enumerate(self._panes()):
            pane.display = all_fit or number == self._shown_pane
        self.query_one("#right").display = all_fit or self._shown_pane > 0
        self._memory.styles.height = _CHART_ROWS + 4 if all_fit else "1fr"
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        job = self.job
        head = f"job {id_of(job)}  {named(job)}  {clean(job.user)}  {label(job)}"
        self._head.show([((head, "title"),)])
        width = max(20, self._details.size.width - 1)
        text = draw(page(job, self._now, self._labels)[1:], width, colour=self._terminal.colour)
        self._details.show_content(styled(text))
        self._memory.show_content(self._charts())

    def _charts(self) -> list[Line]:
        view = self._memory_view
        if view is None or not view.gpus:
            return [(("nothing has been recorded yet", "dim"),)]
        room = self._memory.size.height - 1
        height = max(6, room // len(view.gpus) - 2)
        return [line for gpu in view.gpus for line in self._chart(view, gpu, height)]

    def _chart(self, view: JobMemoryView, gpu: JobGpuSeriesView, height: int) -> list[Line]:
        layers, limit = job_layers(gpu)
        times = Times(instant(view.begins_at), view.step, self._now.tzinfo)
        text = memory_chart(
            layers,
            limit,
            times,
            width=max(20, self._memory.size.width - 1),
            height=height,
            colour=self._terminal.colour,
            blocks=self._terminal.utf8,
        )
        return [((f"GPU {clean(gpu.label)}", "dim"),), *styled(text)]

    def _take_output(self) -> None:
        if self._follower is not None and (lines := self._follower.news()) is not None:
            self._output.show_content([((line, ""),) for line in lines])
