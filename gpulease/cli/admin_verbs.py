"""Verbs for admins: drain and resume GPUs, pause and unpause the queue."""

from collections.abc import Iterable
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.job_selection import for_each
from gpulease.cli.render import print_stdout
from gpulease.client import Client
from gpulease.drawing.words import clean, index_of
from gpulease.wire.machine import GpuAvailabilityView

GpusArgument = Annotated[
    list[str],
    typer.Argument(metavar="GPU", help="Indexes, UUIDs, or the beginnings of UUIDs."),
]


def drain(
    ctx: typer.Context,
    gpus: GpusArgument,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The reason, shown to all users.")
    ] = None,
    socket: SocketOption = None,
) -> int:
    """Stop granting leases on GPUs; running jobs continue. For admins and root.

    A drained GPU stays drained across restarts, until gpulease resume.

    \b
    Examples:
      gpulease drain 1 --why "new fan on Friday"
      gpulease drain 0 GPU-5f3a
    """
    client = connect(ctx, socket)
    unknown, known = split_by_known(client, gpus)
    for name in unknown:
        print_stdout(_drained(client.drain(name, why=why), why))
    return for_each(known, lambda gpu: _drained(client.drain(gpu, why=why), why))


def split_by_known(client: Client, gpus: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names that no GPU of `status` has, and the others.

    The unknown ones are tried first: when the daemon refuses one, nothing has been done yet.
    """
    present = [(index_of(gpu), gpu.uuid.lower()) for gpu in client.status(queue=0).gpus]
    unknown: list[str] = []
    known: list[str] = []
    for name in dict.fromkeys(gpus):
        found = [gpu for gpu in present if name == gpu[0] or gpu[1].startswith(name.lower())]
        (known if len(found) == 1 else unknown).append(name)
    return unknown, known


def _drained(view: GpuAvailabilityView, why: str | None = None) -> str:
    state = clean(view.drained or "drained")
    if view.changed:
        return f"GPU {view.label} is {state}; {_running(view.jobs)}"
    already = f"GPU {view.label} was already {state}"
    if why is None or clean(why) in state:
        return already
    return f"{already}; to change the reason, run gpulease resume {view.label} first"


def _running(jobs: list[int]) -> str:
    match jobs:
        case []:
            return "no job runs there"
        case [job]:
            return f"job {job} continues there"
        case _:
            return f"jobs {', '.join(map(str, jobs))} continue there"


def resume(ctx: typer.Context, gpus: GpusArgument, socket: SocketOption = None) -> int:
    """Grant leases again on drained GPUs. For admins and root.

    Also ends a drain that gpulease made after a hardware fault. A new fault drains
    the GPU again; the same lasting one does not.

    \b
    Examples:
      gpulease resume 1
      gpulease resume 0 1
    """
    client = connect(ctx, socket)
    unknown, known = split_by_known(client, gpus)
    for name in unknown:
        print_stdout(_resumed(client.resume(name)))
    return for_each(known, lambda gpu: _resumed(client.resume(gpu)))


def _resumed(view: GpuAvailabilityView) -> str:
    if not view.changed:
        return f"GPU {view.label} was not drained"
    return f"GPU {view.label} takes leases again"


def pause(
    ctx: typer.Context,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The reason, shown to all users.")
    ] = None,
    socket: SocketOption = None,
) -> None:
    """Start no more jobs; running jobs continue. For admins and root.

    Users can still submit jobs, which wait. The queue stays paused across restarts,
    until gpulease unpause. To close single GPUs, use gpulease drain.

    \b
    Examples:
      gpulease pause --why "new driver at 18:00"
      gpulease unpause
    """
    view = connect(ctx, socket).pause(why=why)
    reason = f": {clean(view.paused.why)}" if view.paused and view.paused.why else ""
    state = "is" if view.changed else "was already"
    print_stdout(f"the queue {state} paused{reason}; running jobs continue")


def unpause(ctx: typer.Context, socket: SocketOption = None) -> None:
    """Start jobs again after gpulease pause. For admins and root.

    Drained GPUs stay drained; gpulease resume opens them.

    \b
    Examples:
      gpulease unpause
    """
    view = connect(ctx, socket).unpause()
    print_stdout("jobs start again" if view.changed else "the queue was not paused")
