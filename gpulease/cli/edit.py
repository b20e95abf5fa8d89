"""`gpulease edit`: change what waiting jobs ask for."""

import re
from datetime import datetime
from typing import Any

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.job_selection import select_jobs, selection
from gpulease.cli.options import JobsArgument, takes_options_of_edit
from gpulease.cli.queue_options import begin_instant, dependencies
from gpulease.cli.render import print_stdout
from gpulease.drawing.words import clean, clock
from gpulease.errors import BadUsage
from gpulease.options import OPTIONS, read_fields
from gpulease.wire.jobs import EditedJobView, EditedView
from gpulease.wire.requests import EditRequest

_INSTANT = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
"""As the daemon writes begin times."""


@takes_options_of_edit
def edit(
    ctx: typer.Context,
    jobs: JobsArgument = None,
    *,
    socket: SocketOption = None,
    **typed: Any,
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
    given = {name: value for name, value in typed.items() if value is not None}
    if not given:
        raise BadUsage("cannot edit: nothing is to change", "gpulease edit 17 --mem 6G --time 2h")
    fields = _cleared(given)
    for part in read_fields(given).values():
        fields |= part
    if "begin" in given:
        fields["begin_at"] = begin_instant(given["begin"], datetime.now().astimezone())
    client = connect(ctx, socket)
    if "after" in given:
        fields["after"] = dependencies(client, given["after"])
    request = EditRequest([], **fields)
    request.jobs = select_jobs(client, wanted)
    request.only_waiting = len(request.jobs) > len(wanted.words)
    for text in results(client.edit(request), datetime.now().astimezone()):
        print_stdout(text)


def _cleared(given: dict[str, Any]) -> dict[str, Any]:
    """Take out the values such as any and none, and return the fields without a value."""
    fields = {}
    for name, value in list(given.items()):
        word, without = OPTIONS[name].clears or (None, None)
        if value in (word, [word]):
            del given[name]
            fields[OPTIONS[name].fields[0].rpartition(".")[2]] = without
    return fields


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
