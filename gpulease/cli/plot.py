"""`gpulease plot`: its options and their help; `plot_page` does the work."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from gpulease.cli.connect import SocketOption, connect, named_socket
from gpulease.cli.plot_page import plot_gpu, plot_job
from gpulease.cluster_choice import acts_on_slurm
from gpulease.errors import BadUsage, BadValue
from gpulease.units import parse_span

_DAY_S = 86400.0
_EXAMPLE = "gpulease plot 17, or gpulease plot --gpu 0"


def plot(
    ctx: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="The number or name of a job; 17_3: an element; 'last': your newest.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="GPU", help="A GPU in place of a job: its index or UUID."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="SPAN", help="With --gpu: the last 7d, 2h; default: 24h."),
    ] = None,
    by: Annotated[
        Literal["user"] | None,
        typer.Option(
            "--by", metavar="user", help="With --gpu: what each user used.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Draw into a file: use.png or use.svg."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the series as JSON.")] = False,
    socket: SocketOption = None,
) -> None:
    """Draw memory over time: of a job against its lease, or of a GPU.

    Of a job it is what its processes held and, where a framework reports it, what the pool of the
    framework had in use. Of a GPU it is what was used, leased, and used without a lease. Where a
    point stands for a longer time, it is the average, and the peak is a faint band behind it. What
    was not recorded is shown as unknown.

    --out needs matplotlib, of the extra "plot".

    \b
    Examples:
      gpulease plot last
      gpulease plot 17 --out memory.png
      gpulease plot --gpu 0 --since 7d
      gpulease plot --gpu 0 --by user --out users.svg
      gpulease plot 17 --json | jq '.gpus[0].used'
    """
    if (job is None) == (gpu is None):
        raise BadUsage("cannot plot: name a job, or a GPU with --gpu", _EXAMPLE)
    if job is not None and (since is not None or by is not None):
        raise BadUsage("cannot plot a job: --since and --by are for --gpu", _EXAMPLE)
    if out is not None and json:
        raise BadValue("cannot plot: --out and --json exclude each other", "use one of them")
    seconds = _DAY_S if since is None else parse_span(since).total_seconds()
    if job is not None:
        if acts_on_slurm(named_socket(ctx, socket)):
            from gpulease.slurm.command.no_daemon import no_plot

            raise no_plot(job)
        plot_job(connect(ctx, socket), job, out, json=json)
    elif gpu is not None:
        plot_gpu(connect(ctx, socket), gpu, seconds, out, by_user=by is not None, json=json)
