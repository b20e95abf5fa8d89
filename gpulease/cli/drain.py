"""`gpulease drain`: grant nothing more on GPUs, for admins."""

from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.for_each import for_each, strange_first
from gpulease.cli.format import clean
from gpulease.cli.render import show
from gpulease.wire.views import GpuAvailabilityView

GpusArgument = Annotated[
    list[str],
    typer.Argument(metavar="GPU", help="Indexes, UUIDs, or the beginning of UUIDs."),
]


def drain(
    ctx: typer.Context,
    gpus: GpusArgument,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="What those who wait are told.")
    ] = None,
    socket: SocketOption = None,
) -> int:
    """Grant nothing more on GPUs; jobs that run there go on. For admins and root.

    \b
    Examples:
      gpulease drain 1 --why "new fan on Friday"
      gpulease drain 0 1
      gpulease drain GPU-5f3a
      gpulease resume 1
    """
    client = connect(ctx, socket)
    strange, known = strange_first(client, gpus)
    for name in strange:
        show(drained(client.drain(name, why=why), why))
    return for_each(known, lambda gpu: drained(client.drain(gpu, why=why), why))


def drained(view: GpuAvailabilityView, why: str | None = None) -> str:
    """Say how a GPU stands that somebody wanted drained, for the reason `why`."""
    said = clean(view.drained or "drained")
    if not view.changed:
        before = f"GPU {view.label} was drained before: {said}"
        if why is None or clean(why) in said:
            return before
        again = f"gpulease resume {view.label}, and drain it anew"
        return f"{before}; that is still the reason: to give another, {again}"
    return f"GPU {view.label} is {said}; {_going_on(view.jobs)}"


def _going_on(jobs: list[int]) -> str:
    if not jobs:
        return "nothing runs there"
    one = len(jobs) == 1
    return f"job{'' if one else 's'} {', '.join(map(str, jobs))} there go{'es' if one else ''} on"
