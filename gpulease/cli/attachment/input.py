"""What comes in on our standard input, and what it means: keys, a pipe's bytes, their end.

Ctrl-Z: the job stops, its terminal goes back to the shell, and `fg` brings both back.
"""

import signal
import time
from collections.abc import Callable

from gpulease.cli.attachment import messages
from gpulease.cli.attachment.console import Console
from gpulease.cli.attachment.keyboard import AGAIN_WITHIN
from gpulease.cli.attachment.link import Alarms, ShimConnection
from gpulease.cli.attachment.mode import AttachMode, Detached, Left
from gpulease.cli.signals import Signals, can_be_continued
from gpulease.wire.frames import FrameKind

_TAKEN_WITHIN = 1.0
"""Seconds for the shim to take what should reach it before we stop."""


class Suspension:
    """Stop and go on together with a job."""

    def __init__(
        self, manner: AttachMode, link: ShimConnection, console: Console, signals: Signals
    ) -> None:
        self._manner = manner
        self._link = link
        self._console = console
        self._signals = signals
        self._passed_on = False
        """What stopped us we have passed on to the job; that it has stopped is then no news."""

    @property
    def _is_the_terminal(self) -> bool:
        """Whether the job's terminal is ours, and its stops are ours as well."""
        here = self._console.keys is not None
        return here and self._manner.on_terminal and self._console.writes

    def obey(self) -> None:
        """Do as SIGTSTP says."""
        if not (self._manner.passes_input and self._console.writes):
            self.leave_running()
            return
        self._link.signal(signal.SIGTSTP)
        if not self._is_the_terminal:
            self._passed_on = True
            self._link.flush(_TAKEN_WITHIN)
            self._signals.stop(group=False)
            self.go_on()

    def note(self) -> None:
        """The job's main process was stopped."""
        if self._passed_on:
            self._passed_on = False
        elif self._is_the_terminal:
            self._stop(messages.stopped(self._manner.number, here=True))
        else:
            self._console.say(messages.stopped(self._manner.number, here=False))

    def leave_running(self) -> None:
        """Stop this command and not the job."""
        self._stop(messages.left_running(self._manner.number))

    def go_on(self) -> None:
        """Take up again what a stop has interrupted; the terminal only in the foreground."""
        self._console.hold_again()
        self.tell_window()
        if self._manner.passes_input and self._console.writes:
            self._link.signal(signal.SIGCONT)

    def tell_window(self) -> None:
        """Tell the job how large its terminal is."""
        if window := self._console.window:
            self._link.tell(FrameKind.WINDOW, **window)

    def _stop(self, why: str) -> None:
        """Stop our process group until a shell continues it; where none could, go on."""
        if can_be_continued():
            self._console.say(why)
            self._console.settle()
            self._link.flush(_TAKEN_WITHIN)
            self._console.give_back()
            self._signals.stop(group=True)
        self.go_on()


_SAYS_WHAT_IT_WAITS_FOR_AFTER = 1.0

"""Seconds for the shim to take what was typed before we leave."""


class Input:
    """Pass on what is for the job, and do what is for us."""

    def __init__(
        self,
        manner: AttachMode,
        link: ShimConnection,
        console: Console,
        suspension: Suspension,
        alarms: Alarms,
        cancel: Callable[[], str | None],
    ) -> None:
        """Read the input of `console` for the job behind `link`.

        `cancel` asks for the end of the job, and returns why there will be none.
        """
        self._manner = manner
        self._link = link
        self._console = console
        self._suspension = suspension
        self._alarms = alarms
        self._ask_for_its_end = cancel
        self._interrupted_at = float("-inf")
        self.ctrl_c_typed = False
        """Ctrl-C went to the job as a key of its terminal."""

    def take(self) -> None:
        """Take what is there; call when poll says so.

        Raises:
            Left: the terminal that was read has gone.
            Detached: the detach keys were typed.
        """
        stdin = self._console.stdin
        if self._console.keys is None and self._link.put_from(stdin) is not None:
            if stdin.ended:
                self._link.put(FrameKind.STDIN_END)
            return
        piece = stdin.read()
        if self._console.keys is not None:
            if piece:
                self._press(piece)
            elif stdin.ended:
                raise Left(signal.SIGHUP)
        elif piece:
            self._link.put(FrameKind.STDIN, piece)
        elif stdin.ended:
            self._link.put(FrameKind.STDIN_END)

    def interrupt(self) -> None:
        """Interrupt the job; asked for again at once, have it ended."""
        again = time.monotonic() - self._interrupted_at < AGAIN_WITHIN
        self._interrupted_at = time.monotonic()
        if not (again and self._cancel()):
            self._link.signal(signal.SIGINT)

    def _cancel(self) -> bool:
        trouble = self._ask_for_its_end()
        if trouble is not None:
            self._console.say(trouble)
        return trouble is None

    def _press(self, piece: bytes) -> None:
        assert self._console.keys is not None
        board = self._console.keys.board
        pressed = board.press(piece, time.monotonic())
        if pressed.passed:
            self._link.put(FrameKind.STDIN, pressed.passed)
        self.ctrl_c_typed = self.ctrl_c_typed or pressed.interrupt
        for signum in pressed.signals:
            self.interrupt() if signum == signal.SIGINT else self._link.signal(signum)
        if pressed.cancel:
            self._cancel()
        self._alarms.drop("keys")
        if board.waits:
            words = messages.awaiting(self._manner.keys)
            self._alarms.set(
                "keys", _SAYS_WHAT_IT_WAITS_FOR_AFTER, lambda: self._console.say(words)
            )
        if pressed.suspend:
            self._suspension.leave_running()
        if pressed.detach:
            self._detach()

    def _detach(self) -> None:
        self._console.tidy()
        self._console.say(messages.detached(self._manner.number))
        self._console.settle()
        self._link.flush(_TAKEN_WITHIN)
        raise Detached
