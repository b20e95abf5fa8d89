"""`gpulease web`: a page for the user's own jobs, served by the program of the machine's page."""

import os
import sys
from typing import NoReturn

import typer

from gpulease.cli.connect import reach
from gpulease.cli.options import SocketOption, named_socket, takes_its_options


@takes_its_options
def web(
    ctx: typer.Context, *, open: bool, host: list[str] | None, socket: SocketOption = None
) -> NoReturn:
    """See the machine and your jobs in a browser, read their output, and act on them.

    It prints the ssh command with which the browser of your own machine gets here. Only you can
    connect: the daemon knows you as it does on the command line, and there is no password. On the
    page of a job you cancel it, give it more time, hold it in the queue, and run it again. It needs
    the extra "web" of gpulease, and ends with Ctrl-C.

    \b
    Examples:
      gpulease web
      gpulease web --open
    """
    daemon = reach(named_socket(ctx, socket), "web")
    line = [sys.executable, "-P", "-m", "gpulease.web", "--own-jobs", "--socket", str(daemon.path)]
    line += ["--open"] if open else []
    for name in host or ():
        line += ["--host", name]
    os.execv(line[0], line)  # noqa: S606  there is nothing for a shell to do
