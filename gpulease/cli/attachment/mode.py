"""How a command is attached to a job, and how an attachment ends before its job does.

It started the job, joined it, or only watches it.
"""

from __future__ import annotations

from gpulease.cli.attachment.keyboard import Use, name_of
from gpulease.record import record


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
        interrupts = [] if self.passes_input else ["Ctrl-C interrupts it"]
        leaves = [f"{name_of(self.keys)} detaches"] if self.keys else []
        return "; ".join([f"gpulease: attached to job {self.label}", *interrupts, *leaves])


class Left(Exception):
    """We left and the job continues: the terminal closed, or a signal ended this command."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


class Detached(Exception):
    """We left and the job continues: the detach keys were typed."""


class AttachRefused(Exception):
    """The shim refused the attachment; the text is its reason."""
