"""Our three streams while attached, and the terminal that they may be.

Knows nothing of jobs: what is shown and typed here is for others to make sense of.
"""

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpulease.cli.attaching.keyboard import Keyboard, Use
from gpulease.cli.attaching.manner import Manner
from gpulease.cli.attaching.modes import Modes
from gpulease.cli.attaching.streams import Inlet, Outlet
from gpulease.cli.attaching.terminal import Terminal
from gpulease.cli.signals import Signals
from gpulease.frames import FrameKind

_PATIENCE = 1.0
"""Seconds that a terminal may take over what should be seen before it is given back."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A terminal that is read key by key."""

    terminal: Terminal
    board: Keyboard


class Console:
    """Standard input, output and error; `say` is how to speak where no terminal is held."""

    def __init__(
        self, manner: Manner, handles: tuple[int, int, int], say: Callable[[str], None]
    ) -> None:
        self.stdin = Inlet(handles[0])
        self.stdout, self.stderr = Outlet(handles[1]), Outlet(handles[2])
        self.keys: Keys | None = None
        self.writes = not manner.watches
        """What is typed here reaches the job, and the size of the terminal is the job's."""
        self._on_terminal = manner.on_terminal
        self._modes = Modes() if manner.on_terminal else None
        self._say = say
        self._spoken: Outlet | None = None
        """Where our own words go while the terminal is held."""
        if manner.reads_keys and self.stdin.is_terminal:
            terminal = Terminal(handles[0], verbatim=manner.on_terminal)
            self.keys = Keys(terminal, Keyboard(manner.keys, terminal.controls, manner.use))
            if os.isatty(handles[2]):
                self._spoken = self.stdout if os.isatty(handles[1]) else self.stderr
        elif not manner.passes_input:
            self.stdin.ended = True

    # Out.

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that no more should be fetched."""
        return self.stdout.is_full or self.stderr.is_full

    def show(self, kind: FrameKind, piece: bytes) -> None:
        """Write a piece of the job's output, as soon as there is room for it."""
        if kind is FrameKind.STDERR:
            self.stderr.put(piece)
            return
        self.stdout.put(piece)
        if self._modes is not None:
            self._modes.note(piece)
        if self.keys is not None:
            self.keys.board.heard(piece)

    def outlet(self, kind: FrameKind) -> Outlet | None:
        """Return where output of this kind may go unseen; None: it has to be shown."""
        if self._modes is not None or self.keys is not None:
            return None
        return self.stderr if kind is FrameKind.STDERR else self.stdout

    def say(self, text: str) -> None:
        """Say something ourselves, on a line of its own."""
        if self._spoken is None:
            self._say(text)
        else:
            end = "\r\n" if self._on_terminal else "\n"
            fresh = end if self._spoken.mid_line else ""
            self._spoken.put(f"{fresh}{text}{end}".encode(errors="replace"))

    def tidy(self) -> None:
        """Switch off what the job has switched on: it will not do so itself."""
        if self._modes is not None and (undone := self._modes.undo()):
            self.stdout.put(undone)
            self.stdout.mid_line = True

    def register(self, poller: select.poll) -> None:
        """Poll for room where something waits."""
        for outlet in (self.stdout, self.stderr):
            if outlet.wants_room:
                poller.register(outlet.handle, select.POLLOUT)

    def write(self, ready: dict[int, int]) -> None:
        """Write where there is room."""
        for outlet in (self.stdout, self.stderr):
            if outlet.handle in ready:
                outlet.write()

    def drain(self, signals: Signals) -> None:
        """Write all that waits; a signal ends the wait for a reader who does not read."""
        while self.stdout.wants_room or self.stderr.wants_room:
            poller = select.poll()
            poller.register(signals.fileno(), select.POLLIN)
            self.register(poller)
            ready = dict(poller.poll())
            self.write(ready)
            if signals.fileno() in ready and signals.take():
                return

    def settle(self) -> None:
        """Write what waits, as far as it can be written soon."""
        deadline = time.monotonic() + _PATIENCE
        while self.stdout.wants_room or self.stderr.wants_room:
            poller = select.poll()
            self.register(poller)
            left = deadline - time.monotonic()
            if left <= 0 or not (ready := dict(poller.poll(left * 1000))):
                return
            self.write(ready)

    def only_watch(self) -> None:
        """Pass on nothing more: another terminal writes, or the job's input is not for us."""
        self.writes = False
        if self.keys is None:
            self.stdin.ended = True
        elif self._on_terminal:
            self.keys.board.use = Use.WATCH

    # The terminal.

    @property
    def window(self) -> dict[str, int] | None:
        """Rows and columns of the terminal, where it is the job's as well."""
        if self.keys is None or not self._on_terminal or not self.writes:
            return None
        size = self.keys.terminal.size
        return {"rows": size[0], "columns": size[1]} if size else None

    def hold(self) -> bool:
        """Take the terminal, which is ours; return whether we had not had it."""
        if self.keys is None or self.keys.terminal.is_held:
            return False
        self.keys.terminal.hold()
        return True

    def hold_again(self) -> None:
        """Take the terminal once more, after we were stopped."""
        if self.keys is not None:
            self.keys.terminal.hold_again()

    def give_back(self) -> None:
        """Leave the terminal as it was found."""
        if self.keys is not None:
            self.keys.terminal.give_back()
