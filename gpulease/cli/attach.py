"""`gpulease attach`: connect this terminal to a job."""

from typing import Annotated

import typer

from gpulease.cli import messages
from gpulease.cli.attachment import detach_sequence
from gpulease.cli.caller import environment
from gpulease.cli.connect import SocketOption, connect, named_socket
from gpulease.cli.exit_codes import status_of_job
from gpulease.cli.follow import FollowOptions, follow
from gpulease.cli.job_selection import names_array, one_element, select_jobs, selection
from gpulease.cli.options import NamePatternOption, takes_option
from gpulease.cli.render import stderr_status
from gpulease.cli.signals import Signals
from gpulease.client import Client
from gpulease.cluster_choice import acts_on_slurm
from gpulease.errors import WrongState
from gpulease.wire.jobs import JobView


@takes_option("detach_keys")
def attach(
    ctx: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="The number or name of a job; 'last' is your newest job.",
            show_default=False,
        ),
    ] = None,
    name: NamePatternOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "--read-only", help="Only show output; send no input.")
    ] = False,
    detach_keys: str | None = None,
    socket: SocketOption = None,
) -> int:
    """Connect this terminal to a job: show its last output, continue live, exit as it does.

    A job with a terminal takes over your keys and the size of your terminal. A job
    on pipes gets Ctrl-C only. Ctrl-\\ and then d detach; so does closing the terminal.
    Without JOB, it is the last one.

    \b
    Examples:
      gpulease attach
      gpulease attach --watch sweep-7

    \b
    Exit code: that of the job, see gpulease run --help; 0 after detaching
    """
    keys = detach_sequence(detach_keys, environment())
    wanted = selection("attach", [job] if job else None, name)
    if acts_on_slurm(named_socket(ctx, socket)):
        from gpulease.slurm.command.wait import attach_to

        return attach_to(wanted, watches=watch, has_keys=detach_keys is not None)
    client = connect(ctx, socket)
    (number,) = select_jobs(client, wanted)
    view = client.job(number)
    if names_array(wanted.words, view):
        raise one_element("attach", view)
    return attach_to_job(client, view, watches=watch, keys=keys)


def attach_to_job(
    client: Client, view: JobView, *, watches: bool = False, keys: bytes | None = None
) -> int:
    """Connect this terminal to a job, and return its exit code; 0 after detaching.

    Raises:
        WrongState: it has no output: it is a hold, or a job of Slurm.
        Others: as `follow`.
    """
    number = view.id
    if keys is None:
        keys = detach_sequence(None, environment())
    if view.kind == "hold":
        raise WrongState(
            f"cannot attach to job {number}: it is a hold, a lease without a command",
            f"gpulease show {number} describes it, gpulease cancel {number} releases it",
        )
    if view.kind == "slurm":
        raise WrongState(
            f"cannot attach to job {number}: Slurm runs it",
            f"sattach {view.slurm_job}.0 shows the output of its first step",
        )
    stderr = stderr_status()
    if view.state == "ended":
        stderr.print(messages.ended(view))
        return status_of_job(view)
    with Signals() as signals:
        options = FollowOptions(started=False, watches=watches, keys=keys)
        return follow(client, view, signals, stderr, options)
