"""What keeps a queued job from being considered: held, begin time, dependencies, array limits."""

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    NOON,
    G,
    granted_job,
    order,
    reading,
)
from gpulease.domain.eligibility import Block, BlockKind, blocks
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.plan import plan
from gpulease.domain.queue_options import ArrayElement, Dependency, QueueOptions
from gpulease.domain.snapshot import Snapshot


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
