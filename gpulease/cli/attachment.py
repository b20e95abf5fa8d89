"""Be the terminal of a job: its output to ours, our input and signals to it, until it has ended.

One loop over poll(2): it holds at most a piece of each stream, so a slow reader slows the job, and
nothing is lost.
"""

import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpulease.cli import sentences
from gpulease.cli.alarms import Alarms
from gpulease.cli.console import Console
from gpulease.cli.keyboard import AGAIN_WITHIN
from gpulease.cli.link import Link, read_json
from gpulease.cli.manner import Manner
from gpulease.cli.outcome import Ending
from gpulease.cli.signals import WHILE_ATTACHED, Signals
from gpulease.cli.suspension import Suspension
from gpulease.client import dial
from gpulease.frames import FrameKind

_LOOKS_AT_FOREGROUND_EVERY = 0.5
_SAYS_WHAT_IT_WAITS_FOR_AFTER = 1.0
_TELLS_OF_OTHERS_AFTER = 2.0
_TAKEN_WITHIN = 1.0
"""Seconds for the shim to take what was typed before we leave."""
_SOCKET = "socket"
_LAUNCH_FAILED = "launch_failed"
"""The reason in an end that was no run: what then to exit with, the daemon knows."""


class Left(Exception):
    """The job goes on and nobody is attached: our terminal has gone, or we were told to go."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Detached(Exception):
    """The job goes on and nobody is attached: that is what was typed."""


class TurnedAway(Exception):
    """The shim lets this caller not attach; the text is its reason."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an attachment asks of the rest of the command."""

    cancel: Callable[[], str | None]
    """Ask the daemon to end the job; what is returned is why it will not."""
    say: Callable[[str], None]


def attach(
    directory: Path,
    signals: Signals,
    hooks: Hooks,
    manner: Manner,
    handles: tuple[int, int, int] = (0, 1, 2),
) -> Ending | None:
    """Stay with the job whose socket is in `directory`; None if its shim went without a word.

    Raises:
        OSError: nothing listens there.
        Left: SIGHUP came, or what else ends an attachment.
        Detached: the detach keys were typed.
        TurnedAway: the shim does not let this caller attach.
    """
    with dial(directory / _SOCKET) as link, signals.also(*WHILE_ATTACHED):
        return _Attachment(link, signals, hooks, manner, handles).run()


