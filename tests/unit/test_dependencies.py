"""What keeps a queued job from being considered, and how dependencies are settled."""

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    NOON,
    FakeClock,
    G,
    MemoryStore,
    ended_job,
    granted_job,
    kept,
    order,
    reading,
)
from gpulease.domain.eligibility import Block, BlockKind, Verdict, blocks, cycle, verdict
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.plan import plan
from gpulease.domain.queue_options import (
    ArrayElement,
    Condition,
    Dependency,
    Indices,
    QueueOptions,
    WantedDependency,
)
from gpulease.domain.snapshot import Snapshot
from gpulease.errors import BadValue, NoSuchJob
from gpulease.service.dependencies import refuse_cycle, resolve
from gpulease.service.jobs import cancel
from gpulease.service.ports import Event
from gpulease.service.transactions import change_jobs

EVENT = Event(NOON, "test")
CLOCK = FakeClock()


def _add(store: MemoryStore, *after: Dependency, indices: Indices | None = None) -> Job:
    submission = order()
    submission = replace(submission, queue=replace(submission.queue, after=after))
    with store.write() as tx:
        return (
            tx.add(submission, NOON)
            if indices is None
            else tx.add_array(submission, indices, NOON)[0]
        )


def _end(store: MemoryStore, job: JobId, code: int = 0, retried_as: JobId | None = None) -> None:
    with change_jobs(store) as tx:
        ended = ended_job(granted_job(kept(store, job)), code=code)
        tx.save(replace(ended, usage=replace(ended.usage, retried_as=retried_as)), EVENT)


@pytest.mark.parametrize(
    ("condition", "code", "starts"),
    [
        (Condition.OK, 0, True),
        (Condition.OK, 3, False),
        (Condition.FAIL, 0, False),
        (Condition.FAIL, 3, True),
        (Condition.ANY, 0, True),
        (Condition.ANY, 3, True),
    ],
)
def test_a_dependent_starts_or_ends_when_the_job_ends(
    condition: Condition, code: int, starts: bool
) -> None:
    store = MemoryStore()
    first = _add(store)
    second = _add(store, Dependency(first.id, condition))

    _end(store, first.id, code)

    after = kept(store, second.id)
    assert after.queue.after == (() if starts else second.queue.after)
    assert after.outcome is (None if starts else Outcome.DEPENDENCY_FAILED)
    assert starts or "job 1" in (after.detail or "")


def test_a_failed_dependency_ends_the_dependents_of_the_dependent_at_once() -> None:
    store = MemoryStore()
    jobs = [_add(store)]
    for _ in range(3):
        jobs.append(_add(store, Dependency(jobs[-1].id)))
    cleanup = _add(store, Dependency(jobs[-1].id, Condition.FAIL))

    cancel(store, jobs[0].id, "alice", CLOCK)

    assert [kept(store, job.id).outcome for job in jobs[1:]] == [Outcome.DEPENDENCY_FAILED] * 3
    assert "job 3" in (kept(store, jobs[3].id).detail or "")
    assert kept(store, cleanup.id).queue.after == ()


def test_dependents_of_a_retried_job_wait_for_the_retry() -> None:
    store = MemoryStore()
    first = _add(store)
    second = _add(store, Dependency(first.id))
    retry = _add(store)

    _end(store, first.id, 1, retried_as=retry.id)
    assert kept(store, second.id).queue.after == (Dependency(retry.id),)

    _end(store, retry.id)
    assert kept(store, second.id).queue.after == ()


@pytest.mark.parametrize("condition", list(Condition))
@pytest.mark.parametrize("codes", [(0, 0, 0), (0, 3, 0)])
def test_a_dependency_on_an_array_is_on_all_its_elements(
    condition: Condition, codes: tuple[int, ...]
) -> None:
    store = MemoryStore()
    array = _add(store, indices=Indices((0, 1, 2)))
    job = _add(store, Dependency(array.id, condition, whole_array=True))

    for place, code in enumerate(codes):
        assert kept(store, job.id).state is State.QUEUED or condition is Condition.OK
        assert kept(store, job.id).queue.after
        _end(store, JobId(array.id + place), code)

    has_failed = any(codes)
    met = verdict(condition, has_failed=has_failed, is_live=False) is Verdict.MET
    assert kept(store, job.id).outcome is (None if met else Outcome.DEPENDENCY_FAILED)
    assert bool(kept(store, job.id).queue.after) is not met


def test_dependencies_on_ended_jobs_are_resolved_at_submission() -> None:
    store = MemoryStore()
    good, bad = _add(store), _add(store)
    array = _add(store, indices=Indices((4, 7)))
    _end(store, good.id)
    _end(store, bad.id, 1)

    with store.write() as tx:
        assert resolve(tx, [WantedDependency(good.id)]) == ((), None)
        element = resolve(tx, [WantedDependency(array.id, 7), WantedDependency(good.id)])
        assert element == ((Dependency(JobId(array.id + 1)),), None)
        whole, _ = resolve(tx, [WantedDependency(array.id, None, Condition.ANY)])
        assert whole == (Dependency(array.id, Condition.ANY, whole_array=True),)
        _, why = resolve(tx, [WantedDependency(bad.id)])
        assert why is not None
        assert f"job {bad.id}" in why
        for unknown in (WantedDependency(JobId(99)), WantedDependency(array.id, 5)):
            with pytest.raises(NoSuchJob):
                resolve(tx, [unknown])


