"""`gpulease top`: a live view of the machine. This module checks that it can be shown."""

import os
import sys
from importlib.util import find_spec

import typer

from gpulease.cli.connect import reach
from gpulease.cli.options import SocketOption, named_socket, takes_its_options
from gpulease.cli.render import Screen, stdout_screen
from gpulease.daemon_packages import install_hint
from gpulease.errors import BadUsage, GpuleaseError
from gpulease.locations import environment
from gpulease.units import parse_span

_LEAST_S = 0.5


@takes_its_options
def top(ctx: typer.Context, *, every: str, mouse: bool, socket: SocketOption = None) -> int:
    """Show GPUs, jobs and the queue live; open jobs, and act on yours.

    ? shows the keys. It needs a terminal, and the extra "top" of gpulease.

    \b
    Examples:
      gpulease top
      gpulease top --every 10s
    """
    if find_spec("textual") is None:
        raise GpuleaseError(
            "cannot show the live view: the package textual is not installed",
            f"{install_hint('top')}; without it: gpulease status --watch",
        )
    seconds = parse_span(every).total_seconds()
    if seconds < _LEAST_S:
        raise BadUsage(f"cannot look every {every}: that is too often", "gpulease top --every 1s")
    _check_terminal()
    client = reach(named_socket(ctx, socket), "top")
    client.status(queue=0)
    screen = stdout_screen()
    from gpulease.cli.top.app import run
    from gpulease.cli.top.lines import Terminal

    terminal = Terminal(has_colour(screen), utf8=not screen.ascii)
    if not terminal.colour:
        os.environ["NO_COLOR"] = "1"  # Textual's own widgets read it
    return run(client, seconds, terminal, mouse=mouse)


def _check_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadUsage(
            "cannot show the live view: standard input or output is not a terminal",
            "gpulease status prints it once, gpulease status --watch every two seconds",
        )
    if environment().get("TERM", "dumb") == "dumb":
        raise BadUsage(
            "cannot show the live view: this terminal cannot move its cursor (TERM=dumb)",
            "gpulease status prints it once, gpulease status --watch every two seconds",
        )


def has_colour(screen: Screen) -> bool:
    """Tell whether the terminal has colours and the user wants them."""
    if not screen.colour:
        return False
    import curses

    try:
        curses.setupterm()
        return curses.tigetnum("colors") != -1
    except curses.error:  # a terminal that this machine has no description of
        return True
