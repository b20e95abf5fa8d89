"""Verbs for admins: drain and resume GPUs, pause and unpause the queue, reserve GPUs for a time."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.job_selection import for_each
from gpulease.cli.options import JsonOption
from gpulease.cli.render import local_time, print_stdout, show_page
from gpulease.cli.window_page import page, sentence
from gpulease.client import Client, decode
from gpulease.drawing.words import clean, index_of
from gpulease.errors import BadValue
from gpulease.light_json import indent
from gpulease.units import parse_instant, parse_span
from gpulease.wire.machine import GpuAvailabilityView, WindowList
from gpulease.wire.requests import ReserveRequest

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


def reserve(  # noqa: PLR0913, PLR0917  typer reads the options from the arguments
    ctx: typer.Context,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="N|all", help="So many GPUs, whichever.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="GPU", help="This GPU: an index or a UUID; repeatable."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="WHEN", help="22:00, 'fri 18:00', '2026-12-04 18:00', +2h."),
    ] = None,
    span: Annotated[
        str | None, typer.Option("--for", metavar="SPAN", help="How long: 12h, 1d, 30m.")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="CRON", help="Recur: minute hour day month weekday."),
    ] = None,
    user: Annotated[
        list[str] | None,
        typer.Option("-u", "--user", metavar="USER", help="For jobs of this user; repeatable."),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="GROUP", help="For jobs of this group; repeatable."),
    ] = None,
    lift_limits: Annotated[
        bool, typer.Option("--lift-limits", help="Limits do not hold back its users' jobs then.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Default: that of the first user or group."),
    ] = None,
    cancel: Annotated[
        str | None, typer.Option("--cancel", metavar="NAME", help="Remove a window.")
    ] = None,
    shows: Annotated[bool, typer.Option("--list", help="Show the windows; the default.")] = False,
    json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Set GPUs apart for a time, called a window. For admins and root; everyone may list.

    While a window is on, only jobs of its users start on its GPUs; without
    --user and --group, no job does. Other jobs start there before it only if
    they end in time: with a time limit (--time), before it begins; without
    one, if twice their predicted run time is over by then. Running jobs
    continue.

    --every takes five fields of crontab(5), in the time zone of the machine;
    the times of --from are in that of your shell.

    \b
    Examples:
      gpulease reserve --gpus 2 --from 'fri 18:00' --for 12h --user alice
      gpulease reserve --gpus all --every '0 22 * * *' --for 8h --group lab \\
        --lift-limits
      gpulease reserve --gpu 0 --gpu 1 --from +1h --for 2h --name fans
      gpulease reserve
      gpulease reserve --cancel fans
    """
    wanted = (gpus, gpu, begin, span, every, user, group, name, lift_limits or None)
    is_new = any(each is not None for each in wanted)
    if (shows or json) + is_new + (cancel is not None) > 1:
        raise BadValue(
            "cannot reserve: --list, --json and --cancel exclude the other options",
            "use one at a time; gpulease reserve alone shows all windows",
        )
    client = connect(ctx, socket)
    if cancel is not None:
        print_stdout(f"window {clean(client.cancel_window(cancel).name)} is cancelled")
    elif not is_new:
        _show(client.windows_json(), json=json)
    elif span is None:
        raise BadValue("cannot reserve: it has no end", "say how long with --for 12h")
    else:
        now = datetime.now(UTC)
        request = ReserveRequest(
            parse_span(span).total_seconds(),
            None if begin is None else parse_instant(begin, now).astimezone(UTC).isoformat(),
            every,
            _count(gpus, gpu),
            gpu or [],
            user or [],
            group or [],
            name,
            lift_limits,
        )
        print_stdout(f"reserved: {sentence(client.reserve(request), now.astimezone())}")


def _count(gpus: str | None, named: list[str] | None) -> int | None:
    """Return the number of GPUs; None for named ones, and for all."""
    if (gpus is None) != bool(named):
        raise BadValue(
            "cannot reserve: give either --gpus or --gpu",
            "--gpus 2 for any two, --gpus all, or --gpu 0 --gpu 1 for particular ones",
        )
    if gpus is None or gpus == "all":
        return None
    if not gpus.isdecimal() or len(gpus) > len("1024"):
        raise BadValue(f"cannot reserve {gpus[:40]!r} GPUs", "write --gpus 2 or --gpus all")
    return int(gpus)


def _show(reply: bytes, *, json: bool) -> None:
    if json:
        print_stdout(indent(reply))
        return
    now = local_time()
    show_page(page(decode(WindowList, reply), now))
