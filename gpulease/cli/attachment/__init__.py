"""Attaching to a job: our terminal or pipes are connected to those of the job.

`attach` is the entry point. The other names say how to attach, and how an attachment ends.
"""

from gpulease.cli.attachment.console import AttachMode
from gpulease.cli.attachment.keyboard import detach_sequence, name_of
from gpulease.cli.attachment.session import AttachRefused, Detached, Hooks, Left, attach
from gpulease.cli.attachment.terminal import next_keys

__all__ = [
    "AttachMode",
    "AttachRefused",
    "Detached",
    "Hooks",
    "Left",
    "attach",
    "detach_sequence",
    "name_of",
    "next_keys",
]
