"""Being attached to a job: our terminal or our pipes are the other end of its own.

`attach` is the one way in; what else is here says how one attaches, and in which ways it ends.
"""

from gpulease.cli.attaching.attachment import Hooks, attach
from gpulease.cli.attaching.keys import DEFAULT as DEFAULT_KEYS
from gpulease.cli.attaching.keys import parse_keys
from gpulease.cli.attaching.leaving import Detached, Left, TurnedAway
from gpulease.cli.attaching.manner import Manner

__all__ = [
    "DEFAULT_KEYS",
    "Detached",
    "Hooks",
    "Left",
    "Manner",
    "TurnedAway",
    "attach",
    "parse_keys",
]
