"""What is shown of a GPU: the parts of its bar, why it is not simply available, its model. Pure.

The terminal draws a bar in cells, the page in percent of its width. Both divide it here.
"""

from __future__ import annotations

from gpulease.drawing.words import clean, id_of, size
from gpulease.record import record
from gpulease.wire.text import runs, unmanaged_processes, used_without_lease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Literal

    from gpulease.wire.jobs import JobView
    from gpulease.wire.machine import GpuView, StatusView

    NoteStyle = Literal["warn", "bad", "dim"]
    Remainder = Literal["free", "closed", "exclusive"]

_NEEDS_AN_ADMIN = frozenset({"unreadable", "lost", "prohibited"})


@record(frozen=True)
class Note:
    """Why a GPU is not simply available: "kept for job" 5."""

    text: str
    job: int | None = None
    style: NoteStyle = "warn"
    label: str = ""
    """The id of the job as people see it."""


def notes(gpu: GpuView, alone: JobView | None, view: StatusView) -> Iterator[Note]:
    """Say why a GPU is not simply available; `alone` is the job that has it exclusively.

    It is busy if a waiting job would fit in its free memory, but for the jobs that use it.
    """
    yield from _notes_on_state(gpu, view)
    if alone is not None:
        yield Note("exclusive: job", alone.id, label=id_of(alone))
    if gpu.state == "available" and gpu.kept_for is not None:
        label = gpu.kept_for_label or str(gpu.kept_for)
        yield Note("kept for job", gpu.kept_for, label=label)
    if any(
        each.kind == "busy" and each.gpu == gpu.uuid for job in view.jobs for each in job.refusals
    ):
        yield Note("busy")
    if gpu.slurm:
        yield Note("assigned by Slurm", style="dim")
    for other in gpu.neighbours:
        yield Note(f"{clean(other.user)}'s daemon leases {size(other.leased)}")
    for window in view.windows:
        if window.is_on and gpu.uuid in window.on:
            yield Note(f"window {clean(window.name)}")


def _notes_on_state(gpu: GpuView, view: StatusView) -> Iterator[Note]:
    style: NoteStyle = "bad" if gpu.state in _NEEDS_AN_ADMIN else "warn"
    detail = clean(gpu.detail or "")
    if gpu.state != "available" and not detail.startswith(gpu.state):
        detail = f"{gpu.state}: {detail}" if detail else gpu.state
    if detail:
        yield Note(detail, style="dim" if gpu.state == "divided" else style)
    is_seen = gpu.state == "divided" or any(unmanaged_processes(gpu, view, gone=True))
    if (unmanaged := used_without_lease(gpu, view)) and not is_seen:
        yield Note(f"{size(unmanaged)} used without a lease", style="bad")


def exclusive_job(gpu: GpuView, jobs: Iterable[JobView]) -> JobView | None:
    """Return the job that has a GPU alone."""
    alone = (job for job in jobs if job.claim.exclusive)
    return next((job for job in alone if any(each.gpu == gpu.uuid for each in job.leases)), None)


def remainder(free: int | None, *, is_exclusive: bool) -> Remainder:
    """Return what the end of a bar is: free, only if it can be leased."""
    return "exclusive" if is_exclusive else "free" if free else "closed"


def places(amounts: Iterable[int], total: int, cells: int) -> Iterator[tuple[int, int]]:
    """Yield where each part of a bar of `cells` for `total` bytes begins and ends.

    They are rounded to cells, and never exceed the bar.
    """
    begin = taken = 0
    for amount in amounts:
        taken = min(total, taken + amount)
        end = (2 * cells * taken + total) // (2 * total)
        yield begin, end
        begin = end


def labels_in_ranges(places: Sequence[int], labels: Sequence[str]) -> str:
    """Write the labels of GPUs in ranges: 0-3, 7."""
    return ", ".join(
        labels[first] if first == last else f"{labels[first]}-{labels[last]}"
        for first, last in runs(places)
    )


def models(gpus: Sequence[tuple[str, str]]) -> str:
    """Write labels and models of GPUs: 4 x A100 24G, or of several models which GPU has which."""
    of: dict[str, list[int]] = {}
    for place, (_, name) in enumerate(gpus):
        of.setdefault(name, []).append(place)
    labels = [label for label, _ in gpus]
    named = (
        (f"{len(places)} x {name}" if len(places) > 1 else name)
        + (f" ({labels_in_ranges(places, labels)})" if len(of) > 1 else "")
        for name, places in of.items()
    )
    return ", ".join(named)
