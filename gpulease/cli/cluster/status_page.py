"""`gpulease status` on a cluster: nodes, their GPUs, and the jobs of Slurm that use GPUs."""

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from gpulease.cli.cluster.job_lines import (
    expected,
    gpus_of,
    nodes_of,
    outcome_of,
    place_of,
    reason_of,
    requested,
)
from gpulease.cli.cluster.jobs import elements, read_queue, state_of, uses_gpus, with_gpus
from gpulease.cli.cluster.nodes import read_nodes, shard_size
from gpulease.cli.cluster.views import GpuView, JobView, MemoryView, NodeView, StatusView
from gpulease.cli.format import UNKNOWN, between, clean, clock, instant, since, size, until
from gpulease.cli.job_selection import own_name
from gpulease.cli.render import local_time, print_stdout, screen_of, show_page
from gpulease.cli.status_page import BAR_TITLE, LEGEND, bar, first_of
from gpulease.cli.tables import Block, Column, Hanging, Line, Page, Span, Style, Table, line, widths
from gpulease.light_json import encode, indent
from gpulease.locations import environment
from gpulease.wire import machine as wire

_STYLES: dict[str, Style] = {"available": "good", "drained": "warn", "draining": "warn"}
_USABLE = frozenset({"idle", "mixed", "allocated", "completing", "planned", "reserved"})
"""The states of nodes that need no explanation."""
_YOUNG = timedelta(seconds=5)
"""Younger figures of a node are shown without their age."""
_STARTS_NOTHING = frozenset({"down", "drained", "draining", "fail", "maintenance", "unknown"})


def print_status(*, queue: str, json: bool) -> None:
    """Print the state of the cluster, with the first jobs of the queue: a number, or "all"."""
    first, now = first_of(queue), local_time()
    view = read_status(first, now)
    if json:
        print_stdout(indent(encode(view)))
        return
    screen = screen_of(sys.stdout, environment())
    show_page(page(view, now, own_name(), screen.width), screen)


def read_status(first: int | None, now: datetime) -> StatusView:
    """Return the state of the cluster, with the `first` jobs that wait; None: all."""
    nodes = read_nodes(now)
    found = [job for job in read_queue() if uses_gpus(job)]
    waiting = [job for job in found if state_of(job) == "queued"]
    running = [job for job in found if state_of(job) != "queued"]
    return StatusView(
        at=f"{now.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
        nodes=nodes,
        jobs=with_gpus([*running, *waiting[:first]], shard_size(nodes)),
        waiting=sum(map(elements, waiting)),
    )


def page(view: StatusView, now: datetime, user: str, width: int | None = None) -> Page:
    """Lay out the status; the jobs of `user` are the first of those that run."""
    return [
        *_head(view, now),
        *_gpus(view, now, width),
        *_notes(view, now),
        *_running(view, now, user),
        *_queue(view, now),
    ]


def _head(view: StatusView, now: datetime) -> Iterator[Block]:
    gpus = sum(len(node.gpus) for node in view.nodes)
    rest = f"  {len(view.nodes)} nodes  {gpus} GPUs  {clock(view.at, now)}"
    yield (Span("Slurm", "title"), Span(rest, "dim"))


def _age(node: NodeView, now: datetime) -> str:
    """Write how long ago a node published its GPUs, if that is more than some seconds."""
    if node.at is None or now - instant(node.at) <= _YOUNG:
        return ""
    return since(node.at, now)


def _gpus(view: StatusView, now: datetime, width: int | None) -> Iterator[Block]:
    if not view.nodes:
        yield line("no nodes with GPUs", "warn")
        return
    aged = any(_age(node, now) for node in view.nodes)
    rows = tuple(
        (*cells, *((line(_age(node, now)),) if aged else ()))
        for node in view.nodes
        for cells in _node(node)
    )
    columns = (
        Column("NODE"),
        Column("GPU", right=True),
        Column("NAME", leaves=5, shrinks=True),
        Column("STATE", leaves=1, below=""),
        Column(BAR_TITLE, leaves=6),
        Column("USED", right=True),
        Column("LEASED", right=True),
        Column("UNMANAGED", right=True, leaves=4, below="unmanaged "),
        Column("FREE", right=True),
        Column("TOTAL", right=True, leaves=2, below="total "),
        *((Column("AGE", right=True, leaves=7, below="age "),) if aged else ()),
    )
    table = Table(columns, rows)
    yield line("")
    yield table
    if any(columns[number].title == BAR_TITLE for number in widths(table, width)):
        yield LEGEND


