"""The page of `gpulease status`: GPUs, leases, the queue, and processes without a lease."""

from __future__ import annotations

import sys

from gpulease.cli.cluster import acts_on_slurm
from gpulease.cli.format import (
    UNKNOWN,
    alike,
    between,
    clean,
    clock,
    enforcement,
    id_of,
    ids_of,
    index_of,
    is_above,
    label,
    named,
    reason_of,
    requested,
    size,
    until,
)
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import local_time, print_stdout, screen_of, show_page
from gpulease.cli.tables import Block, Column, Hanging, Line, Page, Span, Style, Table, line, widths
from gpulease.cli.window_page import sentence
from gpulease.errors import BadUsage
from gpulease.light_json import indent
from gpulease.locations import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    from gpulease.wire.jobs import JobView, LeaseView
    from gpulease.wire.machine import GpuEventView, GpuView, MemoryView, ProcessView, StatusView

_BAR = 20
BAR_TITLE = "MEMORY"
LEGEND: Line = (
    *(Span("#", "used"), Span(" used under a lease  ", "dim")),
    *(Span("=", "leased"), Span(" leased, not used yet  ", "dim")),
    *(Span("!", "unmanaged"), Span(" unmanaged  ", "dim")),
    *(Span(".", "free"), Span(" free to lease", "dim")),
)
_MOST_DIGITS = 9
_MOST_EVENTS = 3
"""Health events shown for each GPU; --json has all."""
_SHOWN_AS_STATE = frozenset({"drained", "resumed", "faulty"})
_STATES: dict[str, Style] = {"available": "good", "drained": "warn", "divided": "dim"}


def print_status(*, queue: str, json: bool, socket: Path | str | None) -> None:
    """Print the state of the machine, with the first jobs of the queue: a number, or "all"."""
    if acts_on_slurm(socket):
        from gpulease.cli.cluster import status_page

        status_page.print_status(queue=queue, json=json)
        return
    first = first_of(queue)
    daemon = light_client(socket)
    if json:
        print_stdout(indent(daemon.status_json(first)))
        return
    screen = screen_of(sys.stdout, environment())
    show_page(page(daemon.status(first), local_time(), screen.width), screen)


def first_of(text: str) -> int | None:
    """Return how many waiting jobs to show; None: all.

    Raises:
        BadUsage: that is neither a number nor "all".
    """
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise BadUsage(f"cannot show {text[:40]!r} waiting jobs: that is no number", "--queue 50")
    return int(text)


def page(view: StatusView, now: datetime, width: int | None = None) -> Page:
    """Lay out the status; `width` decides whether the bars, and so their legend, are shown."""
    return [
        *_head(view, now),
        *_gpus(view, now, width),
        *_windows(view, now),
        *_leases(view, now),
        *_enforcement(view),
        *_queue(view, now),
        *_without_lease(view, now),
    ]


def _head(view: StatusView, now: datetime) -> Iterator[Block]:
    driver = f"  driver {clean(view.driver)}" if view.driver else ""
    simulated = "  simulated GPUs" if view.simulated else ""
    rest = f"{driver}{simulated}  {clock(view.at, now)}"
    yield (Span(clean(view.host), "title"), Span(rest, "dim"))


def _gpus(view: StatusView, now: datetime, width: int | None) -> Iterator[Block]:
    if not view.gpus:
        yield line("no GPUs", "warn")
        return
    columns = (
        Column("GPU", right=True),
        Column("NAME", leaves=4, shrinks=True),
        Column("STATE", leaves=1, below=""),
        Column(BAR_TITLE, leaves=5),
        Column("USED", right=True),
        Column("LEASED", right=True),
        Column("FREE", right=True),
        Column("TOTAL", right=True, leaves=2, below="total "),
        Column("UTIL", right=True, leaves=3),
        Column("TEMP", right=True, leaves=6),
    )
    table = Table(columns, tuple(_gpu(gpu) for gpu in view.gpus))
    yield line("")
    yield table
    if any(columns[number].title == BAR_TITLE for number in widths(table, width)):
        yield LEGEND
    for gpu in view.gpus:
        if gpu.detail:
            yield line(f"GPU {index_of(gpu)}: {clean(gpu.detail)}", "warn")
        for event in _recent_events(gpu):
            times = f", {event.count} times" if event.count > 1 else ""
            text = f"GPU {index_of(gpu)}: {clock(event.at, now)}  {clean(event.detail)}{times}"
            yield line(text, "dim")