def test_a_job_that_would_wait_for_itself_is_refused() -> None:
    store = MemoryStore()
    first = _add(store)
    second = _add(store, Dependency(first.id))
    third = _add(store, Dependency(second.id))
    array = _add(store, Dependency(third.id), indices=Indices((0, 1)))
    with store.write() as tx:
        for target in (
            Dependency(first.id),
            Dependency(third.id),
            Dependency(array.id, whole_array=True),
        ):
            with pytest.raises(BadValue):
                refuse_cycle(tx, [first], (target,))
        refuse_cycle(tx, [third], (Dependency(first.id),))


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=20))
def test_edges_that_cycle_lets_through_never_make_one(edges: list[tuple[int, int]]) -> None:
    jobs = {JobId(number): order().queued(JobId(number), NOON) for number in range(1, 9)}
    for source, target in edges:
        job, more = jobs[JobId(source)], Dependency(JobId(target))
        found = cycle({job.id}, (more,), jobs)
        if found is not None:
            assert found[0] == found[-1] == job.id
            for waiting, awaited in pairwise(found):
                known = {each.job for each in jobs[waiting].queue.after}
                assert awaited in known or (waiting, awaited) == (job.id, more.job)
        else:
            after = (*job.queue.after, more)
            jobs[job.id] = replace(job, queue=replace(job.queue, after=after))
    ended: set[JobId] = set()
    while left := {number for number in jobs if number not in ended}:
        ready = {
            number for number in left if {each.job for each in jobs[number].queue.after} <= ended
        }
        assert ready, "a cycle"
        ended |= ready


def test_elements_that_all_wait_for_an_array_are_searched_once() -> None:
    class Counted(dict[JobId, Job]):
        reads = 0

        def __getitem__(self, job: JobId) -> Job:
            self.reads += 1
            return super().__getitem__(job)

    store = MemoryStore()
    array = _add(store, indices=Indices(tuple(range(100))))
    second = _add(store, Dependency(array.id, whole_array=True), indices=Indices(tuple(range(100))))
    edited = _add(store)
    jobs = Counted({job.id: job for job in store.live()})

    assert cycle({edited.id}, (Dependency(second.id, whole_array=True),), jobs) is None
    assert jobs.reads == 200


def test_a_dependent_of_a_job_and_of_its_retry_fails_once() -> None:
    store = MemoryStore()
    first, retry = _add(store), _add(store)
    second = _add(store, Dependency(first.id), Dependency(retry.id))
    _end(store, first.id, 1, retried_as=retry.id)
    _end(store, retry.id, 1)
    assert kept(store, second.id).outcome is Outcome.DEPENDENCY_FAILED
    assert len(store.events(second.id)) == 2


# Held, begin time, limits of arrays.


def _job(number: int, queue: QueueOptions, memory: int = G) -> Job:
    return replace(order(memory).queued(JobId(number), NOON), queue=queue)


def _element(number: int, most: int | None, *, runs: bool = False) -> Job:
    array = ArrayElement(JobId(1), number, most)
    job = _job(number, QueueOptions(array=array))
    return granted_job(job) if runs else job


def test_held_later_and_dependent_jobs_are_passed_over_and_delay_nobody() -> None:
    later = NOON + timedelta(hours=1)
    jobs = [
        _job(1, QueueOptions(held=True), 8 * G),
        _job(2, QueueOptions(begin_at=later), 8 * G),
        _job(3, QueueOptions(after=(Dependency(JobId(9)),)), 8 * G),
        _job(4, QueueOptions(begin_at=NOON)),
    ]
    decided = plan(Snapshot(jobs, (reading(),), NOON))
    assert [job for job, _ in decided.grants] == [4]
    assert {job: block.kind for job, block in decided.blocked.items()} == {
        1: BlockKind.HELD,
        2: BlockKind.BEGIN,
        3: BlockKind.AFTER,
    }
    assert decided.wakes_at == later
    assert not decided.reserved


def test_a_blocked_job_gives_up_when_its_wait_is_over() -> None:
    job = replace(_job(1, QueueOptions(held=True)), gives_up_at=NOON)
    assert plan(Snapshot([job], (reading(),), NOON)).gives_up == (1,)


@given(
    runs=st.integers(0, 6),
    waits=st.integers(0, 12),
    most=st.one_of(st.none(), st.integers(1, 8)),
)
def test_one_pass_never_starts_more_elements_than_the_limit_leaves(
    runs: int, waits: int, most: int | None
) -> None:
    jobs = [_element(number, most, runs=number < runs) for number in range(1, runs + waits + 1)]
    running = sum(job.holds_memory for job in jobs)
    gpus = tuple(reading(f"GPU-{number}", number) for number in range(18))
    decided = plan(Snapshot(jobs, gpus, NOON))
    most_started = len(jobs) if most is None else max(0, most - running)
    assert len(decided.grants) == min(most_started, len(jobs) - running)
    assert len(decided.grants) + len(decided.blocked) == len(jobs) - running


def test_a_held_element_does_not_take_the_place_of_another() -> None:
    jobs = [_element(number, 1) for number in (1, 2, 3)]
    jobs[0] = replace(jobs[0], queue=replace(jobs[0].queue, held=True))
    found = blocks(jobs, NOON)
    assert {job: block.kind for job, block in found.items()} == {
        1: BlockKind.HELD,
        3: BlockKind.ARRAY,
    }


def test_a_block_names_jobs_as_people_do() -> None:
    after = (Dependency(JobId(20)), Dependency(JobId(17), whole_array=True))
    block = Block(BlockKind.AFTER, after=after)
    assert block.sentence({JobId(20): "17_3"}) == (
        "not before job 17_3 succeeds and array 17 succeeds"
    )
