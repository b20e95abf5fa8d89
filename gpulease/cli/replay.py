"""`gpulease replay`: a recorded workload under the scheduler of the daemon, without a daemon."""

from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gpulease.cli.options import takes_its_options
from gpulease.cli.render import print_stderr, print_stdout, show_page
from gpulease.cli.tables import Column, Line, Page, Table, line
from gpulease.client import encode
from gpulease.drawing.words import clean, shorten, size
from gpulease.errors import BadUsage
from gpulease.light_json import indent
from gpulease.units import counted, format_span

if TYPE_CHECKING:
    from gpulease.replay.results import Result, StartErrors
    from gpulease.replay.trace import Server, Trace

_SPANS = (
    ("mean wait", "mean_wait_s"),
    ("median wait", "median_wait_s"),
    ("95% wait at most", "p95_wait_s"),
    ("99% wait at most", "p99_wait_s"),
    ("longest wait", "longest_wait_s"),
    ("mean completion", "mean_completion_s"),
    ("makespan", "makespan_s"),
)
_LABEL_WIDTH = 18
_EXAMPLE = "gpulease replay month.csv"
_MOST_USERS = 10
_PARTS = (
    ("memory utilization", "memory_utilization"),
    ("fragmentation", "fragmentation"),
)


@takes_its_options
def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="The jobs; may be compressed (.csv.gz).")
    ],
    *,
    servers: str | None,
    policy: Literal["fair", "easy", "fifo"],
    whole_gpus: bool,
    contention: Literal["none", "pairs", "curve", "slices"],
    placement: Literal["best", "spread"],
    out: str | None,
    skip_too_large: bool,
    json: bool,
) -> None:
    """Replay recorded jobs through the scheduler, on a virtual clock.

    The result is compared with whole GPUs under EASY backfill, much as Slurm
    schedules, and under FIFO.
    No daemon and no GPU is needed, and nothing is started.

    The trace is a CSV file with the columns job, submit_s, duration_s, gpus, memory_mib (on each
    GPU), user and time_limit_s (empty: no limit), and optionally utilization (0 to 1) and command.
    gpulease history --csv writes one of the jobs that ran here.

    \b
    Examples:
      gpulease history --csv --since 30d > month.csv
      gpulease replay month.csv --servers 2x8x24G
      gpulease replay month.csv --servers 2x8x24G,2x24G
      gpulease replay month.csv --servers 2x8x24G --policy fifo --json
      gpulease replay month.csv --servers 2x8x24G --out runs.csv
    """
    if servers is None:
        raise BadUsage("cannot replay: --servers is missing", f"{_EXAMPLE} --servers 2x8x24G")
    # Only this verb needs the scheduler.
    from gpulease.replay import results as replays
    from gpulease.replay import trace as traces

    machines = traces.parse_servers(servers)
    read = traces.read_trace(trace)
    skipped = traces.too_large(read, machines)
    kept = read.without(skipped) if skip_too_large else read
    traces.refuse_too_large(read, [] if skip_too_large and kept.jobs else skipped)
    asked = replays.Settings(policy, whole_gpus, contention, placement)
    results = replays.compare(kept.jobs, machines, [asked, *replays.baselines(asked)])
    if out is not None:
        traces.write_runs(Path(out), results[0].runs, kept)
    left_out = len(read.jobs) - len(kept.jobs)
    if json:
        print_stdout(indent(encode(report(results, machines, left_out))))
        return
    if left_out:
        jobs = "1 job that fits" if left_out == 1 else f"{left_out} jobs that fit"
        print_stderr(f"left out {jobs} on no server")
    show_page(page(results, kept, machines))


def report(results: "list[Result]", servers: "tuple[Server, ...]", left_out: int) -> dict[str, Any]:
    """Return the figures of each replay for JSON."""
    return {
        "servers": [asdict(server) for server in servers],
        "left_out": left_out,
        "results": [
            {
                **asdict(result.settings),
                "figures": asdict(result.figures),
                "users": [asdict(user) for user in result.users],
                "expected_starts": asdict(result.starts) if result.starts else None,
            }
            for result in results
        ],
    }


def page(results: "list[Result]", trace: "Trace", servers: "tuple[Server, ...]") -> Page:
    """Lay out the figures, one column for each replay; the first is what was asked for."""
    found = [asdict(each.figures) for each in results]
    jobs, users = counted(len(trace.jobs), "job"), counted(len(results[0].users), "user")
    kinds = Counter((server.gpus, server.memory) for server in servers)
    machines = ",".join(f"{n}x{gpus}x{size(memory)}" for (gpus, memory), n in kinds.items())
    rows = (
        *((line(label), *(_span(each[name]) for each in found)) for label, name in _SPANS),
        *(
            (line(label), *(line(f"{100 * each[name]:.1f}%") for each in found))
            for label, name in _PARTS
        ),
        (line("Jain's index"), *(line(f"{each['jain_index']:.3f}") for each in found)),
    )
    return [
        line(f"{jobs} of {users} on {machines}"),
        Table(_columns("", results), rows),
        Table(_columns("MEAN WAIT OF", results), _user_rows(results)),
        *(line(_verdict(results[0], other)) for other in results[1:]),
        *(line(_predictions(each.starts)) for each in results if each.starts),
    ]


def _columns(title: str, results: "list[Result]") -> tuple[Column, ...]:
    names = [each.settings.name.upper() for each in results]
    return (
        Column(f"{title:<{_LABEL_WIDTH}}"),
        *(Column(name, right=True, leaves=number) for number, name in enumerate(names)),
    )


def _user_rows(results: "list[Result]") -> tuple[tuple[Line, ...], ...]:
    """Return a row for each of the users with the most jobs."""
    most = sorted(results[0].users, key=lambda user: (-user.jobs, user.user))[:_MOST_USERS]
    waits = [{user.user: user.mean_wait_s for user in each.users} for each in results]
    return tuple(
        (
            line(shorten(clean(user.user), _LABEL_WIDTH)),
            *(_span(each[user.user]) for each in waits),
        )
        for user in most
    )


def _predictions(errors: "StartErrors") -> str:
    error, wait = timedelta(seconds=errors.median_error_s), timedelta(seconds=errors.median_wait_s)
    share = round(100 * errors.in_range / errors.jobs)
    return (
        f"expected starts of {counted(errors.jobs, 'waiting job')}: the median error is "
        f"{format_span(error)}, where {format_span(wait)} were left to wait; {share}% started in "
        "the range that is shown"
    )


def _span(seconds: float) -> Line:
    return line(format_span(timedelta(seconds=seconds)))


def _verdict(asked: "Result", other: "Result") -> str:
    mine, theirs = asked.figures.mean_wait_s, other.figures.mean_wait_s
    if mine == theirs:
        return f"the mean wait is the same as with {other.settings.name}"
    if not theirs:
        return f"with {other.settings.name} no job waits"
    side = "below" if mine < theirs else "above"
    change = 100 * abs(mine / theirs - 1)
    return f"the mean wait is {change:.0f}% {side} that of {other.settings.name}"
