"""Change jobs, for `gpulease edit`, `move`, `requeue`, `extend` and `keep`."""

from __future__ import annotations

from datetime import timedelta

from gpulease.cli.job_selection import for_each, select_jobs, selection
from gpulease.cli.light_connection import light_client, queue_client
from gpulease.cli.render import local_time, print_stdout
from gpulease.cli.request import EditRequest
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import clean, clock, id_of, until
from gpulease.errors import BadUsage, BadValue
from gpulease.options import OPTIONS, read_fields
from gpulease.units import format_span, parse_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path
    from typing import Any

    from gpulease.client.light_client import LightClient
    from gpulease.wire.jobs import EditedJobView, EditedView, JobView


def edit_jobs(*, jobs: Sequence[str] | None, socket: Path | str | None, **typed: Any) -> None:
    """Change what waiting jobs ask for; an option that is None leaves it as it is."""
    wanted = selection("edit", jobs)
    given = {name: value for name, value in typed.items() if value is not None}
    if not given:
        raise BadUsage("cannot edit: nothing is to change", "gpulease edit 17 --mem 6G --time 2h")
    fields = _cleared(given)
    read = read_fields(given)
    _refuse_cleared(read.get("claim", {}))
    for part in read.values():
        fields |= part
    if "begin" in given:
        from gpulease.cli.resolved_options import begin_instant

        fields["begin_at"] = begin_instant(given["begin"], local_time())
    client = queue_client(socket, "edit")
    if "after" in given:
        from gpulease.cli.resolved_options import dependencies

        fields["after"] = dependencies(client, given["after"])
    numbers = select_jobs(client, wanted)
    only_waiting = len(numbers) > len(wanted.words)
    request = EditRequest(jobs=numbers, only_waiting=only_waiting, **fields)
    _print_results(client.edit(request))


def _cleared(given: dict[str, Any]) -> dict[str, Any]:
    """Take out the values such as any and none, and return the fields without a value."""
    fields = {}
    for name, value in list(given.items()):
        word, without = OPTIONS[name].clears or (None, None)
        if value in (word, [word]):
            del given[name]
            fields[OPTIONS[name].fields[0].rpartition(".")[2]] = without
    return fields


def _refuse_cleared(claim: dict[str, Any]) -> None:
    """Refuse, as `run` does, values that were typed and mean none or any in the request."""
    for name, option in (("cpus", "--cpus"), ("model", "--gpu-model")):
        if claim.get(name) in (0, ""):
            from gpulease.wire.ranges import check_claim
            from gpulease.wire.requests import ClaimRequest

            try:
                check_claim(ClaimRequest(**{name: claim[name]}))
            except BadValue as error:
                raise error.called(option) from None


def _print_results(view: EditedView) -> None:
    for text in results(view, local_time()):
        print_stdout(text)


def results(view: EditedView, now: datetime) -> list[str]:
    """Describe jobs that were edited or moved: each of a few, or only their number."""
    if view.count > len(view.jobs):
        return [f"{view.count} jobs: {_changes(view.jobs[0], now)}, and so on"]
    return [f"job {clean(job.label)}: {_changes(job, now)}" for job in view.jobs]


def _changes(job: EditedJobView, now: datetime) -> str:
    changes = (_in_local_time(each, now) for each in job.changes)
    return clean("; ".join(changes)) or "nothing changes"


def _in_local_time(change: str, now: datetime) -> str:
    """Return a change with the instants of a begin time, which the daemon writes in UTC."""
    if not change.startswith("begin "):
        return change
    import re

    instant = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
    return instant.sub(lambda found: clock(found[0], now), change)


def move_jobs(
    *, jobs: Sequence[str] | None, before: str | None, first: bool, socket: Path | str | None
) -> None:
    """Let waiting jobs start before another one, or before all others of their owner."""
    if (before is None) is not first:
        raise BadUsage(
            "cannot move: give either --before JOB or --first", "gpulease move 17 --before 12"
        )
    wanted = selection("move", jobs)
    client = queue_client(socket, "move")
    target = None if before is None else _one(client, before)
    _print_results(client.move(select_jobs(client, wanted), target))


