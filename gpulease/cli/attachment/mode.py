"""How a command is attached to a job: it started the job, attached later, or only watches.

The exceptions are the ways in which an attachment ends before the job.
"""

import signal
from dataclasses import dataclass

from gpulease.cli.attachment.keyboard import Use


@dataclass(frozen=True, slots=True)
class AttachMode:
    """How this command is attached."""

    number: int
    """The number of the job."""
    started: bool = True
    """This command started the job: its signals and its input are for the job."""
    watches: bool = False
    """Nothing from this command reaches the job."""
    on_terminal: bool = False
    """The job runs on a pseudo-terminal, which this command's terminal shows."""
    keys: bytes = b""
    """The keys that detach."""

    @property
    def role(self) -> str:
        """The role to request from the shim."""
        return "watch" if self.watches else "attach"

    @property
    def passes_input(self) -> bool:
        """Whether standard input is passed on to the job."""
        return not self.watches and (self.started or self.on_terminal)

    @property
    def reads_keys(self) -> bool:
        """Whether the terminal, if there is one, is read key by key."""
        return self.on_terminal or not self.started

    @property
    def use(self) -> Use:
        """What keys do."""
        if self.watches:
            return Use.WATCH
        return Use.WRITE if self.passes_input else Use.COMMAND


class Left(Exception):
    """The attachment ended and the job continues: a signal came, or the terminal hung up."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Detached(Exception):
    """The detach keys were typed; the job continues."""


class TurnedAway(Exception):
    """The shim refused the connection, for the reason in the text."""
