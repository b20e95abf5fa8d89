"""`gpulease extend`: more time for jobs, or less."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.for_each import for_each
from gpulease.cli.format import clock, until
from gpulease.cli.typer_parsers import QuickCommand
from gpulease.units import format_span, parse_span
from gpulease.wire.views import JobView

_LESS = re.compile(r"-\d")
_JUST_A_NUMBER = re.compile(r"\d+", re.ASCII)


class Command(QuickCommand):
    """Reads -30m as less time, and not as options called -3, -0 and -m."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move what takes time away behind the options, where nothing is read as one."""
        before, mark, after = _split(args)
        less = [word for word in before if _LESS.match(word)]
        rest = [word for word in before if not _LESS.match(word)]
        taken = [*rest, "--", *less, *after] if less or mark else rest
        return list(super().parse_args(ctx, taken))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what stands in the line of usage, where all words would be one argument."""
        return ["[OPTIONS]", "{JOB}...", "{+SPAN}"]


def _split(args: list[str]) -> tuple[list[str], list[str], list[str]]:
    place = args.index("--") if "--" in args else len(args)
    return args[:place], args[place : place + 1], args[place + 1 :]


def extend(
    ctx: typer.Context,
    words: Annotated[
        list[str], typer.Argument(metavar="JOB... +SPAN", help="Ids of jobs, and how much more.")
    ],
    socket: SocketOption = None,
) -> int:
    """Give jobs more time: +30m, +2h, +1d12h. With a minus they get less.

    \b
    Examples:
      gpulease extend 17 +2h
      gpulease extend 17 18 +1d
      gpulease extend 17 -30m
    """
    jobs, by_s = read(words)
    client = connect(ctx, socket)
    now = datetime.now(UTC).astimezone()
    return for_each(jobs, lambda number: said(client.extend(number, by_s), now))


def read(words: list[str]) -> tuple[list[int], float]:
    """Return the ids of jobs and the seconds, below zero for less, in `JOB... +SPAN`.

    Raises:
        typer.BadParameter: that is not what the words are.
        BadValue: the time cannot be read.
    """
    *jobs, span = words
    if not jobs or _JUST_A_NUMBER.fullmatch(span):
        raise typer.BadParameter("it does not say by how much, as +2h would")
    sign = -1 if span.startswith("-") else 1
    amount = parse_span(span[1:] if span.startswith(("+", "-")) else span)
    return [_number(job) for job in jobs], sign * amount.total_seconds()


def _number(word: str) -> int:
    if not _JUST_A_NUMBER.fullmatch(word):
        raise typer.BadParameter(f"{word!r} is not the id of a job; the time comes last")
    return int(word)


def said(job: JobView, now: datetime) -> str:
    """Say until when a job has time now."""
    if (end := job.expires_at) is not None:
        return f"job {job.id} now ends at {clock(end, now)}, in {until(end, now)}"
    limit = timedelta(seconds=job.claim.time_limit or 0)
    return f"job {job.id} may now run for {format_span(limit)} once it starts"
