"""The standard streams of this command while it is attached, and the terminal that they may be.

Output that waits is bounded, and input is read only while the job takes it. Nothing here blocks.
The streams that this command got are not made non-blocking, since that would affect the shell and
all others that share them. A pipe is opened a second time to write to it without blocking. Where
that is not possible, only as many bytes are written as poll(2) guarantees room for.

`AttachMode` says what they are used for. This module knows nothing else of jobs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from gpulease.cli.attachment.keyboard import Keyboard, Use, name_of
from gpulease.cli.attachment.terminal import ControllingTerminal, Modes
from gpulease.cli.caller import is_ours
from gpulease.event_loop import EventLoop, WriteBuffer
from gpulease.record import record
from gpulease.wire.frames import FrameKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulease.cli.signals import Signals
    from gpulease.event_loop import Piece

PIECE = 256 * 1024
"""Bytes read from stdin at once, and kept for a slow reader before no more are fetched."""
_PIECE = 4096
"""Bytes that a writable pipe takes without blocking (PIPE_BUF)."""


class Outlet:
    """One of this command's output streams, and what waits to be written to it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.broken = False
        """Nothing more can be written."""
        self.trouble: str | None = None
        """Why writing failed, unless the reader has closed the stream."""
        self.was_terminal = os.isatty(handle)
        """Whether it was a terminal at the start; one that has hung up does not say so."""
        self.mid_line = False
        """The last line is incomplete."""
        self._waiting = WriteBuffer()
        self._is_file = _is(handle, stat.S_ISREG)
        self._reopened = _reopen(handle) if _is(handle, stat.S_ISFIFO) else None

    def put(self, piece: bytes) -> None:
        """Queue `piece`; it is dropped if the stream is broken."""
        if not self.broken and piece:
            self._waiting.add(piece)
            self.mid_line = not piece.endswith(b"\n")
            if self._is_file:
                self.write()

    @property
    def wants_room(self) -> bool:
        """Whether something waits to be written."""
        return self._waiting.size > 0

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more should be fetched."""
        return self._waiting.size >= PIECE

    def write(self) -> None:
        """Write what there is room for; call this when the stream is writable."""
        try:
            if self._waiting.size:
                self._waiting.write_once(self._write_some)
        except BlockingIOError:
            return
        except OSError as error:
            # EPIPE, EBADF after `>&-`, ENOSPC or EIO: all of them are final.
            self.broken = True
            self.trouble = None if error.errno == errno.EPIPE else error.strerror
            self._waiting.clear()

    def _write_some(self, pieces: list[Piece]) -> int:
        if self._reopened is not None:
            return os.writev(self._reopened, pieces)
        if self._is_file:
            return os.writev(self.handle, pieces)
        return os.write(self.handle, pieces[0][:_PIECE])


def _is(handle: int, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(os.fstat(handle).st_mode)
    except OSError:
        return False


def _reopen(handle: int) -> int | None:
    """Open a pipe a second time, without blocking; None where that is not possible."""
    try:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return None  # it cannot be written
        return os.open(f"/proc/self/fd/{handle}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # it belongs to another user, or its reader has closed it


class Inlet:
    """This command's standard input."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.ended = False
        self.is_terminal = os.isatty(handle)

    @property
    def is_ours(self) -> bool:
        """Whether this command may read: a terminal belongs to its foreground process group."""
        return not self.is_terminal or is_ours(self.handle)

    def read(self) -> bytes:
        """Return what has arrived, and note the end; call this when the stream is readable."""
        try:
            piece = os.read(self.handle, PIECE)
        except BlockingIOError:
            return b""
        except OSError as error:
            # EIO means that this command has just gone to the background, or that the terminal has
            # hung up. The latter also sends SIGHUP.
            self.ended = not (self.is_terminal and error.errno == errno.EIO)
            return b""
        self.ended = not piece
        return piece


_SETTLE_WITHIN_S = 1.0
"""Time for a terminal to take what should be seen before it is given back."""


@record(frozen=True)
class AttachMode:
    """How a command is attached to a job."""

    label: str
    """The job as people see it: 17, or 17_3."""
    started: bool = True
    """This command started the job: our signals and input belong to the job."""
    watches: bool = False
    """No input and no signal reaches the job."""
    on_terminal: bool = False
    """The job has a pseudo-terminal, which our terminal shows."""
    keys: bytes = b""
    """The keys that detach."""

    @property
    def role(self) -> str:
        """The role in the HELLO frame."""
        return "watch" if self.watches else "attach"

    @property
    def passes_input(self) -> bool:
        """Whether our standard input is that of the job."""
        return not self.watches and (self.started or self.on_terminal)

    @property
    def reads_keys(self) -> bool:
        """Whether our terminal, if there is one, is read key by key."""
        return self.on_terminal or not self.started

    @property
    def use(self) -> Use:
        """What the keyboard is used for."""
        if self.watches:
            return Use.WATCH
        return Use.WRITE if self.passes_input else Use.COMMAND

    @property
    def greeting(self) -> str:
        """Which keys do what."""
        if self.watches:
            return f"gpulease: watching job {self.label}; Ctrl-C stops watching"
        leaves = [f"{name_of(self.keys)} detaches"] if self.keys else []
        return "; ".join(
            [f"gpulease: attached to job {self.label}", "Ctrl-C interrupts it", *leaves]
        )


