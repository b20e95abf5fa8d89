"""Attach to a job: connect its streams and its terminal to those of this command.

`attach` does it. The other names say how to attach, and how an attachment can end.
"""

from gpulease.cli.attachment.keyboard import DEFAULT as DEFAULT_KEYS
from gpulease.cli.attachment.keyboard import parse_keys
from gpulease.cli.attachment.mode import AttachMode, Detached, Left, TurnedAway
from gpulease.cli.attachment.session import Hooks, attach

__all__ = [
    "DEFAULT_KEYS",
    "AttachMode",
    "Detached",
    "Hooks",
    "Left",
    "TurnedAway",
    "attach",
    "parse_keys",
]
