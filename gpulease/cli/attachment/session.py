"""Attach this command to a job: pass on its output, and its input and signals, until it ends.

At most a piece of each stream is held, so a slow reader slows the job down and nothing is lost.
`input` interprets the input, `shim_messages` the frames of the shim.
"""

from __future__ import annotations

from gpulease.cli.attachment import messages
from gpulease.cli.attachment.console import Console
from gpulease.cli.attachment.input import Input, Suspension
from gpulease.cli.attachment.mode import Left
from gpulease.cli.attachment.shim_connection import ShimConnection
from gpulease.cli.attachment.shim_messages import ShimMessages
from gpulease.cli.signals import DEADLY, WHILE_ATTACHED, Killed
from gpulease.client.unix_socket import dial
from gpulease.event_loop import EventLoop
from gpulease.record import record, replace
from gpulease.wire.frames import FrameKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from _socket import socket
    from collections.abc import Callable

    from gpulease.cli.attachment.mode import AttachMode
    from gpulease.cli.exit_codes import JobEnd
    from gpulease.cli.signals import Signals
else:
    import _signal as signal

_CHECK_FOREGROUND_EVERY_S = 0.5
_SOCKET = "socket"


@record(frozen=True)
class Hooks:
    """What an attachment needs from the rest of the command."""

    cancel: Callable[[], str | None]
    """Cancel the job, and return why that failed."""
    say: Callable[[str], None]
    lines_of: Callable[[str], list[str]]
    """Break a message into lines of the terminal."""


def attach(
    directory: str,
    signals: Signals,
    hooks: Hooks,
    mode: AttachMode,
    handles: tuple[int, int, int] = (0, 1, 2),
) -> JobEnd | None:
    """Stay with the job whose socket is in `directory`.

    Returns:
        How the job ended; None if the connection was lost before.

    Raises:
        OSError: nothing listens there.
        Left: SIGHUP arrived, or another signal that ends an attachment.
        Killed: a signal arrived that ends this command; the terminal was given back.
        Detached: the detach keys were typed.
        AttachRefused: the shim refused the connection.
    """
    with dial(f"{directory}/{_SOCKET}") as sock, signals.also(*WHILE_ATTACHED, *DEADLY):
        return _Attachment(sock, signals, hooks, mode, handles).run()


class _Attachment:
    def __init__(
        self,
        sock: socket,
        signals: Signals,
        hooks: Hooks,
        mode: AttachMode,
        handles: tuple[int, int, int],
    ) -> None:
        self._signals = signals
        self._mode = mode
        self._loop = EventLoop()
        self._loop.on_readable(signals.fileno(), self._take_signals)
        self._console = Console(mode, handles, hooks.say, hooks.lines_of)
        self._connection = ShimConnection(sock)
        self._suspension = Suspension(mode, self._connection, self._console, signals)
        parts = (mode, self._connection, self._console, self._suspension, self._loop)
        self._input = Input(*parts, hooks.cancel)
        self._messages = ShimMessages(*parts)

    def run(self) -> JobEnd | None:
        try:
            self._greet()
            while not (self._messages.ended or self._connection.is_closed):
                self._watch()
                self._loop.step()
                if self._console.stdout.broken:
                    self._messages.report_broken_pipe()
            if self._messages.ending is None:
                self._console.tidy()
            self._console.drain(self._signals)
            self._messages.note_lost_output()
            self._console.settle()
        finally:
            self._console.give_back()
        ending = self._messages.ending
        return ending and replace(ending, ctrl_c_typed=self._input.ctrl_c_typed)

    def _greet(self) -> None:
        size = self._console.window
        window = {"window": size} if size else {}
        self._connection.put_json(FrameKind.HELLO, role=self._mode.role, **window)
        if self._mode.started:
            return
        if self._mode.on_terminal and self._console.writes:
            # A full-screen program then redraws its screen.
            self._connection.signal(signal.SIGWINCH)
        if self._console.keys is not None:
            self._console.say(messages.attached(self._mode))
        elif self._mode.passes_input:
            self._console.say(messages.input_as_it_is(self._mode.label))

    def _watch(self) -> None:
        """Watch the streams that can be used now."""
        self._watch_input()
        self._console.watch(self._loop)
        self._connection.watch(self._loop, None if self._console.is_full else self._receive)

    def _watch_input(self) -> None:
        stdin, connection = self._console.stdin, self._connection
        wanted = not stdin.ended and not connection.is_deaf and connection.has_room
        readable = wanted and stdin.is_ours
        if readable and self._console.hold():
            self._suspension.tell_window()
        self._loop.on_readable(stdin.handle, self._input.take if readable else None)
        self._loop.cancel_timer("foreground")
        if wanted and not readable:
            self._loop.set_timer_after("foreground", _CHECK_FOREGROUND_EVERY_S, lambda: None)

    def _receive(self) -> None:
        for kind, payload in self._connection.receive():
            self._messages.take(kind, payload)

    def _take_signals(self) -> None:
        for signum in self._signals.take():
            self._take_signal(signum)

    def _take_signal(self, signum: int) -> None:
        match signum:
            case signal.SIGHUP:
                raise Left(signum)
            case signal.SIGWINCH:
                self._suspension.tell_window()
            case signal.SIGCONT:
                self._suspension.go_on()
            case signal.SIGTSTP:
                self._suspension.stop_with_job()
            case _ if signum in DEADLY:
                self._console.tidy()
                self._console.settle()
                raise Killed(signum)
            case _ if self._is_not_for_the_job(signum):
                raise Left(signum)
            case signal.SIGINT:
                self._input.interrupt()
            case _:
                self._connection.signal(signum)

    def _is_not_for_the_job(self, signum: int) -> bool:
        joined = not self._mode.started
        return self._mode.watches or (joined and signum == signal.SIGTERM)
