"""End jobs and release leases, for `gpulease cancel`."""

from __future__ import annotations

from datetime import timedelta

from gpulease.cli.job_selection import (
    MOST_ONE_BY_ONE,
    announce,
    for_each,
    named,
    names_array,
    no_match,
    select_jobs,
    selection,
)
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import print_stdout
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import cancelled, id_of
from gpulease.errors import BadUsage, GpuleaseError
from gpulease.units import format_span, parse_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from gpulease.cli.job_selection import Selection
    from gpulease.client.light_client import LightClient
    from gpulease.wire.jobs import CancelledView, JobView


def cancel_jobs(
    *,
    jobs: Sequence[str] | None,
    name: str | None,
    every: bool,
    user: str | None,
    grace: str | None,
    socket: Path | str | None,
) -> int:
    """Cancel jobs, print what becomes of each, and return the exit code."""
    seconds = None if grace is None else parse_span(grace, may_be_zero=True).total_seconds()
    if user is not None and jobs:
        raise BadUsage(
            "cannot cancel: JOB and --user exclude each other", "gpulease cancel --user bob"
        )
    wanted = selection("cancel", jobs, name, every or (user is not None and name is None))
    if acts_on_slurm(socket):
        from gpulease.slurm.command import job_control

        return job_control.cancel_jobs(wanted, user, grace)
    client = light_client(socket)
    if not wanted.words:
        return _together(client, wanted, user, seconds)
    numbers = select_jobs(client, wanted)
    for array in [number for number in numbers if _is_array(client, number, wanted.words)]:
        numbers.remove(array)
        view = _cancel_all(client, array=array, grace=seconds)
        print_stdout(f"array {array}: {summary(view) or 'it had already ended'}")
    if len(numbers) > MOST_ONE_BY_ONE:
        print_stdout(summary(_cancel_all(client, jobs=numbers, grace=seconds)))
        return 0
    if len(numbers) > 1 and not any(word[0].isdecimal() for word in wanted.words):
        # Chosen by a name, they may end one after the other while others are cancelled.
        _say(_cancel_all(client, jobs=numbers, grace=seconds), seconds)
        return 0
    return for_each(numbers, lambda number: result(client.cancel(number, grace=seconds), seconds))


def _is_array(client: LightClient, number: int, words: Sequence[str]) -> bool:
    if str(number) not in words:
        return False
    try:
        return names_array(words, client.job(number))
    except GpuleaseError:  # cancelling the job says it
        return False


def _cancel_all(client: LightClient, **chosen: Any) -> CancelledView:
    """Cancel jobs in one transaction."""
    from gpulease.client import checked
    from gpulease.wire.requests import CancelJobsRequest

    return checked(client.transport).cancel_all(CancelJobsRequest(**chosen))


def _together(client: LightClient, wanted: Selection, user: str | None, grace: float | None) -> int:
    view = _cancel_all(client, user=user, name=wanted.pattern, grace=grace)
    if view.count == 0 and user is not None:
        from gpulease.cli.caller import refuse_unknown_user

        hint = "gpulease list --all shows the jobs of all users"
        refuse_unknown_user(user, "cancel jobs of", hint)
    if view.count == 0 and wanted.pattern is not None:
        raise no_match(wanted, user or "yours")
    announce("cancel", list(map(named, view.jobs)), view.count, user)
    _say(view, grace)
    return 0


def _say(view: CancelledView, grace: float | None) -> None:
    many = view.count > len(view.jobs)
    for text in (summary(view),) if many else (result(job, grace) for job in view.jobs):
        print_stdout(text)


def summary(view: CancelledView) -> str:
    """Describe many jobs that were cancelled together."""
    rest = "; processes that remain after the grace are killed" if view.ending else ""
    return cancelled(view.count - view.ending, view.ending) + rest


def result(job: JobView, grace: float | None = None) -> str:
    """Describe a job that was cancelled with a grace of at most so many seconds."""
    released = f"the lease of job {id_of(job)} is released"
    match job.state:
        case "releasing" if job.kind == "hold":
            return released
        case "ended" if job.outcome == "released":
            return released
        case "releasing":
            return f"job {id_of(job)} is ending; {_afterwards(job, grace)}"
        case "ended" if job.outcome == "cancelled":
            return f"job {id_of(job)} is cancelled"
        case "ended":
            return f"job {id_of(job)} had already ended"
        case _:
            return f"job {id_of(job)} will end"


def _afterwards(job: JobView, grace: float | None) -> str:
    if job.grace is None:  # a daemon of an earlier version
        return "processes that remain after its grace are killed"
    seconds = job.grace if grace is None else min(job.grace, grace)
    if seconds < 1:
        return "its processes are killed at once"
    return f"processes that remain after {format_span(timedelta(seconds=seconds))} are killed"
