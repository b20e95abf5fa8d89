"""One job in detail, as `gpulease show` prints it: its state, the queue, its events."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpulease.cli.job_gpus import (
    device_table,
    first_use,
    gpu_of,
    hook_table,
    is_simulated,
    lease_table,
    links,
    pool_table,
    unhooked_lines,
    utilization,
)
from gpulease.cli.script import script_change
from gpulease.cli.tables import Block, Column, Hanging, Page, Span, Table, line
from gpulease.drawing.endings import (
    cpu_time,
    event_detail,
    has_seconds,
    how_it_ended,
    needed,
    ram_use,
    steps,
    which_try,
)
from gpulease.drawing.words import (
    behind_of,
    between,
    clean,
    clock,
    id_of,
    in_the_way,
    index_of,
    instant,
    is_above,
    is_asked_back,
    label,
    lacks_limit,
    named,
    probable_start,
    requested,
    sentence,
    sharing,
    since,
    until,
)
from gpulease.units import format_span
from gpulease.wire.text import ordinal, spoken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gpulease.slurm.command.views import JobView as ClusterJobView
    from gpulease.wire.jobs import (
        JobView,
        LeaseView,
        RefusalView,
        SuggestionView,
    )

_STOP_EVENTS = frozenset({"cancel", "expire", "revoke"})
_LABELS = 12
_FRAMEWORKS = {
    "none": "no framework hook has reported a limit yet",
    "failed": "not limited to the lease: a hook failed",
    "absent": "not limited to the lease: a process uses a GPU without a hook",
}


def page(job: JobView, now: datetime, indexes: Mapping[str, str] | None = None) -> Page:
    """Lay out one job; `indexes` has the index of each GPU by its UUID."""
    indexes = indexes or {}
    # The id of an element is the number of its directory.
    own_id = f"  (id {job.id})" if id_of(job) != str(job.id) else ""
    return [
        (Span(f"job {id_of(job)}", "title"), Span(f"  {named(job)}{own_id}")),
        *labelled_lines(fields(job, now, indexes)),
        *lease_table(job, indexes),
        *hook_table(job, indexes),
        *unhooked_lines(job),
        *device_table(job),
        *pool_table(job, indexes),
        *refusal_table(job.refusals),
        *_events(job, now),
    ]


_ADOPTED = "it used its GPUs before it had the lease, so no framework in it is limited"


def labelled_lines(found: Iterable[tuple[str, str | None]]) -> Page:
    """Lay out names and their texts; those without a text are left out."""
    return [
        Hanging((Span(f"  {name:<{_LABELS}}", "dim"), Span(text)), _LABELS + 2)
        for name, text in found
        if text
    ]


def fields(
    job: JobView, now: datetime, indexes: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the text of each line; a line without a text is left out."""
    yield "state", _state(job, now)
    if job.state != "ended":
        yield "reason", _suspension(job) or _remaining_processes(job, now) or _reason(job)
    for lease in job.leases:
        where = f"on {gpu_of(clean(lease.gpu), indexes)}"
        if lease.over_since_at is not None:
            what = "asked back" if is_asked_back(lease) else "over lease"
            yield what, f"{where} {_over(job, lease, now)}"
        elif is_above(job, lease):
            yield "above lease", f"{where}, without consequences now"
    yield "links", links(job, indexes)
    yield "shares", sharing(job, indexes)
    yield "frameworks", _frameworks(job)
    yield "idle", _idle(job, now)
    yield "kept", _kept(job, now)
    begins = None if job.queue is None or job.state != "queued" else job.queue.begin_at
    yield "begins", f"not before {clock(begins, now)}" if begins else None
    yield "after", ", ".join(job.queue.after) if job.queue is not None else None
    yield "waits for", in_the_way(job)
    yield "behind", f"the reservation of job {behind_of(job)}" if job.behind else None
    yield "starts", probable_start(job, now)
    for each in job.suggestions:
        yield "starts now", suggestion_text(each)
    at = job.gives_up_at
    yield "gives up", f"at {clock(at, now)}, in {until(at, now)}" if at else None
    yield "user", clean(job.user)
    yield "command", clean(job.command)
    yield "script", script_change(job)
    yield "asks", limited(requested(job), job.claim.time_limit)
    yield "size", clean(job.sized) if job.sized else None
    yield "used", needed(job)
    yield "util", utilization(job)
    yield "ram", ram_use(job)
    yield "on CPUs", clean(job.cores) if job.cores else None
    yield "cpu time", cpu_time(job)
    yield "first use", first_use(job)
    yield "steps", steps(job)
    yield "adopted", _ADOPTED if job.adopted else None
    yield "try", which_try(job)
    yield "continues", None if job.retry_of is None else f"job {job.retry_of}"
    yield "continued", None if job.retried_as is None else f"as job {job.retried_as}"
    yield "queue", _queue(job)
    events = (event.partition("=") for event in job.notify)
    yield (
        "notify",
        ", ".join(
            f"{name}={format_span(timedelta(seconds=float(after)))}" if after else clean(name)
            for name, _, after in events
        ),
    )
    yield from times(job, now)
    yield "process", None if job.pid is None or job.state == "ended" else str(job.pid)
    yield "terminal", "yes" if job.terminal else None
    # Only users who may attach see the directory.
    may_attach = job.kind == "run" and job.state == "active" and job.directory is not None
    yield "attach", f"gpulease attach {id_of(job)}" if may_attach else None


