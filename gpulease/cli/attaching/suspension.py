"""Ctrl-Z: the job stops, its terminal goes back to the shell, and `fg` brings both back."""

import signal

from gpulease.cli.attaching import sentences
from gpulease.cli.attaching.console import Console
from gpulease.cli.attaching.link import Link
from gpulease.cli.attaching.manner import Manner
from gpulease.cli.signals import Signals, can_be_continued
from gpulease.frames import FrameKind

_TAKEN_WITHIN = 1.0
"""Seconds for the shim to take what should reach it before we stop."""


class Suspension:
    """Stop and go on together with a job."""

    def __init__(self, manner: Manner, link: Link, console: Console, signals: Signals) -> None:
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
            self._stop(sentences.stopped(self._manner.number, here=True))
        else:
            self._console.say(sentences.stopped(self._manner.number, here=False))

    def leave_running(self) -> None:
        """Stop this command and not the job."""
        self._stop(sentences.left_running(self._manner.number))

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