class _Attachment:
    def __init__(
        self,
        link: socket.socket,
        signals: Signals,
        hooks: Hooks,
        manner: Manner,
        handles: tuple[int, int, int],
    ) -> None:
        self._signals = signals
        self._hooks = hooks
        self._manner = manner
        self._console = Console(manner, handles, hooks.say)
        self._link = Link(link, self._console.outlet)
        self._suspension = Suspension(manner, self._link, self._console, signals)
        self._alarms = Alarms()
        self._ended = False
        self._ending: Ending | None = None
        self._interrupted_at = float("-inf")
        self._ctrl_c_typed = False
        self._broken_at: float | None = None

    def run(self) -> Ending | None:
        try:
            self._greet()
            while not (self._ended or self._link.gone):
                self._turn()
            if self._ending is None:
                self._console.tidy()
            self._console.drain(self._signals)
        finally:
            self._console.give_back()
        return self._ending

    def _greet(self) -> None:
        size = self._console.window
        window = {"window": size} if size else {}
        self._link.tell(FrameKind.HELLO, role=self._manner.role, **window)
        if self._manner.started:
            return
        if self._manner.on_terminal and self._console.writes:
            # What draws the whole screen does so again, for one that has not seen it.
            self._link.signal(signal.SIGWINCH)
        if self._console.keys is not None:
            self._console.say(sentences.attached(self._manner))
        elif self._manner.passes_input:
            self._console.say(sentences.input_as_it_is(self._manner.number))

    # The loop.

    def _turn(self) -> None:
        ready = self._poll()
        if self._signals.fileno() in ready:
            for signum in self._signals.take():
                self._take_signal(signum)
        self._console.write(ready)
        if self._console.stdout.broken and self._broken_at is None:
            self._nobody_reads()
        if self._console.stdin.handle in ready:
            self._take_input()
        for kind, payload in self._link.exchange(ready.get(self._link.fileno(), 0)):
            self._take(kind, payload)
        self._alarms.ring()

    def _poll(self) -> dict[int, int]:
        poller = select.poll()
        poller.register(self._signals.fileno(), select.POLLIN)
        self._console.register(poller)
        if wanted := self._link.wanted(reading=not self._console.is_full):
            # With nothing wanted, a hang-up would still be told, over and over.
            poller.register(self._link.fileno(), wanted)
        stdin = self._console.stdin
        listens = not stdin.ended and not self._link.deaf and self._link.has_room
        ours = listens and stdin.is_ours
        if ours:
            if self._console.hold():
                self._suspension.tell_window()
            poller.register(stdin.handle, select.POLLIN)
        looks = (_LOOKS_AT_FOREGROUND_EVERY,) if listens and not ours else ()
        return dict(poller.poll(self._alarms.patience(*looks)))

    # Signals that came to us.

    def _take_signal(self, signum: signal.Signals) -> None:
        match signum:
            case signal.SIGHUP:
                raise Left(signum)
            case signal.SIGWINCH:
                self._suspension.tell_window()
            case signal.SIGCONT:
                self._suspension.go_on()
            case signal.SIGTSTP:
                self._suspension.obey()
            case _ if self._manner.watches:
                raise Left(signum)
            case signal.SIGTERM if not self._manner.started:
                raise Left(signum)
            case signal.SIGINT:
                self._interrupt()
            case _:
                self._link.signal(signum)

    def _interrupt(self) -> None:
        again = time.monotonic() - self._interrupted_at < AGAIN_WITHIN
        self._interrupted_at = time.monotonic()
        if not (again and self._cancel()):
            self._link.signal(signal.SIGINT)

    def _cancel(self) -> bool:
        trouble = self._hooks.cancel()
        if trouble is not None:
            self._console.say(trouble)
        return trouble is None

    # Our streams.

    def _take_input(self) -> None:
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

    def _press(self, piece: bytes) -> None:
        assert self._console.keys is not None
        board = self._console.keys.board
        pressed = board.press(piece, time.monotonic())
        if pressed.passed:
            self._link.put(FrameKind.STDIN, pressed.passed)
        self._ctrl_c_typed = self._ctrl_c_typed or pressed.interrupt
        for signum in pressed.signals:
            self._interrupt() if signum == signal.SIGINT else self._link.signal(signum)
        if pressed.cancel:
            self._cancel()
        self._alarms.drop("keys")
        if board.waits:
            words = sentences.awaiting(self._manner.keys)
            self._say_later("keys", _SAYS_WHAT_IT_WAITS_FOR_AFTER, words)
        if pressed.suspend:
            self._suspension.leave_running()
        if pressed.detach:
            self._detach()

    def _say_later(self, name: str, seconds: float, words: str) -> None:
        self._alarms.set(name, seconds, lambda: self._console.say(words))

    def _detach(self) -> None:
        self._console.tidy()
        self._console.say(sentences.detached(self._manner.number))
        self._console.settle()
        self._link.flush(_TAKEN_WITHIN)
        raise Detached

    def _nobody_reads(self) -> None:
        self._broken_at = time.monotonic()
        stdout = self._console.stdout
        if not self._manner.started or stdout.was_terminal:
            raise Left(signal.SIGHUP if stdout.was_terminal else signal.SIGPIPE)
        if trouble := stdout.trouble:
            self._console.say(sentences.unwritable(trouble))
        # What a write to this pipe would have done to the job, had it held the pipe itself.
        self._link.signal(signal.SIGPIPE)

    def _insist_that_nobody_reads(self) -> None:
        # A job that ignores SIGPIPE (Python does) and writes on would have failed at this write.
        if self._broken_at is not None and time.monotonic() - self._broken_at > AGAIN_WITHIN:
            self._broken_at = float("inf")
            self._link.signal(signal.SIGTERM)

    # What the shim says.

    def _take(self, kind: FrameKind, payload: bytes) -> None:
        number = self._manner.number
        match kind:
            case FrameKind.STDOUT | FrameKind.STDERR:
                self._console.show(kind, payload)
                if kind is FrameKind.STDOUT:
                    self._insist_that_nobody_reads()
            case FrameKind.STOPPING:
                reason = str(read_json(payload).get("reason", ""))
                self._console.say(sentences.stopping(number, reason))
            case FrameKind.EXITED:
                self._note_end(read_json(payload))
            case FrameKind.REFUSED:
                raise TurnedAway(str(read_json(payload).get("message", "")))
            case _:
                self._take_news(kind, read_json(payload))

    def _take_news(self, kind: FrameKind, content: dict[str, object]) -> None:
        number = self._manner.number
        match kind:
            case FrameKind.SUSPENDED:
                self._suspension.note()
            case FrameKind.WATCHING:
                if self._console.writes:
                    self._console.only_watch()
                    self._console.say(sentences.watching(self._manner))
            case FrameKind.MAIN_EXITED:
                words = sentences.others_left(number)
                self._say_later("others", _TELLS_OF_OTHERS_AFTER, words)
            case FrameKind.SKIPPED:
                self._console.say(sentences.skipped(number, int(str(content.get("bytes", 0)))))
            case _:
                pass  # STARTED is no news to us, nor is what a later version may say.

    def _note_end(self, record: dict[str, object]) -> None:
        self._ended = True
        code, number = record.get("exit_code"), record.get("signal")
        if record.get("reason") != _LAUNCH_FAILED:
            self._ending = Ending(
                exit_code=code if isinstance(code, int) else None,
                signal=number if isinstance(number, int) else None,
                reason=str(record.get("reason")),
                ctrl_c_typed=self._ctrl_c_typed,
            )