@record(frozen=True)
class Keys:
    """A terminal that is read key by key."""

    terminal: ControllingTerminal
    board: Keyboard


class Console:
    """Standard input, output and error. `say` shows a message while no terminal is held."""

    def __init__(
        self,
        mode: AttachMode,
        handles: tuple[int, int, int],
        say: Callable[[str], None],
        lines_of: Callable[[str], list[str]],
    ) -> None:
        """`lines_of` breaks a message into lines of the terminal."""
        self.stdin = Inlet(handles[0])
        self.stdout, self.stderr = Outlet(handles[1]), Outlet(handles[2])
        self.keys: Keys | None = None
        self.writes = not mode.watches
        """What is typed here reaches the job, and the job's terminal has the size of this one."""
        self._on_terminal = mode.on_terminal
        self._modes = Modes() if mode.on_terminal else None
        self._say = say
        self._lines_of = lines_of
        self._spoken: Outlet | None = None
        """Where messages go while the terminal is held."""
        if mode.reads_keys and self.stdin.is_terminal:
            terminal = ControllingTerminal(handles[0], verbatim=mode.on_terminal)
            self.keys = Keys(terminal, Keyboard(mode.keys, terminal.controls, mode.use))
            if os.isatty(handles[2]):
                self._spoken = self.stdout if os.isatty(handles[1]) else self.stderr
        elif not mode.passes_input:
            self.stdin.ended = True

    # Out.

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that no more should be fetched."""
        return self.stdout.is_full or self.stderr.is_full

    def show(self, kind: FrameKind, piece: bytes) -> None:
        """Write a piece of the job's output, as soon as there is room for it."""
        if kind == FrameKind.STDERR:
            self.stderr.put(piece)
            return
        self.stdout.put(piece)
        if self._modes is not None:
            self._modes.note(piece)
        if self.keys is not None:
            self.keys.board.heard(piece)

    def say(self, text: str) -> None:
        """Show a message of this command on a separate line."""
        if self._spoken is None:
            self._say(text)
        else:
            end = "\r\n" if self._on_terminal else "\n"
            fresh = end if self._spoken.mid_line else ""
            lines = end.join(self._lines_of(text))
            self._spoken.put(f"{fresh}{lines}{end}".encode(errors="replace"))

    def tidy(self) -> None:
        """Reset the modes of the terminal that the job has set and cannot reset."""
        if self._modes is not None and (undone := self._modes.undo()):
            self.stdout.put(undone)
            self.stdout.mid_line = True

    def watch(self, loop: EventLoop) -> None:
        """Write in `loop` what waits."""
        for outlet in (self.stdout, self.stderr):
            loop.on_writable(outlet.handle, outlet.write if outlet.wants_room else None)

    def drain(self, signals: Signals) -> None:
        """Write all that waits. A signal ends the wait for a reader that does not read."""
        caught: list[object] = []
        loop = EventLoop()
        loop.on_readable(signals.fileno(), lambda: caught.extend(signals.take()))
        self._write_all(loop, caught)

    def settle(self) -> None:
        """Write what waits, as far as it can be written soon."""
        is_late: list[object] = []
        loop = EventLoop()
        loop.set_timer_after("late", _SETTLE_WITHIN_S, lambda: is_late.append(True))
        self._write_all(loop, is_late)

    def _write_all(self, loop: EventLoop, stop: list[object]) -> None:
        """Write all that waits, or until something is in `stop`."""
        while (self.stdout.wants_room or self.stderr.wants_room) and not stop:
            self.watch(loop)
            loop.step()

    def only_watch(self) -> None:
        """Pass on no more input: another client writes to the job."""
        self.writes = False
        if self.keys is None:
            self.stdin.ended = True
        elif self._on_terminal:
            self.keys.board.use = Use.WATCH

    # The terminal.

    @property
    def window(self) -> dict[str, int] | None:
        """Rows and columns of the terminal, if the job has a terminal too."""
        if self.keys is None or not self._on_terminal or not self.writes:
            return None
        size = self.keys.terminal.size
        return {"rows": size[0], "columns": size[1]} if size else None

    def hold(self) -> bool:
        """Take the terminal, whose foreground this is; return whether it was not held before."""
        if self.keys is None or self.keys.terminal.is_held:
            return False
        self.keys.terminal.hold()
        return True

    def hold_again(self) -> None:
        """Take the terminal again after this command was stopped."""
        if self.keys is not None:
            self.keys.terminal.hold_again()

    def give_back(self) -> None:
        """Leave the terminal as it was found."""
        if self.keys is not None:
            self.keys.terminal.give_back()
