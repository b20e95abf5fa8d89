"""The verbs that show the machine and its jobs: status, list, history, show.

Here are their options and their help. What they do is in modules that the quick parser imports
without typer.
"""

from typing import Annotated, Literal

import typer

from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.list_page import print_history, print_list
from gpulease.cli.options import AllOption, JobsArgument, NamePatternOption
from gpulease.cli.show_jobs import print_jobs
from gpulease.cli.status_page import print_status
from gpulease.cli.typer_extensions import CommandWithWatch

COMMANDS = {"status": CommandWithWatch}

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
"""How a job ended; `failed` is any end without success."""
State = Literal["queued", "granted", "active", "suspended", "releasing", End]
"""A state, or how a job ended."""


def status(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            metavar="N",
            help="Show the first N waiting jobs, or all; default: 20, as far as they fit.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        str | None,
        typer.Option(
            "--watch",
            metavar="[SPAN]",
            help="Refresh in place every 2s (Slurm: 10s) or SPAN, until Ctrl-C or q.",
            show_default=False,
        ),
    ] = None,
    socket: SocketOption = None,
) -> int:
    """Show GPUs, leases, the queue, and processes that use a GPU without a lease.

    On a cluster: the GPUs of all nodes, and the jobs of Slurm that use them.

    \b
    Examples:
      gpulease status
      gpulease status --watch
      gpulease status --queue all
      gpulease status --json | jq '.gpus[].memory.headroom'
    """
    return print_status(queue=queue, json=json, socket=named_socket(ctx, socket), watch=watch)


def list(  # noqa: PLR0913, PLR0917  each is an option
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Include ended jobs.")] = False,
    user: Annotated[
        str | None, typer.Option("-u", "--user", metavar="USER", help="Only jobs of this user.")
    ] = None,
    state: Annotated[
        State | None,
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


def show(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    name: NamePatternOption = None,
    every: AllOption = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="With charts of its memory over time.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help='Print JSON: the job, or {"jobs": [...]} for several.')
    ] = False,
    socket: SocketOption = None,
) -> None:
    """Show jobs in detail: state, place in the queue, leases, memory used, events.

    Without JOB, it is the last one. The number of an array sums up its elements; 17_3
    is the element with index 3.

    \b
    Examples:
      gpulease show 17
      gpulease show 17_3
      gpulease show last
      gpulease show --plot last
      gpulease show --json sweep-7 | jq .exit_status
    """
    print_jobs(
        jobs=jobs,
        name=name,
        every=every,
        plot=plot,
        json=json,
        socket=named_socket(ctx, socket),
    )
