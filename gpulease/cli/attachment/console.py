"""Our three streams while attached, and the terminal that they may be.

Knows nothing of jobs: what is shown and typed here is for others to make sense of.

The standard streams of `run`: bytes out with a bound on what waits, bytes in while wanted.

Nothing here blocks, and no stream that we were given is made non-blocking, since that would be so
for everyone who shares it, shell and all. A pipe is opened once more, for ourselves, to be written
without blocking; where that may not be, only as much as poll(2) vouches for is written.
"""

import errno
import fcntl
import os
import select
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpulease.cli.attachment.keyboard import Keyboard, Use
from gpulease.cli.attachment.mode import AttachMode
from gpulease.cli.attachment.terminal import ControllingTerminal, Modes
from gpulease.cli.caller import is_ours
from gpulease.cli.signals import Signals
from gpulease.wire.frames import FrameKind
from gpulease.write_buffer import ROOM, Backlog, Conduit, Piece

PIECE = 256 * 1024
"""Bytes read from stdin at once, and kept for a slow reader before more are refused."""
_ROOM = 4096
"""Bytes that a pipe takes without blocking where poll says that it is writable (PIPE_BUF)."""


class Outlet:
    """One of our own output streams, and what waits to be written there."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.broken = False
        """Nothing can be written there any more."""
        self.trouble: str | None = None
        """Why it broke, where that is not that nobody wants to read."""
        self.was_terminal = os.isatty(handle)
        """Whether it was one when we began: one that is gone does not say so."""
        self.mid_line = False
        """What was put last did not end its line."""
        self._waiting = Backlog()
        self._is_file = _is(handle, stat.S_ISREG)
        self._way = _reopened(handle) if _is(handle, stat.S_ISFIFO) else None
        self._conduit = Conduit()
        """What is to be written before what waits."""
        self._can_move = self._is_file or self._way is not None

    def move(self, source: int, most: int) -> int | None:
        """Move at most `most` bytes of a socket here, uncopied, and return how many.

        None: they have to be read, and put.
        """
        if self.broken or self.wants_room or not self._can_move:
            return None
        try:
            size = self._conduit.fill(source, most)
        except BlockingIOError:
            return 0
        except OSError:
            self._can_move = False
            return None
        self.write()
        return size or None

    def put(self, piece: bytes) -> None:
        """Keep `piece` for writing; for a broken stream it is dropped."""
        if not self.broken and piece:
            self._waiting.add(piece)
            self.mid_line = not piece.endswith(b"\n")
            if self._is_file:
                self.write()

    @property
    def wants_room(self) -> bool:
        """Whether something waits to be written."""
        return self._waiting.size + self._conduit.held > 0

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more should be fetched."""
        return self._waiting.size + self._conduit.held >= PIECE

    def write(self) -> None:
        """Write what there is room for; call when poll says so."""
        try:
            self._empty_conduit()
            if self._waiting.size:
                self._waiting.write(self._write_some)
        except BlockingIOError:
            return
        except OSError as error:
            # EPIPE from a reader that left, EBADF from `>&-`, ENOSPC, EIO: none of them mends.
            self.broken = True
            unwanted = error.errno in (errno.EPIPE, errno.EBADF)
            self.trouble = None if unwanted else error.strerror
            self._waiting.clear()
            self._conduit.clear()

    def _empty_conduit(self) -> None:
        try:
            while self._conduit.held:
                self._conduit.pass_on(self._target)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Nothing can be spliced here, as to a file that is open for appending.
            self._can_move = False
            self._waiting.add(self._conduit.read())

    @property
    def _target(self) -> int:
        return self.handle if self._way is None else self._way

    def _write_some(self, pieces: list[Piece]) -> int:
        if self._is_file or self._way is not None:
            return os.writev(self._target, pieces)
        return os.write(self.handle, pieces[0][:_ROOM])


def _is(handle: int, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(os.fstat(handle).st_mode)
    except OSError:
        return False


def _reopened(handle: int) -> int | None:
    try:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return None  # not even ours to write
        return os.open(f"/proc/self/fd/{handle}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # another user's, or without a reader by now


class Inlet:
    """Our own standard input."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.ended = False
        self.is_terminal = os.isatty(handle)
        self.conduit = Conduit()
        self._can_move = _is(handle, stat.S_ISREG) or _is(handle, stat.S_ISFIFO)

    def fill(self) -> int | None:
        """Take what is there into the conduit, which is empty; return how much it is.

        None: it has to be read. `ended` is set at the end of it.
        """
        if not self._can_move:
            return None
        try:
            size = self.conduit.fill(self.handle, ROOM)
        except BlockingIOError:
            return 0
        except OSError:
            self._can_move = False
            return None
        self.ended = not size
        return size

    @property
    def is_ours(self) -> bool:
        """Whether we may read: a terminal belongs to the job in its foreground."""
        return not self.is_terminal or is_ours(self.handle)

    def read(self) -> bytes:
        """Return what is there; call when poll says so. `ended` is set at the end of it."""
        try:
            piece = os.read(self.handle, PIECE)
        except BlockingIOError:
            return b""
        except OSError as error:
            # EIO from a terminal means that we went into the background just now, or that the
            # terminal is gone; the latter comes with a SIGHUP of its own.
            self.ended = not (self.is_terminal and error.errno == errno.EIO)
            return b""
        self.ended = not piece
        return piece


_PATIENCE = 1.0
"""Seconds that a terminal may take over what should be seen before it is given back."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A terminal that is read key by key."""

    terminal: ControllingTerminal
    board: Keyboard


class Console:
    """Standard input, output and error; `say` is how to speak where no terminal is held."""

    def __init__(
        self, manner: AttachMode, handles: tuple[int, int, int], say: Callable[[str], None]
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
            terminal = ControllingTerminal(handles[0], verbatim=manner.on_terminal)
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
