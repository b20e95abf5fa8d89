"""The verbs that only print: status, list, history, show, report, completion.

What they do is in modules that the quick parser imports without typer.
"""

from typing import Annotated, Any, Literal

import typer

from gpulease.cli.completion import print_script
from gpulease.cli.list_page import print_history, print_list
from gpulease.cli.options import JobsArgument, SocketOption, named_socket, takes_its_options
from gpulease.cli.report import print_report
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
    seconds since 1970, the memory leased on each GPU, digests in place of commands.

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


@takes_its_options
def report(ctx: typer.Context, *, socket: SocketOption = None, **typed: Any) -> None:
    """Compare what jobs asked for with what they used, and show how long they waited.

    Jobs that hold memory count up to now. Sizes are means over the time for which memory was
    leased; the use of a job is its peak. UNUSED GIB-HOURS is memory that was leased and never
    needed. Leases with unknown use count as leased only. Waits are those of jobs that got memory
    within --since. Below: how many starts of waiting jobs fell in the range that was shown first,
    and how far off expected starts and predicted run times were.

    --by group sums up by the group under which jobs were submitted: the primary group of their
    user, unless newgrp changed it. It includes all users without --user. --by week and --by month
    sum up by the time at which jobs ended, or now; weeks begin on Monday.

    --shares is about the queue: what each user has used lately and holds, the share that this
    makes, the jobs that wait, and TURN, the order in which the users' next jobs go. Waits are
    those of jobs that got memory in the last 7d, or within --since.

    \b
    Examples:
      gpulease report --since 7d
      gpulease report --all --by week --since 90d
      gpulease report --by group --csv > groups.csv
      gpulease report --shares
      gpulease report --all --json | jq '.users[] | {user, used}'
    """
    print_report(socket=named_socket(ctx, socket), **typed)


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="The shell.")
    ],
) -> None:
    """Print a script that completes verbs, options, job numbers, GPUs, users and commands.

    SHELL is bash, zsh or fish. These lines load the script when it is first needed:

    \b
    Examples:
      mkdir -p ~/.local/share/bash-completion/completions
      echo 'eval "$(gpulease completion bash)"' \\
        > ~/.local/share/bash-completion/completions/gpulease
      gpulease completion fish > ~/.config/fish/completions/gpulease.fish
    """
    print_script(shell=shell)
