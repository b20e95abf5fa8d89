"""What comes in on our standard input, and what it means: keys, a pipe's bytes, their end."""

import signal
import time
from collections.abc import Callable

from gpulease.cli.attaching import sentences
from gpulease.cli.attaching.alarms import Alarms
from gpulease.cli.attaching.console import Console
from gpulease.cli.attaching.keyboard import AGAIN_WITHIN
from gpulease.cli.attaching.leaving import Detached, Left
from gpulease.cli.attaching.link import Link
from gpulease.cli.attaching.manner import Manner
from gpulease.cli.attaching.suspension import Suspension
from gpulease.frames import FrameKind

_SAYS_WHAT_IT_WAITS_FOR_AFTER = 1.0
_TAKEN_WITHIN = 1.0
"""Seconds for the shim to take what was typed before we leave."""


class Input:
    """Pass on what is for the job, and do what is for us."""

    def __init__(
        self,
        manner: Manner,
        link: Link,
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
            words = sentences.awaiting(self._manner.keys)
            self._alarms.set(
                "keys", _SAYS_WHAT_IT_WAITS_FOR_AFTER, lambda: self._console.say(words)
            )
        if pressed.suspend:
            self._suspension.leave_running()
        if pressed.detach:
            self._detach()

    def _detach(self) -> None:
        self._console.tidy()
        self._console.say(sentences.detached(self._manner.number))
        self._console.settle()
        self._link.flush(_TAKEN_WITHIN)
        raise Detached
