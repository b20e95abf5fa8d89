"""How the command speaks while it stays with a job, and what it knows of the time."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from gpulease.cli.caller import environment
from gpulease.cli.render import draw, say, screen_of, terminal_width
from gpulease.cli.waiting import WaitingLine


@dataclass(frozen=True, slots=True)
class Talk:
    """The command's own voice."""

    say: Callable[[str], None]
    line: WaitingLine
    now: Callable[[], datetime]


def talk() -> Talk:
    """Return the voice of this process: on stderr, in local time."""
    screen = screen_of(sys.stderr, environment())
    rewrites = screen.width is not None and environment().get("TERM", "dumb") != "dumb"
    return Talk(
        say=say,
        line=WaitingLine(draw, terminal_width if rewrites else None),
        now=lambda: datetime.now(UTC).astimezone(),
    )
