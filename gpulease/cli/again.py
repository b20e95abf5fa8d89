"""Submit an ended job once more, for `gpulease again`.

Its command, directory and options are what the daemon has kept; its environment, which is not kept,
and the terminal are those of the caller.
"""

from __future__ import annotations

from gpulease.cli.caller import this_process
from gpulease.cli.job_selection import names_array, one_element, select_jobs, selection
from gpulease.cli.light_connection import queue_client
from gpulease.cli.render import own_name
from gpulease.cli.request import build
from gpulease.cli.run_job import complete, set_begin, submit_and_follow
from gpulease.drawing.words import id_of
from gpulease.errors import BadUsage
from gpulease.options import OPTIONS, run_options
from gpulease.wire.text import clean, from_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from gpulease.wire.requests import SubmitRequest

_NOT_KEPT = frozenset({"wait", "after", "begin", "held"})
"""Options that were about when the job starts."""


def run_again(*, jobs: Sequence[str] | None, socket: Path | str | None, **typed: Any) -> int:
    """Submit an ended job again, with the options that were typed, and return the exit code."""
    if jobs and len(jobs) > 1:
        raise BadUsage("cannot repeat several jobs at once", f"gpulease again {jobs[0]}")
    wanted = selection("again", jobs)
    client = queue_client(socket, "again")
    (number,) = select_jobs(client, wanted)
    job = client.job(number)
    if job.user != own_name():
        why = f"cannot repeat job {id_of(job)}: it is a job of {clean(job.user)}"
        raise BadUsage(why, f"as that user: gpulease again {id_of(job)}")
    if names_array(wanted.words, job):
        raise one_element("again", job)
    stored = client.submission(number)
    given = {name: value for name, value in typed.items() if value not in (None, [])}
    is_attached = bool(stored.attached) and stored.queue.array is None
    options = run_options({"detach": not is_attached, **given})
    request = build(options, [from_wire(word) for word in stored.argv], this_process())
    request.cwd = stored.cwd
    _take_over(stored, request, given)
    request.ends_with_client = request.ends_with_client and not options.detach
    set_begin(request, options)
    complete(client.transport, request, options)
    return submit_and_follow(client.transport, request, options, again=id_of(job))


def _take_over(stored: SubmitRequest, request: SubmitRequest, given: dict[str, Any]) -> None:
    """Set the fields of a request that no option sets to what was stored."""
    for name, option in OPTIONS.items():
        if name in given or name in _NOT_KEPT or (name == "gpus" and "gpu" in given):
            continue
        for field in option.fields:
            part, _, last = field.rpartition(".")
            source, target = (getattr(each, part) if part else each for each in (stored, request))
            setattr(target, last, getattr(source, last))
