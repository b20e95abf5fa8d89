"""Attaching to a job: our terminal or pipes are connected to those of the job.

`attach` is the entry point. The other names say how to attach, and how an attachment ends. On a
cluster, the streams of this command are connected to srun in the same way: its `Console`.
"""

from gpulease.cli.attachment.console import PIECE, Console
from gpulease.cli.attachment.keyboard import AGAIN_WITHIN, detach_sequence
from gpulease.cli.attachment.messages import unwritable
from gpulease.cli.attachment.mode import AttachMode, AttachRefused, Detached, Left
from gpulease.cli.attachment.session import Hooks, attach

__all__ = [
    "AGAIN_WITHIN",
    "PIECE",
    "AttachMode",
    "AttachRefused",
    "Console",
    "Detached",
    "Hooks",
    "Left",
    "attach",
    "detach_sequence",
    "unwritable",
]
