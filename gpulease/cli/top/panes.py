"""The panes of a job in `gpulease top`: lines that can be scrolled, and its processes."""

from collections.abc import Collection, Mapping, Sequence
from textwrap import wrap
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message

from gpulease.cli.top.lines import Line, Lines, Terminal, fitted, plain
from gpulease.cli.top.processes import Process, ProcessTable, Reading, Use, tree


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
        self._title = title.upper()
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
        shown = self._content[self._offset : self._offset + room]
        self.show([self._title_line(len(self._content) - self._offset - room), *shown])

    def _title_line(self, below: int, hint: str = "") -> Line:
        more = f"  {below} more below" if below > 0 else ""
        return (self._title, "title" if self.has_focus else "heading"), (more + hint, "dim")

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


class ProcessPane(Pane):
    """The processes of a job, of which one is selected, or the environment of one of them."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", show=False)]

    class Opened(Message):
        """A process was opened."""

        def __init__(self, process: Process | None) -> None:
            super().__init__()
            self.process = process
            """None: the kernel hides it, it has ended, or it is on another machine."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__("processes", terminal)
        self._reading = Reading()
        self._uses: Mapping[int, Use] = {}
        self._rows: list[tuple[int, int]] = []
        """Pids and their depths."""
        self._unknown = ""
        """Why none is known; empty if the job has none."""
        self._selected = 0
        self._environment: list[str] | None = None
        """None: the list is shown."""

    def show_processes(
        self, pids: Collection[int], uses: Mapping[int, Use], reading: Reading, unknown: str = ""
    ) -> None:
        """Show the processes of the job, or why none is known; the selected one stays selected."""
        self._unknown = unknown
        selected = self._rows[self._selected][0] if self._rows else None
        self._uses, self._reading = uses, reading
        self._rows = tree({*pids, *uses}, reading.processes)
        places = (place for place, each in enumerate(self._rows) if each[0] == selected)
        self._selected = next(places, self._selected)
        self.action_scroll(0)

    def show_environment(self, process: Process, variables: list[str]) -> None:
        """Show the environment of a process in place of the list."""
        self._environment = variables
        self._title = f"ENVIRONMENT OF {process.pid}"
        self._offset = 0
        self._wrap()

    def leave_environment(self) -> bool:
        """Show the list again; return whether an environment was shown."""
        was_open, self._environment = self._environment is not None, None
        self._offset = 0
        self.action_scroll(0)
        return was_open

    def action_open(self) -> None:
        """Ask for the environment of the selected process."""
        if self._environment is None and self._rows:
            pid, _ = self._rows[self._selected]
            self.post_message(self.Opened(self._reading.processes.get(pid)))

    def action_scroll(self, by: int) -> None:
        """Select a process further down, or scroll an environment."""
        if self._environment is not None:
            super().action_scroll(by)
            return
        self._selected = max(0, min(self._selected + by, len(self._rows) - 1))
        room = max(1, self.size.height - 2)
        self._offset = max(0, min(self._offset, self._selected, len(self._rows) - room))
        self._offset = max(self._offset, self._selected - room + 1)
        if self._unknown and not self._rows:
            self._title = "PROCESSES"
            self.show([self._title_line(0), ((self._unknown, "warn"),)])
            return
        self._title = f"PROCESSES {len(self._rows)}"
        table = ProcessTable(self._reading, self._uses, self.size.width)
        lines = [table.line(*each) for each in self._rows[self._offset : self._offset + room]]
        if self.has_focus and lines:
            place = self._selected - self._offset
            lines[place] = ((plain(fitted(lines[place], self.size.width)), "cursor"),)
        below = len(self._rows) - self._offset - room
        self.show([self._title_line(below, "  Enter: environment"), table.heading(), *lines])

    def on_resize(self, _event: Resize) -> None:
        """Draw for the new size."""
        self._wrap()

    def _wrap(self) -> None:
        width = max(20, self.size.width)
        lines = (
            wrap(each, width, subsequent_indent="  ", drop_whitespace=False, break_on_hyphens=False)
            for each in self._environment or ()
        )
        self.show_content([((line, ""),) for each in lines for line in each])