def _windows(view: StatusView, now: datetime) -> Iterator[Block]:
    for window in view.windows:
        style: Style = "warn" if window.is_on else "dim"
        yield Hanging(line(sentence(window, now), style), 2)


def _recent_events(gpu: GpuView) -> list[GpuEventView]:
    """Return the last health events of a GPU, without those that its state shows."""
    return [event for event in gpu.events if event.kind not in _SHOWN_AS_STATE][-_MOST_EVENTS:]


def _gpu(gpu: GpuView) -> tuple[Line, ...]:
    memory = gpu.memory
    return (
        line(index_of(gpu)),
        line(clean(gpu.name)),
        _gpu_state(gpu),
        bar(memory),
        line(size(memory.used)),
        line(size(memory.leased)),
        _free(gpu),
        line(size(memory.total)),
        line(UNKNOWN if gpu.utilization is None else f"{gpu.utilization}%"),
        line(UNKNOWN if gpu.temperature is None else f"{gpu.temperature}C"),
    )


def _gpu_state(gpu: GpuView) -> Line:
    if gpu.state == "available" and gpu.slurm:
        return line("Slurm", "dim")
    if gpu.state == "available" and gpu.kept_for is not None:
        return line(f"for job {gpu.kept_for}", "warn")
    return line(gpu.state, _STATES.get(gpu.state, "bad"))


def _free(gpu: GpuView) -> Line:
    # Memory of a GPU that grants nothing cannot be leased.
    free = gpu.memory.headroom if gpu.state == "available" else None
    return line(size(free), "good" if free else "warn")


def bar(memory: MemoryView) -> Line:
    """Draw the memory of a GPU: used under leases, leased and not used, unmanaged, free."""
    if not memory.total or memory.used is None:
        return line(f"[{'?' * _BAR}]", "dim")
    unmanaged = memory.unmanaged or 0
    used = max(0, min(memory.used - unmanaged, memory.committed))
    parts: tuple[tuple[int, str, Style], ...] = (
        (used, "#", "used"),
        (memory.committed - used, "=", "leased"),
        (unmanaged, "!", "unmanaged"),
    )
    spans, left = [Span("[")], _BAR
    for amount, mark, style in parts:
        # Even a small amount gets a mark.
        marks = min(left, max(round(_BAR * amount / memory.total), 1 if amount > 0 else 0))
        left -= marks
        spans.append(Span(mark * marks, style))
    return (*spans, Span("." * left, "free"), Span("]"))


def _leases(view: StatusView, now: datetime) -> Iterator[Block]:
    rows = [row for job in view.jobs for row in _lease_rows(job, view, now)]
    yield line("")
    if not rows:
        yield line("no leases", "dim")
        return
    columns = (
        Column("JOB", right=True),
        Column("USER", wraps=True),
        Column("NAME", leaves=3, shrinks=True, below=""),
        Column("STATE", leaves=2, below=""),
        Column("GPU", right=True),
        Column("LEASED", right=True),
        Column("USED", right=True),
        Column("PEAK", right=True, leaves=5),
        Column("TIME LEFT", right=True, leaves=1, below="time left "),
    )
    yield Table(columns, tuple(rows))
    for job in view.jobs:
        if job.hook in ("failed", "absent"):
            which = id_of(job)
            text = f"job {which} is not limited by its framework (gpulease show {which})"
            yield Hanging(line(text, "warn"), 2)


def _enforcement(view: StatusView) -> Iterator[Block]:
    if view.enforcement:
        yield Hanging(line(enforcement(view.enforcement), "dim"), 2)


def _lease_rows(job: JobView, view: StatusView, now: datetime) -> Iterator[tuple[Line, ...]]:
    if job.state in ("queued", "ended"):
        return
    indexes = {gpu.uuid: index_of(gpu) for gpu in view.gpus}
    for lease in job.leases:
        over = lease.used is not None and lease.used > lease.memory
        yield (
            line(id_of(job)),
            line(clean(job.user)),
            line(named(job)),
            _lease_state(job, lease, now),
            line(indexes.get(lease.gpu, UNKNOWN)),
            line(size(lease.memory)),
            line(size(lease.used), "bad" if over else ""),
            line(size(lease.peak)),
            line(until(job.expires_at, now)),
        )


