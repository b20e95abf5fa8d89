"""Memory over time, of a job or a GPU: `gpulease plot`, and `gpulease show --plot`."""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from gpulease.cli.chart import (
    Chart,
    Limit,
    Times,
    gpu_layers,
    job_layers,
    memory_chart,
    owner_layers,
)
from gpulease.cli.connect import reach
from gpulease.cli.job_selection import names_array, one_element, select_jobs, selection
from gpulease.cli.options import SocketOption, named_socket, takes_its_options
from gpulease.cli.render import (
    Screen,
    drawn,
    local_time,
    print_stdout,
    stdout_screen,
    write_stdout,
)
from gpulease.cli.tables import Span, line
from gpulease.client import Client, encode
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import clean, clock, id_of, instant, named, size
from gpulease.errors import BadUsage, BadValue, GpuleaseError
from gpulease.light_json import indent
from gpulease.units import format_span, parse_span
from gpulease.wire.history import MOST_POINTS, GpuHistoryView, JobMemoryView, MeanView
from gpulease.wire.jobs import JobView
from gpulease.wire.text import leased

_DAY_S = 86400.0
_EXAMPLE = "gpulease plot 17, or gpulease plot --gpu 0"


@takes_its_options
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
    *,
    gpu: str | None,
    since: str | None,
    by: str | None,
    out: str | None,
    json: bool,
    socket: SocketOption = None,
) -> None:
    """Draw memory over time: of a job against its lease, or of a GPU.

    Of a job it is what its processes held and, where a framework reports it, what the pool of the
    framework had in use. Of a GPU it is what was used, leased, and used without a lease. Where a
    point stands for a longer time, it is the average, and the peak is a faint band behind it. What
    was not recorded is shown as unknown.

    PNG files need matplotlib, of the extra "plot".

    \b
    Examples:
      gpulease plot last
      gpulease plot 17 --out memory.svg
      gpulease plot --gpu 0 --since 7d
      gpulease plot --gpu 0 --by user --out users.svg
      gpulease plot 17 --json | jq '.gpus[0].used'
    """
    if (job is None) == (not gpu):
        raise BadUsage("cannot plot: name a job, or a GPU with --gpu", _EXAMPLE)
    if job is not None and (since is not None or by is not None):
        raise BadUsage("cannot plot a job: --since and --by are for --gpu", _EXAMPLE)
    if out is not None and json:
        raise BadValue("cannot plot: --out and --json exclude each other", "use one of them")
    seconds = _DAY_S if since is None else parse_span(since).total_seconds()
    file = None if out is None else Path(out)
    named = named_socket(ctx, socket)
    if job is not None:
        if acts_on_slurm(named):
            from gpulease.slurm.command.no_daemon import no_plot

            raise no_plot(job)
        plot_job(reach(named, "plot"), job, file, json=json)
    elif gpu is not None:
        plot_gpu(reach(named, "plot"), gpu, seconds, file, by_user=by is not None, json=json)


_WIDTH = 80
"""Of a chart in a pipe or a file."""
_HEIGHT = 16
_LEAST_HEIGHT = 6
_BESIDE = 4
"""Lines around a chart: its head, its legend, the text below, an empty one."""
_MOST_OWNERS = 5
_LEAST_POINTS, _LABELS = 10, 8


def plot_job(client: Client, word: str, out: Path | None, *, json: bool) -> None:
    """Draw what a job used on each of its GPUs."""
    _check(out)
    wanted = selection("plot", [word])
    (number,) = select_jobs(client, wanted)
    job = client.job(number)
    if names_array(wanted.words, job):
        raise one_element("plot", job)
    screen = stdout_screen()
    view = client.job_memory(number, _points(screen, out, json=json))
    if json:
        print_stdout(indent(encode(view)))
        return
    charts = [*job_charts(job, view, local_time())]
    if not charts:
        why = "none of it was recorded" if view.gpus else "it has not held any"
        raise GpuleaseError(
            f"cannot plot the memory of job {id_of(job)}: {why}",
            "gpulease records what a job uses every 10s",
        )
    _show(charts, out, screen)


def show_charts(client: Client, number: int) -> None:
    """Print the charts of a job below its page, or that there is nothing to draw."""
    screen = stdout_screen()
    view = client.job_memory(number, _points(screen, None, json=False))
    if not (charts := [*job_charts(client.job(number), view, local_time())]):
        write_stdout(drawn([line(""), line("none of its memory was recorded", "dim")], screen))
    for chart in charts:
        write_stdout("\n" + text_of(chart, screen, len(charts)))


