"""`gpulease adopt`: a lease for a process that already uses GPUs."""

from datetime import timedelta
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.options import takes_option
from gpulease.cli.render import print_stderr, print_stdout
from gpulease.client import Client, encode
from gpulease.drawing.words import clean, id_of, labels_of, size
from gpulease.light_json import indent
from gpulease.units import Share, format_span, parse_memory, parse_span
from gpulease.wire.jobs import JobView
from gpulease.wire.requests import AdoptRequest, ClaimRequest


@takes_option("name")
def adopt(
    ctx: typer.Context,
    pid: Annotated[
        int, typer.Argument(metavar="PID", help="The process; those below it count as well.")
    ],
    mem: Annotated[
        str | None,
        typer.Option("--mem", metavar="SIZE", help="More than it holds now, on each of its GPUs."),
    ] = None,
    lasts: Annotated[
        str | None,
        typer.Option("--for", "--time", metavar="SPAN", help="Release after this time."),
    ] = None,
    name: str | None = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lease as JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """Lease the memory that a process already uses. Admins may name any process.

    For a process that was started without gpulease. The lease is on the GPUs that the
    process uses, for what it holds there, and ends with the process. It belongs to
    the user of the process. It is granted at once, or refused.

    \b
    Examples:
      gpulease adopt 4711
      gpulease adopt 4711 --mem 40G --for 8h

    \b
    Exit code: 0, or
        2  an option or its value is wrong
       75  it does not fit beside other leases
      125  gpulease failed, or the daemon refused the request
    """
    memory = None if mem is None else parse_memory(mem)
    claim = ClaimRequest(
        memory=None if isinstance(memory, Share) else memory,
        share=float(memory.percent) if isinstance(memory, Share) else None,
        time_limit=None if lasts is None else parse_span(lasts).total_seconds(),
    )
    client = connect(ctx, socket)
    job = client.adopt(AdoptRequest(pid, claim, name))
    print_stdout(indent(encode(job)) if as_json else adopted(client, job, pid))
    for event in client.job(job.id).events:
        if event.kind == "notice" and not as_json:
            print_stderr(f"gpulease: {clean(event.detail or '')}")


def adopted(client: Client, job: JobView, pid: int) -> str:
    """Describe the lease of a process that was adopted."""
    labels = labels_of(client.status(queue=0).gpus)
    leases = [f"{size(each.memory)} of GPU {labels.get(each.gpu, each.gpu)}" for each in job.leases]
    ends = f"until process {pid} ends"
    if job.claim.time_limit is not None:
        ends += f", for at most {format_span(timedelta(seconds=job.claim.time_limit))}"
    return f"job {id_of(job)} of {clean(job.user)} holds {' and '.join(leases)} {ends}"
