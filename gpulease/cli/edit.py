"""`gpulease edit`: change what waiting jobs ask for."""

import re
from datetime import datetime
from typing import Annotated, Literal

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.job_selection import select_jobs, selection
from gpulease.cli.options import JobsArgument
from gpulease.cli.queue_options import begin_instant, dependencies
from gpulease.cli.render import print_stdout
from gpulease.cli.request import gpu_names
from gpulease.client import Client
from gpulease.drawing.words import clean, clock
from gpulease.errors import BadUsage
from gpulease.units import Share, parse_memory, parse_size, parse_span
from gpulease.wire.jobs import EditedJobView, EditedView
from gpulease.wire.requests import EditRequest

_NONE = "none"
_ANY = "any"
_INSTANT = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
"""As the daemon writes begin times."""


def edit(  # noqa: PLR0913, PLR0917  typer reads the options from the arguments
    ctx: typer.Context,
    jobs: JobsArgument = None,
    mem: Annotated[
        str | None, typer.Option("--mem", metavar="SIZE", help="Memory on each GPU: 4G, 40%.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", help="Number of GPUs.")] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="GPU", help="Only these GPUs, all of them: 1,3; or any."),
    ] = None,
    gpu_model: Annotated[
        str | None, typer.Option("--gpu-model", metavar="MODEL", help="Model: A100; or any.")
    ] = None,
    min_vram: Annotated[
        str | None,
        typer.Option("--min-vram", metavar="SIZE", help="Least size of a GPU: 40G; or any."),
    ] = None,
    same_model: Annotated[
        bool | None, typer.Option("--same-model/--no-same-model", help="All GPUs of one model.")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="SPAN", help="Time limit: 30m, 4h; or none.")
    ] = None,
    priority: Annotated[
        Literal["low", "normal", "high"] | None,
        typer.Option("--priority", help="Class in the queue. high: for admins."),
    ] = None,
    nice: Annotated[
        int | None,
        typer.Option(
            "--nice", metavar="N", help="0 to 19: start later within the class; admins: -20."
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="JOB", help="Jobs to wait for: 17, 17:any; or none."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--begin", metavar="TIME", help="Do not start before: 22:00, +2h; or now."),
    ] = None,
    held: Annotated[
        bool | None, typer.Option("--held/--no-held", help="Do not start; or may start again.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="TEXT", help="New name in listings.")
    ] = None,
    socket: SocketOption = None,
) -> None:
    """Change what waiting jobs ask for. They keep their age, and so their place.

    What is not named stays as it is. The new values are checked as at submission; of
    several jobs, all change or none. Of an array, the elements that still wait
    change. For running jobs, see gpulease extend and gpulease requeue.

    \b
    Examples:
      gpulease edit 17 --mem 6G --time 2h
      gpulease edit 17 --gpu any --gpu-model A100
      gpulease edit 17 18 --after 12 --name evaluation
      gpulease edit last --no-held
      gpulease edit 17 --after none --begin now
    """
    wanted = selection("edit", jobs)
    request = EditRequest(
        [],
        gpus=gpus,
        model="" if gpu_model == _ANY else gpu_model,
        min_vram=_min_vram(min_vram),
        same_model=same_model,
        time_limit=_seconds(time),
        name=name,
        priority=priority,
        nice=nice,
        held=held,
        begin_at=begin if begin in (None, "now") else _instant(begin),
    )
    _set_memory(request, mem)
    _set_gpus(request, gpu)
    if request == EditRequest([]) and after is None:
        raise BadUsage("cannot edit: nothing is to change", "gpulease edit 17 --mem 6G --time 2h")
    client = connect(ctx, socket)
    request.after = None if after is None else _after(client, after)
    request.jobs = select_jobs(client, wanted)
    request.only_waiting = len(request.jobs) > len(wanted.words)
    for text in results(client.edit(request), datetime.now().astimezone()):
        print_stdout(text)


def _seconds(time: str | None) -> float | None:
    if time is None:
        return None
    return 0.0 if time == _NONE else parse_span(time).total_seconds()


def _instant(begin: str) -> str:
    return begin_instant(begin, datetime.now().astimezone())


def _set_memory(request: EditRequest, mem: str | None) -> None:
    memory = None if mem is None else parse_memory(mem)
    if isinstance(memory, Share):
        request.share = float(memory.percent)
    else:
        request.memory = memory


def _set_gpus(request: EditRequest, gpu: list[str] | None) -> None:
    if gpu is None:
        return
    request.named = [] if gpu == [_ANY] else gpu_names(gpu)


def _min_vram(size: str | None) -> int | None:
    if size is None:
        return None
    return 0 if size == _ANY else parse_size(size)


def _after(client: Client, words: list[str]) -> list[str]:
    return [] if words == [_NONE] else dependencies(client, words)


def results(view: EditedView, now: datetime) -> list[str]:
    """Describe jobs that were edited or moved: each of a few, or only their number."""
    if view.count > len(view.jobs):
        return [f"{view.count} jobs: {_changes(view.jobs[0], now)}, and so on"]
    return [f"job {clean(job.label)}: {_changes(job, now)}" for job in view.jobs]


def _changes(job: EditedJobView, now: datetime) -> str:
    changes = (
        _INSTANT.sub(lambda found: clock(found[0], now), each)
        if each.startswith("begin ")
        else each
        for each in job.changes
    )
    return clean("; ".join(changes)) or "nothing changes"