def plot_gpu(
    client: Client, gpu: str, since: float, out: Path | None, *, by_user: bool, json: bool
) -> None:
    """Draw a GPU in the last `since` seconds."""
    _check(out)
    screen = stdout_screen()
    view = client.gpu_history(gpu, since, points=_points(screen, out, json=json))
    if json:
        print_stdout(indent(encode(view)))
        return
    coloured = screen.colour or out is not None
    layers = owner_layers(view, colour=coloured) if by_user else gpu_layers(view)
    limit = None if view.total is None else Limit("all memory", view.total)
    within = format_span(timedelta(seconds=since))
    head = (
        Span(f"GPU {clean(view.label)}", "title"),
        Span(f"  {clean(view.name)}, the last {within}"),
    )
    times = Times(instant(view.begins_at), view.step)
    _show([Chart(head, layers, limit, times, [*about_gpu(view)])], out, screen)


def _check(out: Path | None) -> None:
    """Check the name of the file, and that it can be drawn. Raises: GpuleaseError."""
    if out is not None:
        from gpulease.cli.plot_file import check_out

        check_out(out)


def _points(screen: Screen, out: Path | None, *, json: bool) -> int:
    if json or out is not None:
        return MOST_POINTS
    # No more than columns beside the labels: the daemon merges steps more exactly than the chart.
    return max(_LEAST_POINTS, (screen.width or _WIDTH) - _LABELS)


def job_charts(job: JobView, view: JobMemoryView, now: datetime) -> Iterator[Chart]:
    """Yield a chart for each GPU of a job with recorded use."""
    times = Times(instant(view.begins_at), view.step)
    begin = clock(job.granted_at, now)
    end = "now" if job.ended_at is None else clock(job.ended_at, now)
    sizes = {lease.gpu: leased(lease) for lease in job.leases}
    for gpu in view.gpus:
        if any(each is not None for each in gpu.used):
            layers, limit = job_layers(gpu)
            about = f"  {named(job)} on GPU {clean(gpu.label)}, {begin} to {end}"
            head = Span(f"job {id_of(job)}", "title"), Span(about)
            mean = gpu.means.get("used")
            below = [_peak_and_mean("used", gpu.used, mean, sizes.get(gpu.gpu) or size(gpu.leased))]
            yield Chart(head, layers, limit, times, below)


def about_gpu(view: GpuHistoryView) -> Iterator[str]:
    if any(each is not None for each in view.used):
        total = size(view.total) if view.total else ""
        yield _peak_and_mean("used", view.used, view.means.get("used"), total)
        yield _peak_and_mean("leased", view.leased, view.means.get("leased"), total)
    for owner in view.owners[:_MOST_OWNERS]:
        who = "others" if owner.user is None else clean(owner.user)
        yield f"{_peak_and_mean(who, owner.used, owner.mean)}"
    busy = [each for each in view.utilization if each is not None]
    if busy:
        mean = _mean(view.utilization, view.means.get("utilization"), lambda it: f"{it:.0f}%")
        yield f"utilization: at most {max(busy)}%{mean}"


def _peak_and_mean(
    what: str, series: Sequence[int | None], mean: MeanView | None, of: str = ""
) -> str:
    known = [each for each in series if each is not None]
    if not known:
        return f"{what}: unknown"
    most = f"{size(max(known))} of {of}" if of else size(max(known))
    return f"{what}: at most {most}{_mean(series, mean, lambda it: size(round(it)))}"


def _mean(
    series: Sequence[int | None], mean: MeanView | None, write: Callable[[float], str]
) -> str:
    """Write an average, and that it is of a part of the time if it is; "" if it is unknown."""
    if mean is None or mean.overall is None:
        return ""
    pairs = zip(series, mean.values, strict=True)
    is_part = any(most is not None and average is None for most, average in pairs)
    part = " where it is known" if is_part else ""
    return f", {write(mean.overall)} on average{part}"


def _show(charts: Sequence[Chart], out: Path | None, screen: Screen) -> None:
    if out is not None:
        from gpulease.cli.plot_file import draw_into

        draw_into(out, charts)
        return
    for place, chart in enumerate(charts):
        write_stdout("\n" * bool(place) + text_of(chart, screen, len(charts)))


def text_of(chart: Chart, screen: Screen, count: int = 1) -> str:
    """Return a chart, one of `count`, as text for a screen."""
    room = _HEIGHT if screen.height is None else (screen.height - 1) // count - _BESIDE
    text = memory_chart(
        chart.layers,
        chart.limit,
        chart.times,
        width=screen.width or _WIDTH,
        height=max(_LEAST_HEIGHT, min(_HEIGHT, room)),
        colour=screen.colour,
        blocks=not screen.ascii,
    )
    below = [line(each, "dim") for each in chart.below]
    return drawn([chart.head], screen) + text + drawn(below, screen)
