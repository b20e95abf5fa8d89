"""The verbs that show the machine and its jobs: status, list, history, show.

What they do is in modules that the quick parser imports without typer.
"""

from typing import Any

import typer

from gpulease.cli.connect import SocketOption, named_socket
from gpulease.cli.list_page import print_history, print_list
from gpulease.cli.options import JobsArgument, takes_its_options
from gpulease.cli.show_jobs import print_jobs
from gpulease.cli.status_page import print_status
from gpulease.cli.typer_extensions import CommandWithWatch

COMMANDS = {"status": CommandWithWatch}


@takes_its_options
def status(ctx: typer.Context, *, socket: SocketOption = None, **typed: Any) -> int:
    """Show GPUs, leases, the queue, and processes that use a GPU without a lease.

    On a cluster: the GPUs of all nodes, and the jobs of Slurm that use them.

    \b
    Examples:
      gpulease status
      gpulease status --watch
      gpulease status --queue all
      gpulease status --json | jq '.gpus[].memory.headroom'
    """
    return print_status(socket=named_socket(ctx, socket), **typed)


@takes_its_options
def list(ctx: typer.Context, *, socket: SocketOption = None, **typed: Any) -> None:
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
    print_list(socket=named_socket(ctx, socket), **typed)


@takes_its_options
def history(ctx: typer.Context, *, socket: SocketOption = None, **typed: Any) -> None:
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
    print_history(socket=named_socket(ctx, socket), **typed)


@takes_its_options
def show(
    ctx: typer.Context, jobs: JobsArgument = None, *, socket: SocketOption = None, **typed: Any
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
    print_jobs(jobs=jobs, socket=named_socket(ctx, socket), **typed)
