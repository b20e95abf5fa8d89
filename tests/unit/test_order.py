"""The order of the queue, its index, the reservation, and priority classes."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    ALICE,
    BOB,
    NOON,
    G,
    order,
    reading,
    running_job,
)
from gpulease.domain.explain import start_of
from gpulease.domain.gpu import JobId
from gpulease.domain.job import (
    CommandFingerprint,
    Job,
    JobUsage,
    Owner,
    aging,
)
from gpulease.domain.lease import Claim
from gpulease.domain.limits import UserLimits
from gpulease.domain.past_jobs import ALL_JOBS, RunTimes, keys_of
from gpulease.domain.plan import Plan, order_after, plan
from gpulease.domain.queue import Queue
from gpulease.domain.queue_options import PolicyName, Priority, QueueOptions, QueuePolicy
from gpulease.domain.snapshot import Snapshot

HOUR = timedelta(hours=1)
CAROL = Owner(1002, 1002, "carol")


def job(
    number: int,
    memory: int = 8 * G,
    gpus: int = 1,
    owner: Owner = ALICE,
    limit: timedelta | None = None,
    age: timedelta | None = None,
    command: str | None = None,
) -> Job:
    usage = JobUsage(None if command is None else CommandFingerprint(command, command))
    made = Job(
        JobId(number),
        owner,
        "job",
        "true",
        Claim(memory, gpus, time_limit=limit),
        NOON,
        usage=usage,
    )
    since = None if age is None else NOON - age
    return replace(made, queue=replace(made.queue, aging_since_at=since))


def running(
    waiting: Job, gpus: Sequence[int] = (0,), for_: timedelta = timedelta(minutes=10)
) -> Job:
    return running_job(waiting, *(f"GPU-{gpu}" for gpu in gpus), at=NOON - for_)


def decide(jobs: Sequence[Job], gpus: int = 1, **known: object) -> Plan:
    there = [reading(f"GPU-{index}", index) for index in range(gpus)]
    return plan(Snapshot(jobs, there, NOON, **known))  # type: ignore[arg-type]


def starts(decided: Plan) -> list[int]:
    return [job_id for job_id, _ in decided.grants]


def knowing(**hours: float) -> RunTimes:
    """Return a history in which these commands ran for so many hours, twice each."""
    history = RunTimes()
    for command, ran in hours.items():
        fingerprint = CommandFingerprint(command, command)
        for user in ("alice", "bob", "carol"):
            keys = keys_of(user, Claim(8 * G), 1.0, fingerprint)
            for _ in range(2):
                history.record(keys, ran * 3600)
    return history


def test_the_job_predicted_to_be_short_goes_first() -> None:
    jobs = [job(1, command="long"), job(2, command="short")]
    assert starts(decide(jobs, history=knowing(long=10, short=1))) == [2]


def test_age_outweighs_a_longer_run_time() -> None:
    jobs = [job(1, command="long", age=6 * HOUR), job(2, command="short")]
    assert starts(decide(jobs, history=knowing(long=2, short=1))) == [1]


def test_the_user_who_has_used_less_goes_first() -> None:
    held = running(job(1, 2 * G, owner=ALICE))
    jobs = [held, job(2, 6 * G, owner=ALICE), job(3, 6 * G, owner=BOB)]
    assert starts(decide(jobs)) == [3]


def test_within_one_pass_a_start_counts_against_its_user() -> None:
    jobs = [job(number, 4 * G) for number in (1, 2, 3)] + [job(4, 4 * G, owner=BOB)]
    assert starts(decide(jobs)) == [1, 4]


def test_of_equal_jobs_the_older_goes_first() -> None:
    assert starts(decide([job(2), job(1)])) == [1]


def test_age_counts_for_the_first_ten_jobs_of_a_user_only() -> None:
    full = running(job(100))
    waiting = [job(number) for number in range(1, 31)] + [job(40, owner=BOB)]
    assert decide([full, *waiting]).aging == (*range(1, 11), 40)
    old = [job(number, age=HOUR if number <= 10 else None) for number in range(1, 31)]
    assert decide([full, *old]).aging == ()
    assert decide([full, *old[1:]]).aging == (11,)


@given(
    moves=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.booleans()), max_size=30),
    most=st.integers(1, 5),
)
def test_whatever_the_moves_no_more_jobs_of_a_user_gain_age_than_may(
    moves: list[tuple[int, int, bool]], most: int
) -> None:
    """Jobs are moved, or end, and each pass is carried out."""
    live = {number: job(number, owner=(ALICE, BOB)[number % 4 == 0]) for number in range(1, 21)}
    queue = Queue(8 * G)
    for number, before, ends in moves:
        found = live.pop(number, None)
        if found is not None and not ends:
            options = replace(found.queue, moved_before=JobId(before))
            live[number] = replace(found, queue=options)
        queue.update([running(job(100)), *(live[each] for each in sorted(live))])
        jobs = [*(held.job for held in queue.holding.values()), *queue.jobs.values()]
        decided = decide(jobs, queue=queue, blocked={}, policy=QueuePolicy(aging_jobs=most))
        for changed, since in ((decided.aging, NOON), (decided.stops_aging, None)):
            for each in changed:
                live[each] = aging(live[each], since)
        for owner in (ALICE, BOB):
            mine = [each for each in live.values() if each.owner == owner]
            assert sum(each.queue.aging_since_at is not None for each in mine) == min(
                most, len(mine)
            )


def test_no_job_outlasts_the_soft_reservation_of_the_oldest() -> None:
    """Job 2 holds one of two GPUs and is predicted to end in 50 minutes."""
    history = knowing(hour=1, half=0.4, short=0.2)
    held = running(job(2, command="hour"), [0])
    wide = job(3, gpus=2, age=25 * HOUR)
    decided = decide([held, wide, job(4, command="half")], 2, history=history)
    assert starts(decided) == [4], "0.4 hours, taken twice, end before"
    assert decided.reservations
    assert decided.reservations[0].at_s == (NOON + timedelta(minutes=50)).timestamp()
    late = decide([held, wide, job(4, command="hour")], 2, history=history)
    assert starts(late) == []
    assert set(late.reserved) == {"GPU-0", "GPU-1"}


def test_a_job_that_fits_beside_the_reserved_one_starts() -> None:
    held = running(job(1), [0])
    old = job(2, 6 * G, age=25 * HOUR)
    small, large = job(3, 2 * G), job(4, 3 * G)
    assert starts(decide([held, old, small], 1)) == [], "the GPU is full now"
    half = running(job(1, 4 * G), [0])
    assert starts(decide([half, old, small, large], 1)) == [3]


def test_a_hard_reservation_counts_with_time_limits() -> None:
    held = running(job(1, limit=2 * HOUR), [0], for_=HOUR)
    history = knowing(quick=0.01)
    for age, started in ((25 * HOUR, [3]), (40 * HOUR, [])):
        wide = job(2, gpus=2, age=age)
        decided = decide([held, wide, job(3, command="quick")], 2, history=history)
        assert starts(decided) == started
    limited = job(3, limit=HOUR)
    decided = decide([held, job(2, gpus=2, age=40 * HOUR), limited], 2)
    assert starts(decided) == [3], "it ends with the job that is waited for"


def test_on_a_crowded_server_the_hard_reservation_begins_later() -> None:
    held = running(job(1, limit=2 * HOUR), [0], for_=HOUR)
    jobs = [held, job(2, gpus=2, age=40 * HOUR), job(3, command="quick")]
    quick = knowing(quick=0.01)
    assert starts(decide(jobs, 2, history=quick, usual_wait_s=30 * 3600.0)) == [3]


def test_a_reserved_job_that_fits_starts_before_any_other() -> None:
    jobs = [job(1, command="long", age=25 * HOUR), job(2, command="short")]
    assert starts(decide(jobs, history=knowing(long=100, short=0.1))) == [1]


def test_nothing_is_reserved_for_a_job_that_no_end_helps() -> None:
    there = [reading("GPU-0", 0), reading("GPU-1", 1)]
    jobs = [running(job(1, 4 * G)), job(2, gpus=2, age=99 * HOUR), job(3, age=30 * HOUR)]
    decided = plan(Snapshot(jobs, there, NOON, drained={there[1].uuid: "fan"}))
    assert decided.reservations
    assert decided.reservations[0].job == 3


def test_other_jobs_of_a_user_leave_the_limit_to_the_reserved_one() -> None:
    """Otherwise it would be over the limit, and lose its reservation and its age."""
    held = running(job(1, limit=9 * HOUR), [0])
    wide = job(2, gpus=2, age=40 * HOUR)
    jobs = [held, wide, job(3, G, limit=HOUR), job(4, G, owner=BOB, limit=HOUR)]
    limits = {ALICE.uid: UserLimits(most_running=2)}
    assert sorted(starts(decide(jobs, 2))) == [3, 4]
    assert starts(decide(jobs, 2, limits=limits)) == [4]


def test_easy_reserves_for_the_first_and_starts_what_ends_before() -> None:
    easy = QueuePolicy(PolicyName.EASY)
    held = running(job(1, limit=2 * HOUR), [0], for_=HOUR)
    jobs = [held, job(2, gpus=2), job(3, limit=3 * HOUR), job(4, limit=HOUR)]
    assert starts(decide(jobs, 2, policy=easy)) == [4]
    assert starts(decide(jobs[:3], 2, policy=easy)) == []


def measured(percent: int | None) -> Snapshot:
    there = [reading("GPU-0", 0, utilization=percent)]
    jobs = [running(job(1, G)), running(job(2, G)), job(3, G)]
    return Snapshot(jobs, there, NOON, policy=QueuePolicy(most_utilization=1.2))


def test_a_gpu_takes_another_job_up_to_the_sum_of_utilizations() -> None:
    assert starts(plan(measured(90))) == [3], "0.9 and the assumed 0.3"
    assert starts(plan(measured(95))) == []


@pytest.mark.parametrize(("there", "others"), [(1, [3]), (2, [])])
def test_two_busy_jobs_share_a_gpu_and_a_third_waits(there: int, others: list[int]) -> None:
    """A reading is at most 100 %, so what the jobs usually use counts as well."""
    history = RunTimes()
    history.record((ALL_JOBS,), 60, utilization=1.0)
    jobs = [running(job(number, G)) for number in range(1, there + 1)]
    gpu = [reading("GPU-0", 0, utilization=100)]
    decided = plan(Snapshot([*jobs, job(3, G), job(4, G)], gpu, NOON, history=history))
    assert starts(decided) == others


def test_an_idle_gpu_comes_before_a_busy_one_with_less_free_memory() -> None:
    there = [reading("GPU-0", 0, utilization=95), reading("GPU-1", 1, utilization=0)]
    decided = plan(Snapshot([running(job(1, 4 * G)), job(2, G)], there, NOON))
    assert [place.allocations for _, place in decided.grants] == [(("GPU-1", G),)]


def test_where_utilization_is_unknown_two_jobs_share_a_gpu() -> None:
    assert starts(plan(measured(None))) == []


def test_a_job_that_has_just_started_counts_with_its_usual_utilization() -> None:
    there = [reading("GPU-0", 0, utilization=0)]
    new = running(job(1, G), for_=timedelta(seconds=5))
    waiting = [job(number, G) for number in range(2, 9)]
    policy = QueuePolicy(most_utilization=1.2)
    assert starts(plan(Snapshot([new, *waiting], there, NOON, policy=policy))) == [2, 3, 4]


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans(), st.integers(0, 2)), max_size=40))
def test_the_index_is_the_same_whatever_the_way_to_it(steps: list[tuple[int, bool, int]]) -> None:
    queue = Queue(8 * G)
    live: dict[int, Job] = {}
    for number, there, kind in steps:
        if there:
            age = HOUR if number % 2 else None
            made = job(number, (kind + 1) * G, owner=(ALICE, BOB, CAROL)[kind], age=age)
            live[number] = running(made) if kind == 2 else made
        else:
            live.pop(number, None)
        queue.update(live[each] for each in sorted(live))
    fresh = Queue.of((live[each] for each in sorted(live)), 8 * G)
    assert queue.jobs == fresh.jobs
    assert queue.turns == fresh.turns
    assert {user: jobs for user, jobs in queue.aging.items() if jobs} == fresh.aging
    assert queue.order == fresh.order
    assert queue.holding == fresh.holding
    groups = [
        {key: group.turns for found in each.groups.values() for key, group in found.items()}
        for each in (queue, fresh)
    ]
    assert groups[0] == groups[1]


# Priority classes and nice values.


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


ASKED = st.tuples(
    st.integers(1, 8),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([None, 1, 2, 30, 200]),
    st.sampled_from(["short", "long"]),
    st.booleans(),
)
"""Memory, GPUs, exclusive, the time limit in hours, the command, and whether it is preemptible."""


@given(
    st.lists(ASKED, max_size=12),
    st.lists(st.integers(1, 8), max_size=3),
    st.sampled_from([0, 24, 40]),
)
def test_no_job_is_refused_that_would_start_alone_beside_those_ahead(
    asked: list[tuple[int, int, bool, int | None, str, bool]], held: list[int], age: int
) -> None:
    there = [
        running(job(900 + index, memory * G, limit=3 * HOUR), (index,))
        for index, memory in enumerate(held)
    ]
    oldest = [job(1, gpus=3, age=age * HOUR)] if age else []
    waiting = []
    for number, (memory, gpus, exclusive, hours, command, spare) in enumerate(asked, 2):
        limit = None if hours is None else hours * HOUR
        made = job(number, command=command)
        waiting.append(
            replace(
                made,
                claim=Claim(memory * G, gpus, exclusive, limit),
                queue=replace(made.queue, preemptible=spare),
            )
        )
    policy = QueuePolicy(most_sharing=9)
    decided = decide(
        [*there, *oldest, *waiting], 3, history=knowing(short=1, long=4), policy=policy
    )
    for each in waiting:
        if each.id not in starts(decided) and not decided.preempts:
            assert start_of(decided, each) is None


def test_a_short_job_starts_after_a_longer_one_with_less_memory_was_refused() -> None:
    there = running(job(9, limit=3 * HOUR))
    oldest = job(1, gpus=2, age=24 * HOUR)
    long, short = job(2, G, command="long"), job(3, command="short")
    decided = decide([there, oldest, long, short], 2, history=knowing(short=1, long=4))
    assert [each.id for each in order_after(decided)] == [1, 2]
    assert starts(decided) == [3]
