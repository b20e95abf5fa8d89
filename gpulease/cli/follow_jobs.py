"""Follow jobs, for `gpulease attach`, `logs` and `wait`."""

from __future__ import annotations

import time
from functools import partial

from gpulease.cli.exit_codes import status_of_job
from gpulease.cli.job_selection import names_array, one_element, select_jobs, selection
from gpulease.cli.job_watch import RECONNECT_EVERY
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import print_stderr, write_output
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.words import because, clean, id_of, in_line
from gpulease.errors import EXIT_GAVE_UP, BadUsage, NoDaemon, WrongState
from gpulease.units import parse_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from gpulease.cli.job_selection import Selection
    from gpulease.client.light_client import LightClient
    from gpulease.wire.frames import FrameKind
    from gpulease.wire.jobs import JobView


def attach(
    *,
    jobs: Sequence[str] | None,
    name: str | None,
    watch: bool,
    detach_keys: str | None,
    socket: Path | str | None,
) -> int:
    """Connect this terminal to one job, and return its exit code; 0 after detaching."""
    from gpulease.cli.attachment import detach_sequence
    from gpulease.locations import environment

    if jobs and len(jobs) > 1:
        raise BadUsage("cannot attach to several jobs", f"gpulease attach {jobs[0]}")
    keys = detach_sequence(detach_keys, environment())
    wanted = selection("attach", jobs, name)
    if acts_on_slurm(socket):
        from gpulease.slurm.command.job_control import attach_to

        return attach_to(wanted, watches=watch, has_keys=detach_keys is not None)
    client = light_client(socket)
    (number,) = select_jobs(client, wanted)
    view = client.job(number)
    if names_array(wanted.words, view):
        raise one_element("attach", view)
    return attach_to_job(client, view, watches=watch, keys=keys)


def attach_to_job(
    client: LightClient, view: JobView, *, watches: bool = False, keys: bytes | None = None
) -> int:
    """Connect this terminal to a job, and return its exit code; 0 after detaching.

    Raises:
        WrongState: it has no output: it is a hold, or a job of Slurm.
        Others: as `follow`.
    """
    from gpulease.cli.follow import FollowOptions, follow
    from gpulease.cli.job_watch import stderr_status
    from gpulease.cli.signals import Signals

    number = view.id
    if keys is None:
        from gpulease.cli.attachment import detach_sequence
        from gpulease.locations import environment

        keys = detach_sequence(None, environment())
    if view.kind == "hold":
        raise WrongState(
            f"cannot attach to job {number}: it is a hold, a lease without a command",
            f"gpulease show {number} describes it, gpulease cancel {number} releases it",
        )
    if view.kind == "slurm":
        raise WrongState(
            f"cannot attach to job {number}: Slurm runs it",
            f"sattach {view.slurm_job}.0 shows the output of its first step",
        )
    stderr = stderr_status()
    if view.state == "ended":
        from gpulease.cli.messages import ended

        stderr.print(ended(view))
        return status_of_job(view)
    with Signals() as signals:
        options = FollowOptions(started=False, watches=watches, keys=keys)
        return follow(client, view, signals, stderr, options)


def print_logs(
    *,
    jobs: Sequence[str] | None,
    name: str | None,
    every: bool,
    follow: bool,
    tail: int | None,
    stdout: bool,
    stderr: bool,
    socket: Path | str | None,
) -> None:
    """Print the output of jobs, each stream on the same one here."""
    if tail is not None and tail < 0:
        raise BadUsage(f"cannot print {tail} lines", "gpulease logs --tail 20 last")
    wanted = selection("logs", jobs, name, every)
    if acts_on_slurm(socket):
        from gpulease.slurm.command.logs import print_logs

        print_logs(wanted, follow=follow, tail=tail, stdout=stdout, stderr=stderr)
        return
    client = light_client(socket)
    numbers = select_jobs(client, wanted)
    both = stdout == stderr
    for number in numbers:
        _announce(client.job(number), wanted, among=len(numbers))
        ask = partial(client.logs, number, stdout=stdout or both, stderr=stderr or both)
        if follow:
            _follow(partial(ask, follow=True), tail)
            continue
        for kind, piece in ask(tail=tail):
            write_output(kind, piece)


def _announce(job: JobView, wanted: Selection, *, among: int) -> None:
    """Say which job the output is of, and why there is none."""
    if names_array(wanted.words, job):
        raise one_element("logs", job)
    if among > 1:
        print_stderr(f"gpulease: output of job {id_of(job)} ({clean(job.name)})")
    if why := why_no_output(job):
        print_stderr(f"gpulease: {why}")


def _follow(ask: Callable[..., Iterator[tuple[FrameKind, bytes]]], tail: int | None) -> None:
    """Print the output of a job until it ends, also across a restart of the daemon."""
    at: dict[FrameKind, int] = {}
    is_away = False
    while True:
        try:
            for kind, piece in ask(tail=None if at else tail, begin=at, positions=at):
                write_output(kind, piece)
            return
        except NoDaemon:
            if not at:
                raise
            if not is_away:
                print_stderr("gpulease: lost connection to the daemon; waiting until it is back")
            is_away = True
            time.sleep(RECONNECT_EVERY)


def why_no_output(job: JobView) -> str | None:
    """Say why a job has no output, if it has not started."""
    match job.state:
        case "queued":
            return f"job {id_of(job)} has not started; it waits{in_line(job)}{because(job)}"
        case "granted":
            return f"job {id_of(job)} has not started yet, but its lease is granted"
        case "ended" if job.started_at is None and job.kind == "run":
            return f"job {id_of(job)} never started{because(job)}"
        case _:
            return None


def wait_for_jobs(
    *,
    jobs: Sequence[str] | None,
    name: str | None,
    every: bool,
    first: bool,
    timeout: str | None,
    socket: Path | str | None,
) -> int:
    """Return the highest exit code of some jobs once they have ended, or that of the first one."""
    limit = None if timeout is None else parse_span(timeout).total_seconds()
    wanted = selection("wait", jobs, name, every)
    deadline = None if limit is None else time.monotonic() + limit
    if acts_on_slurm(socket):
        from gpulease.slurm.command.job_control import worst_of

        return worst_of(wanted, deadline, first=first)
    client = light_client(socket)
    return _worst(client, set(select_jobs(client, wanted)), deadline, first=first)


def _worst(client: LightClient, left: set[int], deadline: float | None, *, first: bool) -> int:
    """Return the highest exit code of the jobs `left`, across restarts of the daemon."""
    worst, is_away = 0, False
    while left:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            return EXIT_GAVE_UP
        try:
            for job in client.ends(sorted(left), remaining):
                left.discard(job.id)
                if job.retried_as is not None:
                    left.add(job.retried_as)
                    continue
                worst = max(worst, status_of_job(job))
                if first:
                    return worst
            is_away = False
        except NoDaemon:
            if not is_away:
                print_stderr("gpulease: lost connection to the daemon; waiting until it is back")
            is_away = True
            time.sleep(RECONNECT_EVERY)
    return worst