def _lease_state(job: JobView, lease: LeaseView, now: datetime) -> Line:
    if is_above(job, lease) and not job.suspended:
        return line("above", "warn")
    if lease.over_since_at is None:
        return line(label(job), "good" if label(job) == "active" else "warn")
    stops = "" if lease.stops_at is None else f", stops in {until(lease.stops_at, now)}"
    return line(f"over{stops}", "bad")


def _queue(view: StatusView, now: datetime) -> Iterator[Block]:
    waiting = [job for job in view.jobs if job.state == "queued"]
    yield line("")
    yield from _why_none_starts(view, now)
    more = (view.waiting or 0) - sum(_stands_for(job) for job in waiting)
    if waiting:
        yield _queue_table(waiting, now)
    elif more <= 0:
        yield line("no jobs in the queue", "dim")
    if more > 0:
        text = f"{more} more queued; gpulease status --queue all shows them"
        yield Hanging(line(text, "dim"), 2)


def _stands_for(job: JobView) -> int:
    """Return how many queued jobs a row shows."""
    elements = None if job.queue is None else job.queue.array_waiting
    return 1 if elements is None else elements.jobs


def _queue_table(waiting: Sequence[JobView], now: datetime) -> Table:
    columns = (
        Column("PLACE", right=True),
        Column("JOB", right=True),
        Column("USER", wraps=True),
        Column("NAME", leaves=3, shrinks=True, below=""),
        Column("REQUEST", right=True),
        Column("EXPECTED", leaves=5, below="expected "),
        Column("REASON", leaves=4, wraps=True, least=20, below=""),
    )
    in_order = sorted(waiting, key=lambda job: (job.position is None, job.position))
    return Table(columns, tuple(_waiting(group, now) for group in alike(in_order)))


def _why_none_starts(view: StatusView, now: datetime) -> Iterator[Block]:
    if view.paused is not None:
        why = f": {clean(view.paused.why)}" if view.paused.why else ""
        since = clock(view.paused.at, now)
        text = f"{clean(view.paused.by)} paused the queue at {since}{why}; running jobs continue"
        yield Hanging(line(text, "warn"), 2)
    elif view.closed is not None:
        yield Hanging(line(f"no job starts now: {clean(view.closed)}", "warn"), 2)


def _waiting(group: Sequence[JobView], now: datetime) -> tuple[Line, ...]:
    job = group[0]
    return (
        line(UNKNOWN if job.position is None else str(job.position)),
        line(ids_of(group)),
        line(clean(job.user)),
        line(named(job)),
        line(requested(job)),
        line(clock(job.expected_start_at, now)),
        line(reason_of(job, now) or UNKNOWN),
    )


def _without_lease(view: StatusView, now: datetime) -> Iterator[Block]:
    leased = {(job.id, lease.gpu) for job in view.jobs for lease in job.leases}
    # A GPU that MIG divides lists the processes of its MIG devices.
    parents = {gpu.uuid: gpu.parent for gpu in view.gpus if gpu.parent is not None}
    leased |= {(job, parents[gpu]) for job, gpu in leased if gpu in parents}
    rows = [
        (
            line(index_of(gpu)),
            line(str(process.pid)),
            line(clean(process.user or UNKNOWN)),
            line(size(process.memory)),
            line(between(process.started_at, None, now)),
            line(_command(process)),
        )
        for gpu in view.gpus
        for process in gpu.processes
        if (process.job, gpu.uuid) not in leased and not (process.serves and gpu.memory.leased)
    ]
    if not rows:
        return
    yield line("")
    yield line("processes without a lease", "bad")
    columns = (
        Column("GPU", right=True),
        Column("PID", right=True),
        Column("USER", wraps=True),
        Column("MEMORY", right=True),
        Column("AGE", right=True, leaves=2, below="for "),
        Column("COMMAND", leaves=1, wraps=True, least=24, below=""),
    )
    yield Table(columns, tuple(rows))


def _command(process: ProcessView) -> str:
    command = clean(process.command or process.name or UNKNOWN)
    where = f" (in container {clean(process.container)})" if process.container else ""
    return f"{command}{where}" if process.job is None else f"{command}{where}, of job {process.job}"
