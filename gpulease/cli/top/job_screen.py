"""The screen of one job: details and events, memory against the lease, output, and processes."""

from datetime import datetime
from socket import gethostname
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.message import Message

from gpulease.cli.chart import Times, job_layers, memory_chart
from gpulease.cli.job_page import page
from gpulease.cli.tables import draw
from gpulease.cli.top.lines import Line, Lines, Terminal, styled
from gpulease.cli.top.panes import Pane, ProcessPane
from gpulease.cli.top.poll import OutputFollower
from gpulease.cli.top.processes import (
    ProcessReader,
    Reading,
    Result,
    Use,
    uses_of,
)
from gpulease.cli.top.screens import TopScreen
from gpulease.client import Client
from gpulease.drawing.words import clean, id_of, instant, label, labels_of, named
from gpulease.errors import GpuleaseError
from gpulease.wire.history import JobGpuSeriesView, JobMemoryView
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import StatusView

_OUTPUT_EVERY_S = 0.5
_WIDE, _HIGH = 120, 30
"""From this size on, all panes are shown at once."""
_CHART_ROWS = 12


class JobScreen(TopScreen):
    """Shows one job until it is left."""

    DEFAULT_CSS = "JobScreen #right { width: 1fr; } JobScreen #memory { height: auto; }"
    KEYS = "Esc back  Tab next  p processes  c cancel  e extend  k keep  a attach  ? help"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,left,backspace", "back", show=False),
        Binding("tab", "pane(1)", show=False, priority=True),
        Binding("shift+tab", "pane(-1)", show=False, priority=True),
    ]

    class Read(Message):
        """What was asked of /proc has been read."""

        def __init__(self, result: Result) -> None:
            super().__init__()
            self.result = result

    def __init__(
        self, job: JobView, client: Client, terminal: Terminal, *, at_processes: bool = False
    ) -> None:
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
        self._processes = ProcessPane(terminal)
        self._reading = Reading()
        self._uses: dict[int, Use] = {}
        self._reader: ProcessReader | None = None
        self._is_here: bool | None = None
        """Whether the processes are on this machine; None: the daemon has not said it yet."""
        self._client = client
        self._follower: OutputFollower | None = None
        self._shown_pane = len(self._panes()) - 1 if at_processes else 0

    def compose(self) -> ComposeResult:
        """Put the details on the left; memory and output on the right; processes alone."""
        yield self._head
        right = Vertical(self._memory, self._output, id="right")
        yield Horizontal(self._details, right, self._processes)
        yield self.note
        yield self.keys

    def on_mount(self) -> None:
        """Follow the output."""
        if self.job.kind == "run":
            self._follower = OutputFollower(self._client, self.job.id)
            self.set_interval(_OUTPUT_EVERY_S, self._take_output)
        self._panes()[self._shown_pane].focus()

    def on_unmount(self) -> None:
        """Stop following the output, and reading processes."""
        for each in (self._follower, self._reader):
            if each is not None:
                each.stop()

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
        self._uses = uses_of(job, status)
        # The daemon may be another machine's, by a forwarded socket.
        self._is_here = status.host == gethostname()
        self._read_processes()
        self._draw()

    def on_job_screen_read(self, message: Read) -> None:
        """Show what was read."""
        result = message.result
        if isinstance(result, GpuleaseError):
            self.fail(result)
        elif isinstance(result, Reading):
            self._reading = result
            self._draw()
        else:
            self._processes.show_environment(*result)

    def on_process_pane_opened(self, message: ProcessPane.Opened) -> None:
        """Read the environment of a process."""
        if message.process is not None and self._reader is not None:
            self._reader.read(message.process)
        else:
            self.say("nothing more is known here of this process", style="warn")

    def action_back(self) -> None:
        """Leave the environment of a process, or the job."""
        if not self._processes.leave_environment():
            self.dismiss(None)

    def action_processes(self) -> None:
        """Go to the processes."""
        self._processes.leave_environment()
        self._go_to(len(self._panes()) - 1)

    def action_pane(self, by: int) -> None:
        """Go to the next pane."""
        self._go_to((self._shown_pane + by) % len(self._panes()))

    def _go_to(self, pane: int) -> None:
        self._shown_pane = pane
        self._arrange()
        self._panes()[pane].focus()
        self._read_processes()

    def _panes(self) -> list[Pane]:
        return [self._details, self._memory, self._output, self._processes]

    def _read_processes(self) -> None:
        """Read the processes of the job, while they are shown."""
        if self._processes.display and self._is_here and self.job.pids:
            if self._reader is None:
                self._reader = ProcessReader(lambda result: self.post_message(self.Read(result)))
            self._reader.read(self.job.pids)

    def _arrange(self) -> None:
        shown = self._panes()[self._shown_pane]
        is_wide = self.size.width >= _WIDE and self.size.height >= _HIGH
        all_fit = is_wide and shown is not self._processes
        for pane in self._panes():
            pane.display = pane is shown or (all_fit and pane is not self._processes)
        self.query_one("#right").display = all_fit or shown in (self._memory, self._output)
        self._memory.styles.height = _CHART_ROWS + 4 if all_fit else "1fr"
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        job = self.job
        head = f"job {id_of(job)}  {named(job)}  {clean(job.user)}  {label(job)}"
        self._head.show([((head, "title"),)])
        if self._details.display:
            width = max(20, self._details.size.width - 1)
            text = draw(page(job, self._now, self._labels)[1:], width, colour=self._terminal.colour)
            self._details.show_content(styled(text))
        if self._memory.display:
            self._memory.show_content(self._charts())
        if self._processes.display:
            pids = job.pids if self._is_here else None
            unknown = "" if pids or job.state == "ended" else self._why_unknown()
            self._processes.show_processes(pids or (), self._uses, self._reading, unknown)

    def _why_unknown(self) -> str:
        if self._is_here is None:
            return "not known: the daemon has not answered yet"
        if not self._is_here:
            return "none on a GPU; the daemon is on another machine"
        return "shown to the owner of the job" if self.job.processes else ""

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
