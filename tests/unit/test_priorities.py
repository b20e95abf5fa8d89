"""Priority classes and nice values in the order of the queue."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import ALICE, BOB, NOON, G, order, reading
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Owner
from gpulease.domain.plan import plan
from gpulease.domain.queue_options import PolicyName, Priority, QueueOptions, QueuePolicy
from gpulease.domain.snapshot import Snapshot

HIGH, NORMAL, LOW = (
    QueueOptions(priority=each) for each in (Priority.HIGH, Priority.NORMAL, Priority.LOW)
)


def waiting(number: int, options: QueueOptions, owner: Owner = ALICE, hours: float = 0) -> Job:
    """Return a job that needs the whole GPU and is so old."""
    job = order(8 * G, owner=owner).queued(JobId(number), NOON)
    since = NOON - timedelta(hours=hours)
    return replace(job, queue=replace(options, aging_since_at=since))


def first(*jobs: Job, policy: PolicyName = PolicyName.FAIR) -> int:
    """Return which of the jobs starts on one GPU."""
    decided = plan(Snapshot(jobs, (reading(),), NOON, policy=QueuePolicy(policy)))
    ((job, _),) = decided.grants
    return job


@pytest.mark.parametrize("policy", PolicyName)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(Priority),
            st.integers(-20, 19),
            st.floats(0, 1000),
            st.sampled_from([ALICE, BOB]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_no_age_and_no_nice_value_takes_a_job_before_a_higher_class(
    policy: PolicyName, drawn: list[tuple[Priority, int, float, Owner]]
) -> None:
    jobs = [
        waiting(number, QueueOptions(priority=priority, nice=nice), owner, hours)
        for number, (priority, nice, hours, owner) in enumerate(drawn, 1)
    ]
    classes = [Priority.HIGH, Priority.NORMAL, Priority.LOW]
    highest = min(classes.index(job.queue.priority) for job in jobs)
    started = next(job for job in jobs if job.id == first(*jobs, policy=policy))
    assert classes.index(started.queue.priority) == highest


def test_within_a_class_a_higher_nice_value_starts_later() -> None:
    assert first(waiting(1, replace(NORMAL, nice=5)), waiting(2, NORMAL)) == 2
    assert first(waiting(1, NORMAL), waiting(2, replace(NORMAL, nice=-5))) == 2


def test_a_nice_job_becomes_first_with_age() -> None:
    """With a nice value of 10 it counts as half as urgent."""
    nice = replace(NORMAL, nice=10)
    assert first(waiting(1, nice, hours=6), waiting(2, NORMAL, hours=4)) == 2
    assert first(waiting(1, nice, hours=20), waiting(2, NORMAL, hours=4)) == 1


def test_what_a_higher_class_cannot_use_goes_to_the_others() -> None:
    wide = order(8 * G, gpus=2).queued(JobId(1), NOON)
    assert first(replace(wide, queue=HIGH), waiting(2, LOW)) == 2
