"""`gpulease move`: change the order of waiting jobs."""

from datetime import datetime
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.edit import results
from gpulease.cli.job_selection import select_jobs, selection
from gpulease.cli.options import JobsArgument
from gpulease.cli.render import print_stdout
from gpulease.client import Client
from gpulease.errors import BadUsage


def move(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="JOB", help="Start before this job.")
    ] = None,
    first: Annotated[bool, typer.Option("--first", help="Start before your other jobs.")] = False,
    socket: SocketOption = None,
) -> None:
    """Let waiting jobs start before other waiting jobs of yours.

    The other jobs fall back behind the moved one; the jobs of other users start no
    later. A job that fits nowhere now holds nobody back. The latest move counts.
    Admins may move any job before any other; it then takes the place of that one.

    \b
    Examples:
      gpulease move 17 --before 12
      gpulease move last --first
    """
    if (before is None) is not first:
        raise BadUsage(
            "cannot move: give either --before JOB or --first", "gpulease move 17 --before 12"
        )
    wanted = selection("move", jobs)
    client = connect(ctx, socket)
    target = None if before is None else _one(client, before)
    moved = client.move(select_jobs(client, wanted), target)
    for text in results(moved, datetime.now().astimezone()):
        print_stdout(text)


def _one(client: Client, word: str) -> int:
    numbers = select_jobs(client, selection("move", [word]))
    if len(numbers) > 1:
        raise BadUsage(
            f"cannot move before array {word}: name one of its elements",
            f"gpulease show {word} lists them",
        )
    return numbers[0]
