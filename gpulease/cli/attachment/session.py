"""Be the terminal of a job: its output to ours, our input and signals to it, until it has ended.

One loop over poll(2): it holds at most a piece of each stream, so a slow reader slows the job, and
nothing is lost. What our input means is in `input`, what the shim says in `news`.
"""

import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpulease.cli.attachment import messages
from gpulease.cli.attachment.console import Console
from gpulease.cli.attachment.input import Input, Suspension
from gpulease.cli.attachment.link import Alarms, ShimConnection
from gpulease.cli.attachment.mode import AttachMode, Left
from gpulease.cli.attachment.shim_messages import ShimMessages
from gpulease.cli.exit_codes import JobEnd
from gpulease.cli.signals import DEADLY, WHILE_ATTACHED, Killed, Signals
from gpulease.client import dial
from gpulease.wire.frames import FrameKind

_LOOKS_AT_FOREGROUND_EVERY = 0.5
_SOCKET = "socket"


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
    manner: AttachMode,
    handles: tuple[int, int, int] = (0, 1, 2),
) -> JobEnd | None:
    """Stay with the job whose socket is in `directory`; None if its shim went without a word.

    Raises:
        OSError: nothing listens there.
        Left: SIGHUP came, or what else ends an attachment.
        Killed: a signal came that ends the whole command; the terminal is given back.
        Detached: the detach keys were typed.
        TurnedAway: the shim does not let this caller attach.
    """
    with dial(directory / _SOCKET) as link, signals.also(*WHILE_ATTACHED, *DEADLY):
        return _Attachment(link, signals, hooks, manner, handles).run()


class _Attachment:
    def __init__(
        self,
        link: socket.socket,
        signals: Signals,
        hooks: Hooks,
        manner: AttachMode,
        handles: tuple[int, int, int],
    ) -> None:
        self._signals = signals
        self._manner = manner
        self._console = Console(manner, handles, hooks.say)
        self._link = ShimConnection(link, self._console.outlet)
        self._suspension = Suspension(manner, self._link, self._console, signals)
        self._alarms = Alarms()
        parts = (manner, self._link, self._console, self._suspension, self._alarms)
        self._input = Input(*parts, hooks.cancel)
        self._news = ShimMessages(*parts)

    def run(self) -> JobEnd | None:
        try:
            self._greet()
            while not (self._news.ended or self._link.gone):
                self._turn()
            if self._news.ending is None:
                self._console.tidy()
            self._console.drain(self._signals)
        finally:
            self._console.give_back()
        ending = self._news.ending
        return ending and replace(ending, ctrl_c_typed=self._input.ctrl_c_typed)

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
            self._console.say(messages.attached(self._manner))
        elif self._manner.passes_input:
            self._console.say(messages.input_as_it_is(self._manner.number))

    def _turn(self) -> None:
        ready = self._poll()
        if self._signals.fileno() in ready:
            for signum in self._signals.take():
                self._take_signal(signum)
        self._console.write(ready)
        if self._console.stdout.broken:
            self._news.nobody_reads()
        if self._console.stdin.handle in ready:
            self._input.take()
        for kind, payload in self._link.exchange(ready.get(self._link.fileno(), 0)):
            self._news.take(kind, payload)
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
            case _ if signum in DEADLY:
                self._console.tidy()
                self._console.settle()
                raise Killed(signum)
            case _ if self._is_not_for_the_job(signum):
                raise Left(signum)
            case signal.SIGINT:
                self._input.interrupt()
            case _:
                self._link.signal(signum)

    def _is_not_for_the_job(self, signum: signal.Signals) -> bool:
        joined = not self._manner.started
        return self._manner.watches or (joined and signum is signal.SIGTERM)
