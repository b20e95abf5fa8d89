"""`gpulease status` on a cluster: nodes, their GPUs, and the jobs of Slurm that use GPUs."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from gpulease.cli.gpu_rows import GpuRow, gpu_table
from gpulease.cli.render import local_time, own_name
from gpulease.cli.status_tables import (
    JobRow,
    WaitingRow,
    counts,
    heading,
    status_page,
)
from gpulease.cli.status_tables import print_status as show_status
from gpulease.cli.tables import Block, Hanging, Page, line
from gpulease.drawing.gpus import Note, models
from gpulease.drawing.words import UNKNOWN, clean, clock, instant, since, size, until
from gpulease.light_json import encode
from gpulease.slurm.annotations import read_nodes, shard_size
from gpulease.slurm.command.jobs import elements, read_queue, state_of, uses_gpus, with_gpus
from gpulease.slurm.command.views import (
    GpuView,
    JobView,
    MemoryView,
    NodeView,
    StatusView,
    expected,
    gpus_of,
    nodes_of,
    outcome_of,
    place_of,
    reason_of,
    requested,
    views_of,
)
from gpulease.units import counted
from gpulease.wire.text import beyond_driver, model

_USABLE = frozenset({"idle", "mixed", "allocated", "completing", "planned", "reserved"})
"""The states of nodes that need no explanation."""
_WATCH_EVERY = "10s"
"""Each time asks the controller of Slurm, which others need."""
_YOUNG = timedelta(seconds=5)
"""Younger figures of a node are shown without their age."""
_STARTS_NOTHING = frozenset({"down", "drained", "draining", "fail", "maintenance", "unknown"})
_UNKNOWN_MEMORY = MemoryView(None, None, None, None, None, None, None)


def print_status(*, queue: str | None, json: bool, watch: str | None = None) -> int:
    """Print the state of the cluster, with the first jobs of the queue: a number, or "all".

    With `watch`, a span such as 10s, it is printed again after each span.
    """
    return show_status(
        lambda first: read_status(first, local_time()),
        lambda first: encode(read_status(first, local_time())),
        lambda view, screen: page(view, local_time(), own_name(), screen.width, screen.height),
        queue=queue, json=json, watch=watch, every=_WATCH_EVERY,
    )  # fmt: skip


def read_status(first: int | None, now: datetime) -> StatusView:
    """Return the state of the cluster, with the `first` jobs that wait; None: all."""
    nodes = read_nodes()
    found = [job for job in read_queue() if uses_gpus(job)]
    waiting = [job for job in found if state_of(job) == "queued"]
    running = [job for job in found if state_of(job) != "queued"]
    return StatusView(
        at=f"{now.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
        nodes=views_of(nodes, now),
        jobs=with_gpus([*running, *waiting[:first]], shard_size(nodes)),
        waiting=sum(map(elements, waiting)),
        own_waiting=sum(elements(job) for job in waiting if job.get("username") == own_name()),
    )


def page(
    view: StatusView, now: datetime, user: str, width: int | None = None, height: int | None = None
) -> Page:
    """Lay out the status; the jobs of `user` are the first of those that run."""
    running = sorted(
        (job for job in view.jobs if job.state != "queued"),
        key=lambda job: (job.user != user, job.id),
    )
    waiting = [job for job in view.jobs if job.state == "queued"]

    def machine(detail: str) -> Page:
        gpus = _gpus(view, now, width, folds=height is not None, legend=detail == "all")
        return [*_head(view, now, user, width), *gpus, *_remarks(view, now)]

    return status_page(
        machine,
        [_job_row(job, now) for job in running],
        list(_waiting_rows(waiting, now)),
        user=clean(user),
        waiting=view.waiting,
        # Nodes have no short form.
        details=("all", "no legend"),
        width=width,
        height=height,
    )


def _head(view: StatusView, now: datetime, user: str, width: int | None) -> Iterator[Block]:
    gpus = [("", _model(gpu)) for node in view.nodes for gpu in node.gpus]
    nodes = counted(len(view.nodes), "node")
    kinds = models(gpus) if len(set(gpus)) == 1 else f"{len(gpus)} GPUs"
    running = [job for job in view.jobs if job.state != "queued"]
    own = sum(job.user == user for job in running)
    text = counts(len(running), view.waiting, own, view.own_waiting)
    return heading(["Slurm", nodes, kinds, clock(view.at, now)], text, width)


def _model(gpu: GpuView) -> str:
    return model(gpu.name, gpu.memory.total)


def _gpus(
    view: StatusView, now: datetime, width: int | None, *, folds: bool, legend: bool
) -> Iterator[Block]:
    if not view.nodes:
        yield line("no nodes with GPUs", "warn")
        return
    has_models = len({_model(gpu) for node in view.nodes for gpu in node.gpus}) > 1
    rows = [row for node in view.nodes for row in _gpu_rows(node, now, has_models=has_models)]
    yield line("")
    yield from gpu_table(rows, width, folds=folds, legend=legend)


def _gpu_rows(node: NodeView, now: datetime, *, has_models: bool) -> Iterator[GpuRow]:
    name, age = clean(node.name), ""
    if node.at is not None and now - instant(node.at) > _YOUNG:
        age = since(node.at, now)
    if not node.gpus:
        state = node.state if node.state in _STARTS_NOTHING else "unknown"
        note = Note(clean(state), style="bad")
        yield GpuRow(UNKNOWN, _UNKNOWN_MEMORY, None, (note,), node=name, age=age)
    for gpu in node.gpus:
        yield GpuRow(
            label=str(gpu.index),
            memory=gpu.memory,
            free=_free(node, gpu),
            unmanaged=beyond_driver(gpu.memory.unmanaged, gpu.memory.total),
            notes=tuple(_notes(node, gpu)),
            node=name,
            model=_model(gpu) if has_models else "",
            age=age,
        )


def _state(node: NodeView, gpu: GpuView) -> str:
    return node.state if node.state in _STARTS_NOTHING and not gpu.local else gpu.state


def _free(node: NodeView, gpu: GpuView) -> int | None:
    """Return what can be leased; nothing of a GPU that takes no jobs."""
    state = _state(node, gpu)
    if state in ("unknown", "unreadable", "lost"):
        return None
    return gpu.memory.headroom if state == "available" else 0


def _notes(node: NodeView, gpu: GpuView) -> Iterator[Note]:
    """Say why a GPU is not simply available."""
    if (state := _state(node, gpu)) != "available":
        detail = clean(gpu.detail or "")
        said = detail if detail.startswith(gpu.state) and state == gpu.state else clean(state)
        yield Note(said, style="warn" if state in ("drained", "draining") else "bad")
    if gpu.local:
        yield Note("local queue", style="dim")
    if unmanaged := beyond_driver(gpu.memory.unmanaged, gpu.memory.total):
        yield Note(f"{size(unmanaged)} used without a lease", style="bad")


def _remarks(view: StatusView, now: datetime) -> Iterator[Block]:
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
            if gpu.detail and not node.is_old and not clean(gpu.detail).startswith(gpu.state):
                yield Hanging(line(f"{name} GPU {gpu.index}: {clean(gpu.detail)}", "warn"), 2)


def _job_row(job: JobView, now: datetime) -> JobRow:
    state = outcome_of(job)
    return JobRow(
        id=job.label,
        user=clean(job.user),
        name=clean(job.name),
        node=nodes_of(job),
        gpu=gpus_of(job),
        lease=requested(job),
        left=until(job.expires_at, now) if job.expires_at else "",
        state=() if state == "active" else line(state, "warn"),
    )


def _waiting_rows(waiting: Sequence[JobView], now: datetime) -> Iterator[WaitingRow]:
    place = 1
    for job in waiting:
        at = expected(job, now)
        yield WaitingRow(
            place=place,
            ids=job.label,
            user=clean(job.user),
            name=clean(job.name),
            asks=requested(job),
            at="" if at == UNKNOWN or job.begin_at else at,
            why=reason_of(job, now) or "",
            jobs=place_of(job),
            number=None if job.array is not None else job.id,
        )
        place += place_of(job)
