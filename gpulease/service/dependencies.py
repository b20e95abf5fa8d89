"""Dependencies between jobs, kept up to date in the transactions in which jobs end.

The store calls `settle_dependents` before each commit, so that no way for a job to end can leave
others waiting for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from gpulease.domain.dependencies import Verdict, cycle, succeeded, verdict
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Outcome, asked_to_end
from gpulease.domain.lease import State, Trigger
from gpulease.domain.queue_options import Condition, Dependency, WantedDependency
from gpulease.errors import BadValue, NoSuchJob
from gpulease.service.ports import Event, Transaction

_MET = "dependency_met"


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
            target = _latest(tx, target)
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


def _latest(tx: Transaction, job: Job) -> Job:
    """Return the last retry of a job, or the job."""
    while job.usage.retried_as is not None and (after := tx.job(job.usage.retried_as)) is not None:
        job = after
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
    how = f"exited with {job.exit.code}" if _exited(job) and job.exit else str(job.outcome)
    return f"job {job.label} did not succeed ({how.replace('_', ' ')})"


def _exited(job: Job) -> bool:
    return job.outcome is Outcome.EXITED


def failed(job: Job, why: str, at: datetime) -> Job:
    """Return a queued job that has ended because a dependency can no longer be met."""
    ended = asked_to_end(job, Trigger.CANCEL, Outcome.DEPENDENCY_FAILED, why, at)
    assert ended is not None, "a queued job can always be ended"
    return ended


def settle_dependents(tx: Transaction, ended: Sequence[Job]) -> None:
    """Tell the jobs that wait for `ended` jobs, and in turn those that wait for jobs that fail."""
    if not ended:
        return
    settlement = _Settlement(tx)
    while ended and settlement.has_dependents:
        ended = settlement.round(ended)


class _Settlement:
    """The dependents of all jobs, and their changes in one transaction."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._dependents: dict[tuple[JobId, bool], list[JobId]] = {}
        self._changed: dict[JobId, Job] = {}
        self._waiting: dict[JobId, Job] = {}
        for job in tx.live():
            if job.queue.after and job.state is State.QUEUED:
                self._waiting[job.id] = job
                for each in job.queue.after:
                    self._dependents.setdefault((each.job, each.whole_array), []).append(job.id)

    @property
    def has_dependents(self) -> bool:
        return bool(self._dependents)

    def round(self, ended: Sequence[Job]) -> Sequence[Job]:
        """Note the ends of jobs, and return the dependents that have ended for it."""
        at = max(job.ended_at for job in ended if job.ended_at is not None)
        for job in ended:
            for waiting in self._dependents.pop((job.id, False), ()):
                self._settle(waiting, job, at)
        for array in {job.queue.array.job for job in ended if job.queue.array is not None}:
            for waiting in self._dependents.get((array, True), ()):
                self._settle_array(waiting, array, at)
        return self._save(at)

    def _current(self, waiting: JobId) -> Job | None:
        """Return a dependent as it is in this round; None if it has ended."""
        job = self._changed.get(waiting) or self._waiting.get(waiting)
        return None if job is None or job.state is State.ENDED else job

    def _settle(self, waiting: JobId, ended: Job, at: datetime) -> None:
        job = self._current(waiting)
        if job is None:
            return
        after: list[Dependency] = []
        for each in job.queue.after:
            if each.job != ended.id or each.whole_array:
                after.append(each)
            elif (again := ended.usage.retried_as) is not None:
                after.append(replace(each, job=again))
                self._dependents.setdefault((again, False), []).append(waiting)
            elif _verdict(each, ended) is Verdict.FAILED:
                self._changed[waiting] = failed(job, _why(each, ended), at)
                return
        self._changed[waiting] = _waits_for(job, after)

    def _settle_array(self, waiting: JobId, array: JobId, at: datetime) -> None:
        job = self._current(waiting)
        if job is None:
            return
        after: list[Dependency] = []
        for each in job.queue.after:
            if each.job != array or not each.whole_array:
                after.append(each)
                continue
            seen, culprit = _array_verdict(self._tx, each)
            if seen is Verdict.FAILED:
                self._changed[waiting] = failed(job, _why(each, culprit), at)
                return
            if seen is Verdict.WAITS:
                after.append(each)
        if len(after) < len(job.queue.after):
            self._changed[waiting] = _waits_for(job, after)

    def _save(self, at: datetime) -> Sequence[Job]:
        changed, self._changed = self._changed, {}
        ended = [job for job in changed.values() if job.state is State.ENDED]
        others = [job for job in changed.values() if job.state is not State.ENDED]
        self._waiting.update(changed)
        by_detail: dict[str | None, list[Job]] = {}
        for job in ended:
            by_detail.setdefault(job.detail, []).append(job)
        for detail, jobs in by_detail.items():
            self._tx.save_all(jobs, Event(at, Trigger.CANCEL, detail))
        self._tx.save_all(others, Event(at, _MET))
        return ended


def _waits_for(job: Job, after: Iterable[Dependency]) -> Job:
    return replace(job, queue=replace(job.queue, after=tuple(after)))


def depend_on_instead(tx: Transaction, old: JobId, new: JobId, at: datetime) -> None:
    """Let the jobs that wait for job `old` wait for job `new`, which replaces it."""
    changed = [
        _waits_for(
            job,
            (
                replace(each, job=new) if each.job == old and not each.whole_array else each
                for each in job.queue.after
            ),
        )
        for job in tx.live()
        if any(each.job == old and not each.whole_array for each in job.queue.after)
    ]
    tx.save_all(changed, Event(at, "dependency_moved", f"from job {old} to job {new}"))


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
