"""The page of `gpulease status`: GPUs, leases, the queue, and processes without a lease."""

from __future__ import annotations

from gpulease.cli.gpu_rows import GpuRow, gpu_table, gpus_in_columns, gpus_in_words
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import local_time, own_name
from gpulease.cli.status_tables import (
    JobRow,
    WaitingRow,
    counts,
    heading,
    rows_asked_for,
    status_page,
)
from gpulease.cli.status_tables import print_status as show_status
from gpulease.cli.tables import Block, Hanging, Page, Style, line
from gpulease.cluster_choice import acts_on_slurm
from gpulease.drawing.gpus import exclusive_job, models, notes
from gpulease.drawing.words import (
    UNKNOWN,
    alike,
    amount,
    behind_of,
    between,
    clean,
    clock,
    id_of,
    ids_of,
    in_the_way,
    index_of,
    labels_of,
    named,
    reason_of,
    remark_on,
    requested,
    shorten,
    size,
    starts_in,
    until,
)
from gpulease.record import record
from gpulease.wire.text import (
    free_of,
    leased,
    model,
    most_of,
    shown_command,
    unmanaged_processes,
    used_without_lease,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from gpulease.cli.status_tables import Detail
    from gpulease.wire.jobs import JobView, LeaseView
    from gpulease.wire.machine import GpuView, ProcessView, StatusView

_WATCH_EVERY = "2s"
_MOST_EVENTS = 3
"""Health events shown for each GPU; --json has all."""
_MOST_PROCESSES = 5
"""Processes without a lease that a terminal shows."""
_REMARKS: Mapping[str, int] = {"tight": 1, "bars": 0, "counts": 0}
"""Health events and windows that are shown; otherwise all."""
_SHOWN_AS_STATE = frozenset({"drained", "resumed", "faulty"})


def print_status(
    *,
    queue: str | None,
    json: bool,
    socket: Path | str | None,
    watch: str | None = None,
    topology: bool = False,
) -> int:
    """Print the state of the machine, with the first jobs of the queue: a number, or "all".

    With `watch`, a span such as 2s, it is printed again after each span. With `topology`, print how
    the GPUs are linked instead.
    """
    if topology:
        from gpulease.cli.topology_page import print_topology

        return print_topology(json=json, socket=socket, others=(queue, watch))
    if acts_on_slurm(socket):
        from gpulease.slurm.command import status_page as cluster

        return cluster.print_status(queue=queue, json=json, watch=watch)
    rows_asked_for(queue)  # a mistake on the line is reported even if no daemon runs
    daemon = light_client(socket)
    return show_status(
        daemon.status, daemon.status_json,
        lambda view, at: page(view, local_time(), at.width, at.height, own_name()),
        queue=queue, json=json, watch=watch, every=_WATCH_EVERY,
    )  # fmt: skip


def page(
    view: StatusView,
    now: datetime,
    width: int | None = None,
    height: int | None = None,
    user: str = "",
) -> Page:
    """Lay out the status; the jobs of `user` are the first of those that run."""
    jobs = [job for job in view.jobs if job.state not in ("queued", "ended")]
    waiting = [job for job in view.jobs if job.state == "queued"]
    waiting.sort(key=lambda job: (job.position is None, job.position))
    about = _About(view, now, user, is_short=height is not None, holding=jobs)

    def machine(detail: Detail) -> Page:
        remarks = list(_remarks(about))[: _REMARKS.get(detail)]
        resources = [] if detail in ("bars", "counts") else _resources(about)
        head = _head(about, width, detail)
        return [*head, *_gpus(about, width, detail), *resources, *remarks]

    return status_page(
        machine,
        _job_rows(about),
        [_waiting_row(group, about) for group in alike(waiting)],
        user=clean(user),
        waiting=_waiting(view),
        outside=lambda detail: [*_without_lease(about, width, detail), *_why_none_starts(about)],
        width=width,
        height=height,
    )


@record(frozen=True)
class _About:
    """What a page is about."""

    view: StatusView
    now: datetime
    user: str
    is_short: bool
    """What is alike shares rows."""
    holding: Sequence[JobView]
    """The jobs that hold memory."""


def _head(about: _About, width: int | None, detail: Detail) -> Iterator[Block]:
    view = about.view
    totals = {gpu.name: gpu.memory.total for gpu in view.gpus if gpu.memory.total}
    named = [(index_of(gpu), model(gpu.name, totals.get(gpu.name))) for gpu in view.gpus]
    parts = [clean(view.host), models(named) or "no GPUs"]
    if view.simulated and "imulated" not in parts[1]:
        parts.append("simulated GPUs")
    driver = f"driver {clean(view.driver)}" if view.driver else None
    parts += [*([driver] if driver else ()), clock(view.at, about.now)]
    if detail == "counts" and view.gpus:
        parts[1:] = [gpus_in_words([_gpu_row(gpu, about) for gpu in view.gpus])]
    own = sum(job.user == about.user for job in about.holding)
    own_waiting = sum(each.jobs for each in view.waiting_by_user if each.user == about.user)
    text = counts(len(about.holding), _waiting(view), own, own_waiting)
    return heading(parts, text, width, least=driver)


def _waiting(view: StatusView) -> int:
    """Return the number of jobs in the queue; a daemon of an earlier version sends them all."""
    if view.waiting is not None:
        return view.waiting
    return sum(job.state == "queued" for job in view.jobs)


def _gpus(about: _About, width: int | None, detail: Detail) -> Iterator[Block]:
    if not about.view.gpus or detail == "counts":
        return
    rows = [_gpu_row(gpu, about) for gpu in about.view.gpus]
    yield line("")
    if detail == "bars":
        yield from gpus_in_columns(rows, width)
    else:
        yield from gpu_table(rows, width, folds=about.is_short, legend=detail == "all")


def _gpu_row(gpu: GpuView, about: _About) -> GpuRow:
    alone = exclusive_job(gpu, about.holding)
    return GpuRow(
        label=index_of(gpu),
        memory=gpu.memory,
        free=free_of(gpu),
        notes=tuple(notes(gpu, alone, about.view)),
        unmanaged=used_without_lease(gpu, about.view),
        is_exclusive=alone is not None,
        utilization=gpu.utilization,
        temperature=gpu.temperature,
    )


def _resources(about: _About) -> Iterator[Block]:
    """Yield a line about the RAM and the cores of the machine, where any of it is leased."""
    found = about.view.resources
    if found is not None:
        of_ram = f"{size(found.ram_leased)} of {size(found.ram)} leased"
        cores = f"{found.cores_leased} of {found.cores} leased"
        text = f"RAM: {of_ram}, {size(found.ram_free)} free; cores: {cores}"
        yield Hanging(line(text, "dim"), 2)


def _remarks(about: _About) -> Iterator[Block]:
    """Yield the health events of GPUs, and the windows."""
    for gpu in about.view.gpus:
        shown = [event for event in gpu.events if event.kind not in _SHOWN_AS_STATE]
        for event in shown[-_MOST_EVENTS:]:
            times = f", {event.count} times" if event.count > 1 else ""
            at = clock(event.at, about.now)
            text = f"GPU {index_of(gpu)}: {at}  {clean(event.detail)}{times}"
            yield Hanging(line(text, "dim"), 2)
    if about.view.windows:
        from gpulease.cli.window_page import sentence
    for window in about.view.windows:
        style: Style = "warn" if window.is_on else "dim"
        yield Hanging(line(sentence(window, about.now), style), 2)


def _job_rows(about: _About) -> list[JobRow]:
    """Return the jobs that hold memory, the caller's first."""
    holding = about.holding
    if about.is_short:
        holding = sorted(holding, key=lambda job: job.user != about.user)
    indexes = labels_of(about.view.gpus)
    return [row for job in holding for row in _rows_of(job, indexes, about)]


def _rows_of(job: JobView, indexes: Mapping[str, str], about: _About) -> Iterator[JobRow]:
    """Yield a row for each lease; a terminal gets one for leases of one size and state."""
    groups: dict[object, list[LeaseView]] = {}
    for lease in job.leases:
        state = remark_on(job, [lease], about.now)
        key = (leased(lease), state) if about.is_short else lease.gpu
        groups.setdefault(key, []).append(lease)
    for leases in groups.values():
        yield JobRow(
            id=id_of(job),
            user=clean(job.user),
            name=named(job),
            gpu=",".join(indexes.get(lease.gpu, UNKNOWN) for lease in leases),
            uses=_uses(leases),
            lease=leased(leases[0]),
            is_over=any((lease.used or 0) > most_of(lease) for lease in leases),
            left=until(job.expires_at, about.now) if job.expires_at else "",
            state=line(*remark_on(job, leases, about.now)),
        )


def _uses(leases: Sequence[LeaseView]) -> str:
    known = sorted(lease.used for lease in leases if lease.used is not None)
    if len(known) < len(leases):
        return UNKNOWN
    least, most = amount(known[0]), amount(known[-1])
    return most if least == most else f"{least}-{most}"


def _without_lease(about: _About, width: int | None, detail: Detail) -> Iterator[Block]:
    """Yield the processes that use a GPU without a lease on it: in one line where room is short."""
    view = about.view
    found = [(gpu, each) for gpu in view.gpus for each in unmanaged_processes(gpu, view)]
    most = _MOST_PROCESSES if about.is_short else len(found)
    if found and not about.holding:
        yield line("")
    if found and detail != "all":
        text = _process(*found[0], about.now)
        if len(found) > 1:
            gpus = ",".join(dict.fromkeys(index_of(gpu) for gpu, _ in found))
            users = ", ".join(dict.fromkeys(clean(it.user or UNKNOWN) for _, it in found))
            text = f"! {len(found)} processes use GPU {gpus} without a lease: {users}"
        yield line(text if width is None else shorten(text, width), "bad")
        return
    for gpu, process in found[:most]:
        yield Hanging(line(_process(gpu, process, about.now), "bad"), 2)
    if len(found) > most:
        yield line(f"! and {len(found) - most} more processes without a lease", "bad")


def _process(gpu: GpuView, process: ProcessView, now: datetime) -> str:
    user = clean(process.user or UNKNOWN)
    memory = "" if process.memory is None else f"{size(process.memory)} of "
    since = "" if process.started_at is None else f" for {between(process.started_at, None, now)}"
    where = f" (in container {clean(process.container)})" if process.container else ""
    of_job = "" if process.job is None else f", of job {process.job}"
    command = shown_command(process.command or process.name or UNKNOWN)
    uses = f"uses {memory}GPU {index_of(gpu)} without a lease{since}"
    return f"! {user}  pid {process.pid} {uses}: {command}{where}{of_job}"


def _why_none_starts(about: _About) -> Iterator[Block]:
    view = about.view
    if view.paused is not None:
        why = f": {clean(view.paused.why)}" if view.paused.why else ""
        since = clock(view.paused.at, about.now)
        text = f"{clean(view.paused.by)} paused the queue at {since}{why}; running jobs continue"
    elif view.closed is not None:
        text = f"no job starts now: {clean(view.closed)}"
    else:
        return
    yield line("")
    yield Hanging(line(text, "warn"), 2)


def _waiting_row(group: Sequence[JobView], about: _About) -> WaitingRow:
    job, now = group[0], about.now
    stands_for = None if job.queue is None else job.queue.array_waiting
    is_element = job.queue is not None and job.queue.array is not None
    return WaitingRow(
        place=job.position,
        ids=ids_of(group),
        user=clean(job.user),
        name=named(job),
        asks=requested(job),
        at=starts_in(job, now),
        why="paused" if about.view.paused else why_waiting(job, now),
        jobs=len(group) if stands_for is None else stands_for.jobs,
        number=None if is_element else job.id,
    )


def why_waiting(job: JobView, now: datetime) -> str:
    """Say in a few words why a job waits; `show` has the reason in full."""
    blocked = None if job.queue is None else job.queue.blocked_by
    if blocked in (None, "array") and (behind := behind_of(job)) is not None:
        return f"after job {behind}"
    start = job.expected_start
    if blocked is None and start is not None and start.after is not None:
        return f"after job {clean(start.after_label or str(start.after))}"
    if blocked is None and job.waits_for:
        return f"after {in_the_way(job)}"
    if job.queue is not None and blocked in ("held", "array"):
        most = job.queue.array_most
        return "held" if blocked == "held" else f"its array runs {most} at once"
    return reason_of(job, now) or ""
