"""`gpulease list`: its options and their help; `list_page` does the work."""

from typing import Annotated, Literal

import typer

from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.list_page import print_list

Asked = Literal[
    "queued",
    "granted",
    "active",
    "suspended",
    "releasing",
    "ended",
    "exited",
    "failed",
    "signaled",
    "released",
    "cancelled",
    "time-limit",
    "over-lease",
    "idle",
    "gave-up",
    "preempted",
    "requeued",
    "dependency-failed",
    "launch-failed",
    "lost",
]
"""A state or an outcome; `failed` is any end without success."""


def list(  # noqa: PLR0913, PLR0917  each is an option
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Include ended jobs.")] = False,
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="USER", help="Only jobs of this user.")
    ] = None,
    state: Annotated[
        Asked | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only jobs in this state, or with this end: queued, failed, lost.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit",
            metavar="N",
            help="At most N jobs, or all; default: 100 on a terminal.",
            show_default=False,
        ),
    ] = None,
    last: Annotated[
        str | None,
        typer.Option(
            "--last", metavar="N", help="The last N jobs, ended ones included.", show_default=False
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="SPAN",
            help="Include jobs that ended in the last 12h, 30d.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--name",
            metavar="PATTERN",
            help="Only jobs with such a name.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """List jobs, oldest first: those that wait or run, and with --all those that have ended.

    STATE is queued, granted, active, suspended (stopped by Ctrl-Z), releasing or ended,
    or how a job ended: exited, failed, signaled, released, cancelled, time-limit,
    over-lease, idle, gave-up, preempted, requeued, dependency-failed, launch-failed,
    lost.

    \b
    Examples:
      gpulease list
      gpulease list --since 12h
      gpulease list --last 20 --name 'sweep*'
      gpulease list --all --user alice
      gpulease list --state queued --limit all
      gpulease list --state failed --json | jq '.jobs[].id'
    """
    print_list(
        everything=everything,
        user=user,
        state=state,
        limit=limit,
        last=last,
        since=since,
        name=name,
        json=json,
        socket=named_socket(ctx, socket),
    )
