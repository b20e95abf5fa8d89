"""Being attached to a job: our terminal or our pipes are the other end of its own.

`attach` is the one way in; what else is here says how one attaches, and in which ways it ends.
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
