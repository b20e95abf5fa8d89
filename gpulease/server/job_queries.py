"""Which jobs a listing asks for, and one page of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.errors import BadValue
from gpulease.server.job_sets import is_element
from gpulease.server.validation import within
from gpulease.service.ports import Store
from gpulease.wire.requests import LONGEST_NAME

LARGEST_ID = (1 << 63) - 1
"""Of an integer in SQLite."""
MOST_LISTED = 10_000
"""Jobs in one answer, if some of them may have ended."""


class JobPage(NamedTuple):
    """Some of the jobs of a listing, in its order."""

    jobs: Sequence[Job]
    total: int
    """The number of jobs on all pages."""
    next: JobId | None
    """The job after which the next page begins; None on the last page."""


@dataclass(frozen=True, slots=True)
class JobQuery:
    """The filters and the page of a listing; live jobs only, unless `ended` or `state` says so."""

    user: str | None = None
    state: str | None = None
    ended: bool = False
    """Include jobs that have ended."""
    array: int | None = None
    index: int | None = None
    newest: bool = False
    """The newest jobs first, and not the oldest."""
    after: int | None = None
    """Begin with the job that follows the one with this id."""
    limit: int | None = None
    name: str | None = None
    """A shell pattern, as in glob(7)."""
    name_of: str | None = None
    """The only user with names that the caller may see; None: all."""
    since: datetime | None = None
    """Leave out jobs that ended before."""

    def check(self) -> None:
        """Check the values of the query.

        Raises:
            BadValue: one of them is out of range.
        """
        if self.state is not None and self.state not in set(State):
            raise BadValue(
                f"cannot list jobs: no state {self.state[:40]!r}", f"states: {', '.join(State)}"
            )
        if self.limit is not None:
            within("limit", self.limit, 1, MOST_LISTED, "list jobs")
        if self.after is not None:
            within("job", self.after, 0, LARGEST_ID, "list jobs")
        if self.name is not None and len(self.name) > LONGEST_NAME:
            raise BadValue(f"cannot list jobs: a pattern has at most {LONGEST_NAME} characters")

    def page(self, store: Store) -> JobPage:
        """Return one page of the jobs in a store."""
        if self.name is not None and self.name_of is not None:
            # Otherwise a pattern would find out names that are hidden.
            if self.user not in (None, self.name_of):
                return JobPage((), 0, None)
            return replace(self, user=self.name_of, name_of=None).page(store)
        if self.array is None and (self.ended or self.state == State.ENDED):
            return self._page_of_all(store)
        found = [job for job in self._candidates(store) if self._matches(job)]
        if self.newest:
            found.reverse()
        rest = found if self.after is None else list(self._following(found, self.after))
        shown = rest if self.limit is None else rest[: self.limit]
        return JobPage(shown, len(found), shown[-1].id if len(shown) < len(rest) else None)

    def _candidates(self, store: Store) -> Sequence[Job]:
        if self.array is None or not self.ended:
            return store.live()
        return store.elements(JobId(self.array), self.index) if self._has_array else ()

    @property
    def _has_array(self) -> bool:
        return self.array is not None and 0 < self.array <= LARGEST_ID

    def _following(self, jobs: Sequence[Job], after: int) -> Iterator[Job]:
        return (job for job in jobs if (job.id < after if self.newest else job.id > after))

    def _matches(self, job: Job) -> bool:
        return (
            self.user in (None, job.owner.user)
            and self.state in (None, job.state)
            and (self.array is None or is_element(job, self.array, self.index))
            and (self.name is None or fnmatchcase(job.name, self.name))
            and (self.since is None or job.ended_at is None or job.ended_at >= self.since)
        )

    def _page_of_all(self, store: Store) -> JobPage:
        """Return a page of jobs in any state.

        Without a limit, a page has the latest jobs, oldest first, and the next page older ones.
        """
        limit = self.limit or MOST_LISTED
        find = partial(store.jobs, self.user, self.state, limit, since=self.since, name=self.name)
        if self.newest or self.limit is None:
            found = [*find(before=self.after)]
            following = found[0].id if len(found) == limit else None
            if self.newest:
                found.reverse()
        else:
            found = [*find(after=self.after or 0)]
            following = found[-1].id if len(found) == limit else None
        count = store.count_jobs(self.user, self.state, since=self.since, name=self.name)
        return JobPage(found, count, following)
