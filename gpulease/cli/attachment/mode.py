"""How one is attached to a job: as who started it, as one who joined it, or only to watch.

The ways in which an attachment ends before its job does.
"""

import signal
from dataclasses import dataclass

from gpulease.cli.attachment.keyboard import Use


@dataclass(frozen=True, slots=True)
class AttachMode:
    """What an attachment is for."""

    number: int
    """The job's."""
    started: bool = True
    """This command is what started the job: our signals and our input are its own."""
    watches: bool = False
    """Nothing here reaches the job."""
    on_terminal: bool = False
    """The job runs on a terminal of its own, and ours is its other end."""
    keys: bytes = b""
    """Those that detach."""

    @property
    def role(self) -> str:
        """What the shim is asked for."""
        return "watch" if self.watches else "attach"

    @property
    def passes_input(self) -> bool:
        """Whether our standard input is the job's."""
        return not self.watches and (self.started or self.on_terminal)

    @property
    def reads_keys(self) -> bool:
        """Whether our terminal, if there is one, is read key by key."""
        return self.on_terminal or not self.started

    @property
    def use(self) -> Use:
        """What keys are there for."""
        if self.watches:
            return Use.WATCH
        return Use.WRITE if self.passes_input else Use.COMMAND


class Left(Exception):
    """The job goes on and nobody is attached: our terminal has gone, or we were told to go."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Detached(Exception):
    """The job goes on and nobody is attached: that is what was typed."""


class TurnedAway(Exception):
    """The shim lets this caller not attach; the text is its reason."""
