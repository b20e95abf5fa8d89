"""Dependencies between jobs, kept up to date in the transactions in which jobs end.

`transactions.change_jobs` calls `settle_dependents` before each commit, so that no way for a job to
end can leave others waiting for it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from gpulease.domain.eligibility import Verdict, cycle, succeeded, verdict
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Outcome, asked_to_end
from gpulease.domain.lease import State, Trigger
from gpulease.domain.queue_options import Condition, Dependency, WantedDependency
from gpulease.errors import BadValue, NoSuchJob
from gpulease.service.ports import Event, Transaction
from gpulease.service.requeue import last_attempt

_MET = "dependency_met"
_TRIED_AGAIN = "dependency_tried_again"


def resolve(
    tx: Transaction, wanted: Iterable[WantedDependency]
) -> tuple[tuple[Dependency, ...], str | None]:
    """Return the dependencies that are still open, and why one can no longer be met, or None.

    Raises:
        NoSuchJob: there is no such job, or no such element of an array.
    """
    open_: list[Dependency] = []
    for each in wanted:
        target = _existing(tx, each)
        array = target.queue.array
        whole = each.index is None and array is not None and array.job == target.id
        if whole:
            dependency = Dependency(target.id, each.condition, whole_array=True)
            seen, failed = _array_verdict(tx, dependency)
        else:
            target = last_attempt(tx, target)
            dependency = Dependency(target.id, each.condition)
            seen, failed = _verdict(dependency, target), target
        if seen is Verdict.FAILED:
            return (), _why(dependency, failed)
        if seen is Verdict.WAITS:
            open_.append(dependency)
    return tuple(dict.fromkeys(open_)), None


def _existing(tx: Transaction, wanted: WantedDependency) -> Job:
    job = tx.job(wanted.job) if wanted.index is None else tx.element(wanted.job, wanted.index)
    if job is None:
        raise NoSuchJob(
            f"cannot wait for job {wanted}: no such job", "gpulease list --all shows all jobs"
        )
    return job


def _verdict(dependency: Dependency, job: Job) -> Verdict:
    is_live = job.state is not State.ENDED
    has_failed = not is_live and not succeeded(job)
    return verdict(dependency.condition, has_failed=has_failed, is_live=is_live)


def _array_verdict(tx: Transaction, dependency: Dependency) -> tuple[Verdict, Job | None]:
    """Return the verdict on a whole array, and an element that failed."""
    failed = tx.failed_element(dependency.job)
    is_live = tx.live_elements(dependency.job) > 0
    return verdict(dependency.condition, has_failed=failed is not None, is_live=is_live), failed


def _why(dependency: Dependency, job: Job | None) -> str:
    """Return why a dependency can no longer be met."""
    if dependency.condition is Condition.FAIL or job is None:
        what = "array" if dependency.whole_array else "job"
        label = job.label if job is not None and not dependency.whole_array else dependency.job
        return f"{what} {label} succeeded, and this job starts only if it fails"
    exited = job.exit if job.outcome is Outcome.EXITED else None
    how = str(job.outcome) if exited is None else f"exited with {exited.code}"
    return f"job {job.label} did not succeed ({how.replace('_', ' ')})"


def failed(job: Job, why: str, at: datetime) -> Job:
    """Return a queued job that has ended because a dependency can no longer be met."""
    ended = asked_to_end(job, Trigger.CANCEL, Outcome.DEPENDENCY_FAILED, why, at)
    assert ended is not None, "a queued job can always be ended"
    return ended


def settle_dependents(tx: Transaction, ended: Sequence[Job]) -> None:
    """Tell the jobs that wait for `ended` jobs, and in turn those that wait for jobs that fail."""
    if not ended:
        return
    settlement = _Settlement(tx, max(job.ended_at for job in ended if job.ended_at is not None))
    while ended and settlement.has_dependents:
        ended = settlement.round(ended)
    settlement.save()


class _Settlement:
    """The dependents of all jobs, and their changes in one transaction.

    Thousands of jobs may wait for one array, or each for the one before. So a round looks only at
    the dependents of what has ended, and all rounds are saved together.
    """

    def __init__(self, tx: Transaction, at: datetime) -> None:
        self._tx = tx
        self._at = at
        self._dependents: dict[JobId, dict[Dependency, list[JobId]]] = {}
        """By the job or array that they wait for."""
        self._waiting: dict[JobId, Job] = {}
        self._met: dict[JobId, Job] = {}
        self._tried_again: dict[JobId, Job] = {}
        """These wait for a job that continues the one they waited for."""
        self._failed: dict[JobId, Job] = {}
        self._failed_elements: dict[JobId, Job] = {}
        """Of each array, one that has failed in this transaction."""
        self._unsaved_ends: Counter[JobId] = Counter()
        """Of each array, the elements that have failed and are not saved yet."""
        for job in tx.dependents():
            self._waiting[job.id] = job
            for each in job.queue.after:
                self._wait(job.id, each)

    def _wait(self, waiting: JobId, dependency: Dependency) -> None:
        by_dependency = self._dependents.setdefault(dependency.job, {})
        by_dependency.setdefault(dependency, []).append(waiting)

    @property
    def has_dependents(self) -> bool:
        return bool(self._dependents)

    def round(self, ended: Sequence[Job]) -> Sequence[Job]:
        """Note the ends of jobs, and return the dependents that have ended for it."""
        failing: list[Job] = []
        for job in ended:
            again = job.usage.retried_as
            for each in self._dependencies_on(job.id, whole_array=False):
                if again is None:
                    failing += self._settle(each, _verdict(each, job), job)
                else:
                    self._wait_instead(each, replace(each, job=again))
        for array in self._arrays_of(ended):
            for each in self._dependencies_on(array, whole_array=True):
                seen, failed_element = self._array_verdict(each)
                if seen is not Verdict.WAITS:
                    failing += self._settle(each, seen, failed_element)
        self._unsaved_ends.update(
            job.queue.array.job for job in failing if job.queue.array is not None
        )
        return failing

    def _dependencies_on(self, target: JobId, *, whole_array: bool) -> Sequence[Dependency]:
        found = self._dependents.get(target, {})
        return [each for each in found if each.whole_array is whole_array]

    def _arrays_of(self, ended: Iterable[Job]) -> Iterable[JobId]:
        """Return the arrays of these elements, and note which element has failed."""
        arrays: dict[JobId, None] = {}
        for job in ended:
            if job.queue.array is not None:
                arrays[job.queue.array.job] = None
                if job.usage.retried_as is None and not succeeded(job):
                    self._failed_elements.setdefault(job.queue.array.job, job)
        return arrays

    def _array_verdict(self, dependency: Dependency) -> tuple[Verdict, Job | None]:
        """Return the verdict on a whole array, and an element that failed.

        While elements are live, one that failed earlier has ended its dependents already.
        """
        array = dependency.job
        failed = self._failed_elements.get(array)
        is_live = self._tx.live_elements(array) > self._unsaved_ends[array]
        if failed is None and not is_live:
            failed = self._tx.failed_element(array)
        has_failed = failed is not None
        return verdict(dependency.condition, has_failed=has_failed, is_live=is_live), failed

    def _settle(self, dependency: Dependency, seen: Verdict, target: Job | None) -> Sequence[Job]:
        """Remove a dependency that is met, or end the jobs that have it, and return these."""
        waiting = self._pop(dependency)
        if seen is Verdict.FAILED:
            why = _why(dependency, target)
            failing = [failed(job, why, self._at) for job in waiting]
            self._failed.update((job.id, job) for job in failing)
            for job in failing:
                del self._waiting[job.id]
            return failing
        for job in waiting:
            after = (each for each in job.queue.after if each != dependency)
            self._change(self._met, _waits_for(job, after))
        return ()

    def _wait_instead(self, old: Dependency, new: Dependency) -> None:
        for job in self._pop(old):
            after = (new if each == old else each for each in job.queue.after)
            self._change(self._tried_again, _waits_for(job, after))
            self._wait(job.id, new)

    def _pop(self, dependency: Dependency) -> Sequence[Job]:
        """Return the jobs that have a dependency, and forget it."""
        numbers = dict.fromkeys(self._dependents[dependency.job].pop(dependency))
        return [self._waiting[job] for job in numbers if job in self._waiting]

    def _change(self, why: dict[JobId, Job], job: Job) -> None:
        why[job.id] = self._waiting[job.id] = job

    def save(self) -> None:
        """Store the changes."""
        for changed, kind in ((self._met, _MET), (self._tried_again, _TRIED_AGAIN)):
            latest = [self._waiting[number] for number in changed if number not in self._failed]
            if latest:
                self._tx.save_all(latest, Event(self._at, kind))
        if self._failed:
            ended = tuple(self._failed.values())
            why = {job.id: job.detail for job in ended}
            self._tx.save_all(ended, Event(self._at, Trigger.CANCEL), why)


def _waits_for(job: Job, after: Iterable[Dependency]) -> Job:
    return replace(job, queue=replace(job.queue, after=tuple(after)))


_MOST_SHOWN = 5
"""Jobs of a cycle that an error names."""


def refuse_cycle(tx: Transaction, jobs: Iterable[Job], after: Sequence[Dependency]) -> None:
    """Check that all of `jobs` may wait for `after`.

    Raises:
        BadValue: one of them would wait for itself, perhaps through other jobs.
    """
    live: Mapping[JobId, Job] = {each.id: each for each in tx.live()}
    found = cycle({job.id for job in jobs}, after, live)
    if found is None:
        return
    path = " after ".join(live[each].label for each in found[:_MOST_SHOWN])
    more = f", and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    raise BadValue(
        f"cannot change job {live[found[0]].label}: it would wait for itself ({path}{more})",
        "leave out the dependency, or remove that of another job in this chain",
    )