def _one(client: LightClient, word: str) -> int:
    numbers = select_jobs(client, selection("move before", [word]))
    if len(numbers) > 1:
        raise BadUsage(
            f"cannot move before array {word}: name one of its elements",
            f"gpulease show {word} lists them",
        )
    return numbers[0]


def requeue_jobs(
    *, jobs: Sequence[str] | None, name: str | None, every: bool, socket: Path | str | None
) -> int:
    """Stop running jobs and have them queued again; return the exit code."""
    wanted = selection("requeue", jobs, name, every)
    client = queue_client(socket, "requeue")
    numbers = select_jobs(client, wanted)
    return for_each(numbers, lambda number: _requeued(client.requeue(number)))


def _requeued(job: JobView) -> str:
    """Describe a job that is queued again."""
    if job.retried_as is not None:
        return f"job {id_of(job)} is queued again as job {job.retried_as}"
    return f"job {id_of(job)} is ending, and is queued again when its processes have ended"


def extend_jobs(
    *, words: Sequence[str] | None, name: str | None, every: bool, socket: Path | str | None
) -> int:
    """Add time to the limits of jobs, and return the exit code."""
    jobs, seconds = read_extension(words or ())
    wanted = selection("extend", jobs, name, every)
    if acts_on_slurm(socket):
        from gpulease.slurm.command import job_control

        return job_control.extend_jobs(wanted, seconds)
    client = light_client(socket)
    numbers = select_jobs(client, wanted)
    now = local_time()
    return for_each(numbers, lambda number: result_of_extend(client.extend(number, seconds), now))


def read_extension(words: Sequence[str]) -> tuple[list[str], float]:
    """Return the jobs, and the seconds to add (below zero: to remove), in `JOB... +SPAN`.

    Raises:
        BadUsage: the last word is the number or the name of a job, by its form.
        BadValue: the last word is no span of time.
    """
    *jobs, span = words
    if span.isdigit() or span.isalpha():
        raise BadUsage(
            f"cannot extend: {span!r} is no span of time to add",
            "the time comes last: gpulease extend 17 +2h",
        )
    sign = -1 if span.startswith("-") else 1
    amount = parse_span(span[1:] if span.startswith(("+", "-")) else span)
    return jobs, sign * amount.total_seconds()


def result_of_extend(job: JobView, now: datetime) -> str:
    """Describe until when a job may run now."""
    if (end := job.expires_at) is not None:
        return f"job {id_of(job)} now ends at {clock(end, now)}, in {until(end, now)}"
    limit = timedelta(seconds=job.claim.time_limit or 0)
    return f"job {id_of(job)} may run for {format_span(limit)} once it starts"


def keep_jobs(
    *,
    jobs: Sequence[str] | None,
    name: str | None,
    every: bool,
    span: str,
    socket: Path | str | None,
) -> int:
    """Protect idle leases from being released for a time, and return the exit code."""
    asked = parse_span(span)
    wanted = selection("keep", jobs, name, every)
    client = queue_client(socket, "keep")
    numbers = select_jobs(client, wanted)
    now = local_time()
    return for_each(
        numbers,
        lambda number: result_of_keep(client.keep(number, asked.total_seconds()), asked, now),
    )


def result_of_keep(job: JobView, span: timedelta, now: datetime) -> str:
    """Describe until when a job is kept, and from what it is not."""
    end = clock(job.kept_until_at, now)
    kept = (
        f"the lease of job {id_of(job)} is kept until {end}, for {format_span(span)}, even if idle"
    )
    stops_at = min((lease.stops_at for lease in job.leases if lease.stops_at), default=None)
    if stops_at is None:
        return kept
    left = until(stops_at, now)
    return f"{kept}; the job holds too much memory, and is stopped in {left} unless that ends"
