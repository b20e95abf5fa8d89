"""An array as its page shows it: how many elements are in which state, and rows of those alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpulease.web.text import state_of
from gpulease.wire.jobs import JobView
from gpulease.wire.text import ranges

MOST_ROWS = 100
MOST_LINKS = 8
"""Of one row."""
_RUNNING = ("granted", "active", "releasing")


@dataclass(frozen=True, slots=True)
class ElementRow:
    """An element that runs, or the elements that have one state for one reason."""

    jobs: Sequence[JobView]

    @property
    def indices(self) -> str:
        """Their indices, as ranges."""
        return _indices(self.jobs)


@dataclass(frozen=True, slots=True)
class Array:
    """An array of jobs."""

    first: JobView
    elements: Sequence[JobView]
    """The last attempt of each."""
    rows: Sequence[ElementRow]

    @property
    def indices(self) -> str:
        """The indices of all elements, as ranges."""
        return _indices(self.elements)

    @property
    def counts(self) -> str:
        """The number of elements by state; those that ended by whether they succeeded."""
        counts = {
            "queued": sum(job.state == "queued" for job in self.elements),
            "running": sum(job.state in _RUNNING for job in self.elements),
            "succeeded": sum(job.exit_status == 0 for job in self.elements),
            "failed": sum(job.state == "ended" and job.exit_status != 0 for job in self.elements),
        }
        return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def array_of(jobs: Sequence[JobView]) -> Array:
    """Return the array of these jobs, oldest first; only the last attempt of an element counts."""
    last = {job.queue.array_index: job for job in jobs if job.queue is not None}
    return Array(jobs[0], list(last.values()), _rows(last.values()))


def _rows(elements: Iterable[JobView]) -> list[ElementRow]:
    """Return those that run one by one, then those that are alike together."""
    groups: dict[tuple[object, ...], list[JobView]] = {}
    for job in elements:
        runs = job.state in _RUNNING
        key = not runs, state_of(job), job.exit_status, job.reason, job.id if runs else None
        groups.setdefault(key, []).append(job)
    ordered = sorted(groups.items(), key=lambda item: bool(item[0][0]))
    return [ElementRow(each) for _, each in ordered]


def _indices(jobs: Iterable[JobView]) -> str:
    return ranges(sorted(job.queue.array_index or 0 for job in jobs if job.queue is not None))