def _node(node: NodeView) -> Iterator[tuple[Line, ...]]:
    if not node.gpus:
        unknown = [line(UNKNOWN)] * 5
        state = node.state if node.state in _STARTS_NOTHING else "unknown"
        yield (
            line(clean(node.name)), line(UNKNOWN), line(UNKNOWN), line(state, "bad"),
            line(UNKNOWN), *unknown,
        )  # fmt: skip
    for gpu in node.gpus:
        yield _gpu(node, gpu)


def _gpu(node: NodeView, gpu: GpuView) -> tuple[Line, ...]:
    memory = gpu.memory
    state = node.state if node.state in _STARTS_NOTHING and not gpu.local else gpu.state
    free = memory.headroom if state == "available" else None
    return (
        line(clean(node.name)),
        line(str(gpu.index)),
        line(clean(gpu.name)),
        line(
            f"{clean(state)} (local)" if gpu.local else clean(state),
            "good"
            if state == "available"
            else "warn"
            if state in ("drained", "draining")
            else "bad",
        ),
        _bar(memory),
        line(size(memory.used)),
        line(size(memory.leased)),
        line(size(memory.unmanaged), "bad" if memory.unmanaged else ""),
        line(size(free), "good" if free else "warn"),
        line(size(memory.total)),
    )


def _bar(memory: MemoryView) -> Line:
    return bar(
        wire.MemoryView(
            memory.total, memory.used, None, memory.allocatable, memory.leased or 0,
            memory.committed or 0, memory.unmanaged, memory.headroom,
        )
    )  # fmt: skip


def _notes(view: StatusView, now: datetime) -> Iterator[Block]:
    """Say what is wrong with nodes and GPUs."""
    for node in view.nodes:
        name = clean(node.name)
        if node.state not in _USABLE:
            why = f": {clean(node.reason)}" if node.reason else ""
            yield Hanging(line(f"{name} is {node.state}{why}", "warn"), 2)
        if node.at is None and node.state != "down":
            text = "gpulease has published nothing there, so its GPUs are unknown"
            yield Hanging(line(f"{name}: {text}", "warn"), 2)
        elif node.at is not None and node.is_old:
            text = f"gpulease has published nothing for {since(node.at, now)}, so its memory is"
            yield Hanging(line(f"{name}: {text} unknown", "warn"), 2)
        for gpu in node.gpus:
            if gpu.detail and not node.is_old:
                yield Hanging(line(f"{name} GPU {gpu.index}: {clean(gpu.detail)}", "warn"), 2)


def _running(view: StatusView, now: datetime, user: str) -> Iterator[Block]:
    running = [job for job in view.jobs if job.state != "queued"]
    yield line("")
    if not running:
        yield line("no running jobs", "dim")
        return
    columns = (
        Column("JOB", right=True),
        Column("USER", wraps=True),
        Column("NAME", leaves=3, shrinks=True, below=""),
        Column("STATE", leaves=2, below=""),
        Column("NODE", wraps=True),
        Column("GPU", right=True),
        Column("MEMORY", right=True),
        Column("RAN", right=True, leaves=4, below="ran "),
        Column("TIME LEFT", right=True, leaves=1, below="time left "),
    )
    running.sort(key=lambda job: (job.user != user, job.id))
    yield Table(columns, tuple(_running_row(job, now) for job in running))


def _running_row(job: JobView, now: datetime) -> tuple[Line, ...]:
    state = outcome_of(job)
    return (
        line(job.label),
        line(clean(job.user)),
        line(clean(job.name)),
        line(state, "good" if state == "active" else "warn"),
        line(nodes_of(job)),
        line(gpus_of(job)),
        line(requested(job)),
        line(between(job.started_at, None, now)),
        line(until(job.expires_at, now)),
    )


def _queue(view: StatusView, now: datetime) -> Iterator[Block]:
    waiting = [job for job in view.jobs if job.state == "queued"]
    more = view.waiting - sum(place_of(job) for job in waiting)
    yield line("")
    if not view.waiting:
        yield line("no jobs in the queue", "dim")
    if waiting:
        yield _queue_table(waiting, now)
    if more > 0:
        text = f"{more} more queued; gpulease status --queue all shows them"
        yield Hanging(line(text, "dim"), 2)


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
    rows, place = [], 1
    for job in waiting:
        rows.append(
            (
                line(str(place)),
                line(job.label),
                line(clean(job.user)),
                line(clean(job.name)),
                line(requested(job)),
                line(expected(job, now)),
                line(reason_of(job, now) or UNKNOWN),
            )
        )
        place += place_of(job)
    return Table(columns, tuple(rows))
