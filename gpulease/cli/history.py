"""`gpulease history`: its options and their help; `list_page` does the work."""

from typing import Annotated, Literal

import typer

from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.list_page import print_history

End = Literal[
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
"""How a job ended, as `gpulease list --state` has it; `failed` is any end without success."""


def history(
    ctx: typer.Context,
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="USER", help="Only jobs of this user.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="SPAN", help="All that ended in the last 30d, 12h."),
    ] = None,
    state: Annotated[
        End | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only jobs with this end: failed, cancelled, lost.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "-n", "--name", metavar="PATTERN", help="Only jobs with such names, as 'sweep*'."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            max=10**9,
            help="The latest N jobs; default: 50, or all with --since or --csv.",
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print a trace that gpulease replay reads.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """List past jobs, the newest first: how long they waited and ran, and how they ended.

    STATE is how a job ended, as gpulease list --state has it; failed is any end without success.
    On a terminal, a long list is shown in a pager: less, or what PAGER names.

    --csv prints those that held memory, in the columns that gpulease replay reads: times in
    seconds since 1970, the memory leased on each GPU, digests in the place of commands.

    \b
    Examples:
      gpulease history
      gpulease history --user alice --since 7d
      gpulease history --state failed --name 'sweep*'
      gpulease history --csv --since 30d > month.csv
      gpulease history --json --limit 1000 | jq '.jobs[] | {id, outcome}'
    """
    print_history(
        user=user,
        since=since,
        state=state,
        name=name,
        limit=limit,
        as_csv=as_csv,
        json=json,
        socket=named_socket(ctx, socket),
    )