def times(job: JobView | ClusterJobView, now: datetime) -> Iterator[tuple[str, str | None]]:
    """Yield when a job was submitted, started and ended, and how long it runs."""
    yield "submitted", clock(job.submitted_at, now)
    yield "started", clock(job.started_at, now) if job.started_at else None
    yield "ended", clock(job.ended_at, now) if job.ended_at else None
    ran = "running for" if job.ended_at is None else "ran for"
    yield ran, between(job.started_at, job.ended_at, now)
    ends = job.expires_at if job.state != "ended" else None
    yield "time left", f"{until(ends, now)} (until {clock(ends, now)})" if ends else None


def limited(asked: str, limit: float | None) -> str:
    """Write what a job asked for, with its time limit in seconds."""
    span = "" if limit is None else format_span(timedelta(seconds=limit))
    return f"{asked} for at most {span}" if span else asked


def _frameworks(job: JobView) -> str | None:
    if not lacks_limit(job) and is_simulated(job):
        return "not limited: simulated GPU" + ("s" if len(job.devices) > 1 else "")
    return _FRAMEWORKS.get(job.hook or "")


def suggestion_text(suggestion: SuggestionView) -> str:
    """Say with which options a job would start now."""
    before = "" if suggestion.before is None else f", before job {suggestion.before}"
    return f"with {clean(suggestion.options)}{before}"


def _state(job: JobView, now: datetime) -> str:
    if job.state == "queued" and job.position:
        return f"queued, {ordinal(job.position)} in line"
    if job.state == "releasing" and job.grace is not None:
        asked = [instant(event.at) for event in job.events if event.kind in _STOP_EVENTS]
        left = asked[-1] + timedelta(seconds=job.grace) - now if asked else timedelta(0)
        if left > timedelta(0):
            return f"{label(job)}; it is killed in {format_span(left)}"
    if job.suspended:
        return f"{job.state}, {label(job)}"
    return label(job) if job.state != "ended" else how_it_ended(job)


def _reason(job: JobView) -> str | None:
    return sentence(job.reason, job.hint) if job.reason else None


def _suspension(job: JobView) -> str | None:
    """Explain that a suspended job keeps its lease, and how to continue it."""
    if not job.suspended:
        return None
    if job.kind == "hold":
        what, target = f"process {job.pid}, which holds the lease,", str(job.pid)
    else:
        # Ctrl-Z stops the whole group, which the main process leads.
        what, target = "the main process", f"-- -{job.pid}"
    return (
        f"{what} is stopped (Ctrl-Z, SIGSTOP) and keeps its memory; "
        f"to continue it: fg in its shell, or kill -CONT {target}"
    )


def _remaining_processes(job: JobView, now: datetime) -> str | None:
    """Explain what keeps the lease after the main process has ended."""
    if job.main_exited_at is None or job.state != "active":
        return None
    how = next((event.detail for event in job.events if event.kind == "main_exited"), None)
    ended = f"the main process ended {since(job.main_exited_at, now)} ago"
    if how:
        ended += f" ({clean(how.partition(';')[0])})"
    match job.processes:
        case None:
            return f"{ended}; its other processes keep the lease"
        case 1:
            return f"{ended}; 1 process still runs and keeps the lease"
        case count:
            return f"{ended}; {count} processes still run and keep the lease"


def _over(job: JobView, lease: LeaseView, now: datetime) -> str:
    """Say for how long a job has been over a lease, and the consequence."""
    text = f"for {since(lease.over_since_at or '', now)}"
    if lease.stops_at is not None:
        return f"{text}; stopped in {until(lease.stops_at, now)} unless it uses less"
    if job.kind == "hold":
        return f"{text}; a hold has no output, so its owner is warned only here"
    return f"{text}; its owner was warned; the job is not stopped"


def _idle(job: JobView, now: datetime) -> str | None:
    """Say for how long a job has been idle, and the consequence."""
    if job.idle_since_at is None:
        return None
    text = f"for {since(job.idle_since_at, now)}"
    if job.idle_ends_at is None:
        return text
    left = until(job.idle_ends_at, now)
    return f"{text}; released in {left} unless it is used; to keep it: gpulease keep {id_of(job)}"


def _kept(job: JobView, now: datetime) -> str | None:
    end = job.kept_until_at
    if end is None or instant(end) <= now:
        return None
    return f"until {clock(end, now)}, even if idle"


def _queue(job: JobView) -> str | None:
    """Say what was asked of the queue, and how often the job was queued again."""
    asked = job.queue
    if asked is None:
        return None
    said = (
        (asked.priority != "normal", f"{asked.priority} priority"),
        (asked.nice != 0, f"nice {asked.nice}"),
        (asked.preemptible, "makes way for other jobs"),
        (asked.requeue, "queued again if the machine fails"),
        (asked.requeued > 0, f"requeued {asked.requeued}x"),
        (asked.held, "held"),
        (asked.array_most is not None, f"at most {asked.array_most} elements at once"),
    )
    return ", ".join(text for is_so, text in said if is_so) or None


def refusal_table(refusals: Sequence[RefusalView]) -> Iterator[Block]:
    """Lay out why a job does not fit on each GPU."""
    if not refusals:
        return
    columns = (Column("GPU", right=True), Column("REASON", wraps=True, least=16))
    rows = ((line(index_of(refusal)), line(clean(refusal.why))) for refusal in refusals)
    yield line("")
    yield Table(columns, tuple(rows))


def _events(job: JobView, now: datetime) -> Iterator[Block]:
    if not job.events:
        return
    columns = (
        Column("TIME"),
        Column("EVENT"),
        Column("DETAIL", wraps=True, leaves=1, least=16, below=""),
    )
    rows = (
        (
            line(clock(event.at, now, seconds=has_seconds(event, job.events, now))),
            line(clean(spoken(event.kind))),
            line(clean(event_detail(event))),
        )
        for event in job.events
    )
    yield line("")
    yield Table(columns, tuple(rows))
