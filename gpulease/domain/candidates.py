"""The waiting jobs in the order in which a pass tries them.

Only the first job of each group is scored. The groups with one claim form a line, so that a claim
that does not fit any more drops out with all its groups at once.
"""

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.queue import Group, Need, Order

_Entry = tuple[int, float, JobId, int, Group]
"""Class, negative merit and id of a job, its place in its group, and the group. Least first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job to try."""

    job: Job
    need: Need
    entry: _Entry
    line: "_Line"


@dataclass(slots=True, eq=False)
class _Line:
    """The groups of one user with one claim. Their order does not depend on the user's share."""

    user: str
    entries: list[_Entry]
    siblings: "list[_Line]"
    """All lines with the same claim."""


class Candidates:
    """Iterates over jobs to try, by descending score; the first job of each group at first.

    `started` goes on with the next job of the group. Otherwise, the group drops out.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[Group]],
        jobs: Mapping[JobId, Job],
        order: Order,
        placed: Container[JobId],
    ) -> None:
        """Take the groups of each claim, and the jobs that have a place already."""
        self._jobs = jobs
        self._order = order
        self._placed = placed
        self._heap: list[tuple[int, float, JobId, _Line]] = []
        """Class, negative score and id of the first job of each line, and the line."""
        for same_claim in groups:
            self._line_up(same_claim)

    def _line_up(self, same_claim: Iterable[Group]) -> None:
        by_user: dict[str, list[_Entry]] = {}
        for group in same_claim:
            entry = self._entry(group, 0)
            if entry is not None:
                by_user.setdefault(group.need.user, []).append(entry)
        siblings: list[_Line] = []
        for user, entries in by_user.items():
            heapq.heapify(entries)
            siblings.append(_Line(user, entries, siblings))
        for line in siblings:
            self._queue(line)

    def _entry(self, group: Group, position: int) -> _Entry | None:
        """Return the first job of a group, from a place in it on; None if there is none."""
        turns = group.turns
        while position < len(turns):
            job_id = JobId(turns[position][2])
            if job_id not in self._placed:
                merit = self._order.merit(group.need, self._jobs[job_id])
                return group.need.rank, -merit, job_id, position, group
            position += 1
        return None

    def _queue(self, line: _Line) -> None:
        """Put a line among the others, by the score of its first job."""
        if line.entries:
            rank, merit, job_id, _, _ = line.entries[0]
            score = merit / self._order.factor(line.user)
            heapq.heappush(self._heap, (rank, score, job_id, line))

    def __iter__(self) -> Iterator[Candidate]:
        while self._heap:
            rank, score, job_id, line = heapq.heappop(self._heap)
            if not line.entries:
                continue
            first = line.entries[0]
            fresh = first[1] / self._order.factor(line.user)
            if first[2] != job_id or (
                fresh > score and self._heap and self._heap[0][:2] < (rank, fresh)
            ):
                # A start has raised the share of the user meanwhile.
                self._queue(line)
                continue
            heapq.heappop(line.entries)
            yield Candidate(self._jobs[job_id], first[4].need, first, line)
            self._queue(line)

    def started(self, candidate: Candidate) -> None:
        """Go on with the next job of the same group."""
        following = self._entry(candidate.entry[4], candidate.entry[3] + 1)
        if following is not None:
            heapq.heappush(candidate.line.entries, following)

    def is_last(self, candidate: Candidate) -> bool:
        """Tell whether no other group with the same claim is left."""
        return not any(line.entries for line in candidate.line.siblings)

    def refused(self, candidate: Candidate, hopeless: Callable[[Need], bool]) -> None:
        """Drop all groups with the same claim that are `hopeless` as well."""
        for line in candidate.line.siblings:
            line.entries[:] = [entry for entry in line.entries if not hopeless(entry[4].need)]
            heapq.heapify(line.entries)
