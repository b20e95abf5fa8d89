"""What each user has at once, counted along with each change, so that no bound costs a query."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.memory import JobId
from gpulease.service.ports import Tally


class Tallies:
    """The counts of all users, by the live jobs and the sizes of their invocations in bytes."""

    def __init__(self, live: Iterable[Job], sizes: Mapping[JobId, int]) -> None:
        self._of: dict[int, Tally] = {}
        self._sizes = dict(sizes)
        for job in live:
            self._count(job, 1)

    def of(self, uid: int) -> Tally:
        """Return what a user has."""
        return self._of.get(uid, Tally())

    def of_after(self, uid: int, changes: Iterable[tuple[Job | None, Job, int | None]]) -> Tally:
        """Return what a user would have after `changes`, each as `note` takes it."""
        after = Tallies((), {})
        after._of = {uid: self.of(uid)}
        for before, job, size in changes:
            if job.owner.uid == uid:
                after._sizes.setdefault(job.id, self._sizes.get(job.id, 0))
                after.note(before, job, size)
        return after.of(uid)

    def note(self, before: Job | None, after: Job, size: int | None = None) -> None:
        """Count a job as it is now; `size` comes with a new one."""
        if size is not None:
            self._sizes[after.id] = size
        if before is not None:
            self._count(before, -1)
        if after.state is State.ENDED:
            self._sizes.pop(after.id, None)
        else:
            self._count(after, 1)

    def _count(self, job: Job, one: int) -> None:
        was = self.of(job.owner.uid)
        waits = one if job.state is State.QUEUED else 0
        now = replace(
            was,
            waiting=was.waiting + waits,
            waiting_bytes=was.waiting_bytes + waits * self._sizes.get(job.id, 0),
            holds=was.holds + (one if job.holder is not None else 0),
        )
        self._of[job.owner.uid] = now
        if now == Tally():
            del self._of[job.owner.uid]
