"""The standard input of this command, and what it means: keys, or the bytes of a pipe.

Ctrl-Z stops the job and gives the terminal back to the shell; `fg` continues both.
"""

from __future__ import annotations

import time

from gpulease.cli.attachment import messages
from gpulease.cli.attachment.keyboard import AGAIN_WITHIN
from gpulease.cli.attachment.mode import Detached, Left
from gpulease.cli.signals import can_be_continued
from gpulease.wire.frames import FrameKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from gpulease.cli.attachment.console import Console
    from gpulease.cli.attachment.mode import AttachMode
    from gpulease.cli.attachment.shim_connection import ShimConnection
    from gpulease.cli.signals import Signals
    from gpulease.event_loop import EventLoop
else:
    import _signal as signal

_SENT_WITHIN_S = 1.0
"""Time for the shim to take what should reach it before this command stops or detaches."""
_EXPLAIN_KEYS_AFTER_S = 1.0


class Suspension:
    """Stops and continues this command together with the job."""

    def __init__(
        self, mode: AttachMode, connection: ShimConnection, console: Console, signals: Signals
    ) -> None:
        self._mode = mode
        self._connection = connection
        self._console = console
        self._signals = signals
        self._passed_on = False
        """The signal was passed on to the job, so the job's stop needs no message."""

    @property
    def _is_the_terminal(self) -> bool:
        """Whether this is the job's terminal, so that this command stops with the job."""
        here = self._console.keys is not None
        return here and self._mode.on_terminal and self._console.writes

    def stop_with_job(self) -> None:
        """Act on SIGTSTP."""
        if not (self._mode.passes_input and self._console.writes):
            self.leave_running()
            return
        self._connection.signal(signal.SIGTSTP)
        if not self._is_the_terminal:
            self._passed_on = True
            self._connection.flush(_SENT_WITHIN_S)
            self._signals.stop(group=False)
            self.go_on()

    def note_job_stopped(self) -> None:
        """Act on a stop of the job's main process."""
        if self._passed_on:
            self._passed_on = False
        elif self._is_the_terminal:
            self._stop(messages.stopped(self._mode.label, here=True))
        else:
            self._console.say(messages.stopped(self._mode.label, here=False))

    def leave_running(self) -> None:
        """Stop this command and not the job."""
        self._stop(messages.left_running(self._mode.label))

    def go_on(self) -> None:
        """Continue after a stop; take the terminal only in the foreground."""
        self._console.hold_again()
        self.tell_window()
        if self._mode.passes_input and self._console.writes:
            self._connection.signal(signal.SIGCONT)

    def tell_window(self) -> None:
        """Send the size of the terminal to the job."""
        if window := self._console.window:
            self._connection.put_json(FrameKind.WINDOW, **window)

    def _stop(self, why: str) -> None:
        """Stop this process group until a shell continues it; without a shell, continue."""
        if can_be_continued():
            self._console.say(why)
            self._console.settle()
            self._connection.flush(_SENT_WITHIN_S)
            self._console.give_back()
            self._signals.stop(group=True)
        self.go_on()


class Input:
    """Passes on what is for the job, and acts on the keys of this command."""

    def __init__(
        self,
        mode: AttachMode,
        connection: ShimConnection,
        console: Console,
        suspension: Suspension,
        loop: EventLoop,
        cancel: Callable[[], str | None],
    ) -> None:
        """Read the input of `console` for the job behind `connection`.

        `cancel` cancels the job, and returns why that failed.
        """
        self._mode = mode
        self._connection = connection
        self._console = console
        self._suspension = suspension
        self._loop = loop
        self._request_cancel = cancel
        self._interrupted_at = float("-inf")
        self.ctrl_c_typed = False
        """Ctrl-C was passed on to the job as a key."""

    def take(self) -> None:
        """Take what has arrived; call this when standard input is readable.

        Raises:
            Left: the terminal has hung up.
            Detached: the detach keys were typed.
        """
        stdin = self._console.stdin
        piece = stdin.read()
        if self._console.keys is not None:
            if piece:
                self._press(piece)
            elif stdin.ended:
                raise Left(signal.SIGHUP)
        elif piece:
            self._connection.put(FrameKind.STDIN, piece)
        elif stdin.ended:
            self._connection.put(FrameKind.STDIN_END)

    def interrupt(self) -> None:
        """Interrupt the job; cancel it if this comes twice within a second."""
        again = time.monotonic() - self._interrupted_at < AGAIN_WITHIN
        self._interrupted_at = time.monotonic()
        if not (again and self._cancel()):
            self._connection.signal(signal.SIGINT)

    def _cancel(self) -> bool:
        trouble = self._request_cancel()
        if trouble is not None:
            self._console.say(trouble)
        return trouble is None

    def _press(self, piece: bytes) -> None:
        assert self._console.keys is not None
        board = self._console.keys.board
        pressed = board.press(piece, time.monotonic())
        if pressed.passed:
            self._connection.put(FrameKind.STDIN, pressed.passed)
        self.ctrl_c_typed = self.ctrl_c_typed or pressed.interrupt
        for signum in pressed.signals:
            self.interrupt() if signum == signal.SIGINT else self._connection.signal(signum)
        if pressed.cancel:
            self._cancel()
        self._loop.cancel_timer("keys")
        if board.waits:
            words = messages.awaiting(self._mode.keys)
            self._loop.set_timer_after(
                "keys", _EXPLAIN_KEYS_AFTER_S, lambda: self._console.say(words)
            )
        if pressed.suspend:
            self._suspension.leave_running()
        if pressed.detach:
            self._detach()

    def _detach(self) -> None:
        self._console.tidy()
        self._console.say(messages.detached(self._mode.label))
        self._console.settle()
        self._connection.flush(_SENT_WITHIN_S)
        raise Detached
