"""An array of jobs as a page shows it: how many elements are in which state, and those alike."""

from __future__ import annotations

from gpulease.drawing.words import first_of_row, label, reason_of
from gpulease.record import record
from gpulease.wire.text import has_failed, ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from gpulease.wire.jobs import JobView

_RUNNING = ("granted", "active", "releasing")


@record(frozen=True)
class Array:
    """An array of jobs; of an element that was tried again only the last attempt counts."""

    first: JobView
    elements: Sequence[JobView]
    groups: Sequence[Sequence[JobView]]
    """Those that run one by one, then those that have one state for one reason."""

    @property
    def counts(self) -> str:
        """The number of elements by state; those that ended by whether they succeeded."""
        counts = {
            "queued": sum(job.state == "queued" for job in self.elements),
            "running": sum(job.state in _RUNNING for job in self.elements),
            "succeeded": sum(job.exit_status == 0 for job in self.elements),
            "failed": sum(map(has_failed, self.elements)),
            "stopped": sum(
                job.state == "ended" and job.exit_status != 0 and not has_failed(job)
                for job in self.elements
            ),
        }
        return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def array_of(jobs: Sequence[JobView], now: datetime) -> Array:
    """Return the array of these jobs, which are in the order of their ids."""
    last = {job.queue.array_index: job for job in jobs if job.queue is not None}
    groups: dict[tuple[object, ...], list[JobView]] = {}
    for job in last.values():
        key: tuple[object, ...] = label(job), job.exit_status, reason_of(job, now)
        groups.setdefault((*key, job.id) if job.state in _RUNNING else key, []).append(job)
    ordered = sorted(groups.values(), key=lambda group: group[0].state not in _RUNNING)
    return Array(first_of_row(jobs), list(last.values()), ordered)


def indices_of(jobs: Sequence[JobView]) -> str:
    """Return the indices of elements, as ranges."""
    return ranges(sorted(job.queue.array_index or 0 for job in jobs if job.queue is not None))
