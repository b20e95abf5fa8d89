"""Jobs that are tried again after they have failed: after which ends, how often, and when."""

from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import pytest

from fakes import NOON, FakeClock, MemoryStore, kept, order, started
from goldens import mentions
from gpulease.domain.eligibility import own_block
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Exit, Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.queue_options import LONGEST_RETRY_DELAY, ArrayElement, QueueOptions
from gpulease.errors import BadValue, with_hint
from gpulease.options import exit_codes
from gpulease.server.validation import queue_options_of
from gpulease.service import jobs
from gpulease.service.ports import Transaction, WorkerExited
from gpulease.wire.requests import QueueRequest

THREE = QueueOptions(retries=3)


def running(store: MemoryStore, options: QueueOptions = THREE, *, strict: bool = False) -> Job:
    asked = order()
    invocation = replace(asked.invocation, options={"strict": strict})
    with store.write() as tx:
        job = tx.add(replace(asked, queue=options, invocation=invocation), NOON)
    return started(store, job)


def failed(code: int = 1) -> WorkerExited:
    return WorkerExited(Outcome.EXITED, Exit(code), NOON)


def signaled(number: int, **how: bool) -> WorkerExited:
    return WorkerExited(Outcome.SIGNALED, Exit(None, number), NOON, **how)


def next_try(store: MemoryStore, job: Job) -> Job:
    return kept(store, job.usage.retried_as)


def test_each_try_continues_the_one_before_and_waits_twice_as_long_until_none_is_left() -> None:
    store = MemoryStore()
    array = ArrayElement(JobId(17), 3)
    options = replace(THREE, requeue=True, array=array, aging_since_at=NOON)
    job = running(store, options)
    for number, delay in enumerate((10, 20, 40), 2):
        ended = jobs.note_exited(store, job.id, failed(3))
        new = next_try(store, ended)
        said = f"exited with 3; job {new.id} is try {number} of 4 in {delay}s"
        assert (ended.state, ended.detail) == (State.ENDED, said)
        assert (new.usage.retry_of, new.label, new.claim) == (job.id, "17_3", job.claim)
        assert new.queue.begin_at == NOON + timedelta(seconds=delay)
        assert new.queue.aging_since_at is None, "it had its turn"
        block = own_block(new, NOON)
        assert block is not None
        assert block.sentence({}) == f"it has failed, and waits before try {number}"
        job = started(store, new)
    last = jobs.note_exited(store, job.id, failed(3))
    assert (last.usage.retried_as, last.detail) == (None, None)


def test_no_retry_waits_longer_than_an_hour() -> None:
    store = MemoryStore()
    job = running(store, replace(THREE, retries=100, retried=99))
    ended = jobs.note_exited(store, job.id, failed())
    assert next_try(store, ended).queue.begin_at == NOON + LONGEST_RETRY_DELAY


@pytest.mark.parametrize(
    ("news", "options", "again"),
    [
        (failed(), THREE, True),
        (signaled(9), THREE, True),
        (failed(0), THREE, False),
        (failed(), QueueOptions(), False),
        (signaled(2), THREE, False),
        (failed(130), THREE, False),
        (signaled(15, interrupted=True), THREE, False),
        (signaled(15, by_shutdown=True), THREE, False),
        (WorkerExited(Outcome.TIME_LIMIT, Exit(None, 15), NOON), THREE, False),
        (WorkerExited(Outcome.OVER_LEASE, Exit(1), NOON), THREE, False),
        (WorkerExited(Outcome.LOST, None, NOON, "the machine was restarted"), THREE, False),
        (failed(75), replace(THREE, retry_on=(75, 137)), True),
        (signaled(9), replace(THREE, retry_on=(75, 137)), True),
        (failed(1), replace(THREE, retry_on=(75, 137)), False),
        (failed(130), replace(THREE, retry_on=(130,)), True),
    ],
)
def test_only_failures_of_the_job_itself_are_tried_again(
    news: WorkerExited, options: QueueOptions, again: bool
) -> None:
    store = MemoryStore()
    ended = jobs.note_exited(store, running(store, options).id, news)
    assert (ended.usage.retried_as is not None) == again, ended.detail


def test_a_refusal_of_strict_is_tried_again_only_if_its_code_is_named() -> None:
    store = MemoryStore()
    named = replace(THREE, retry_on=(97,))
    for strict, options, again in ((True, THREE, 0), (True, named, 1), (False, THREE, 1)):
        job = running(store, options, strict=strict)
        ended = jobs.note_exited(store, job.id, failed(97))
        assert (ended.usage.retried_as is not None) == again


def test_a_job_that_was_cancelled_as_it_failed_is_not_tried_again() -> None:
    store = MemoryStore()
    job = running(store)
    jobs.cancel(store, job.id, "alice", FakeClock())
    assert jobs.note_exited(store, job.id, failed()).usage.retried_as is None


def test_failures_of_the_machine_and_of_the_job_are_counted_apart() -> None:
    store = MemoryStore()
    job = running(store, replace(THREE, requeue=True))
    lost = WorkerExited(Outcome.LOST, None, NOON, "the machine was restarted")
    for news in (lost, failed(), lost, failed(), lost):
        job = started(store, next_try(store, jobs.note_exited(store, job.id, news)))
    assert (job.queue.retried, job.queue.requeued) == (2, 3)
    # Three failures of the machine in a row, whatever the job itself did between them.
    assert jobs.note_exited(store, job.id, lost).usage.retried_as is None


def test_a_job_that_failed_just_before_it_made_way_is_tried_again() -> None:
    store = MemoryStore()
    job = running(store)
    jobs.revoke(store, job.id, Outcome.PREEMPTED, "it made way for job 9", FakeClock())
    new = next_try(store, jobs.note_exited(store, job.id, failed()))
    assert (new.queue.retried, new.queue.requeued) == (1, 0)


@pytest.mark.parametrize(("factor", "again"), [(None, True), (Fraction(2), False)])
def test_an_end_for_lack_of_gpu_memory_is_left_to_its_own_option(
    factor: Fraction | None, again: bool
) -> None:
    def out_of_memory(tx: Transaction, before: Job, ended: Job) -> Job:
        usage = replace(ended.usage, out_of_memory=True, retry_factor=factor)
        return replace(ended, usage=usage, detail=with_hint("it ran out", "use --mem 4G"))

    store = MemoryStore()
    ended = jobs.note_exited(store, running(store).id, failed(), out_of_memory)
    assert (ended.usage.retried_as is not None) == again
    said = "it ran out; job 2 is try 2 of 4 in 10s" if again else "it ran out"
    assert ended.detail == with_hint(said, "use --mem 4G")


def test_exit_codes_are_read_and_checked() -> None:
    assert exit_codes(["75,137", "75", 3]) == [75, 137, 3]
    for wrong in ("x", "75,", "-1", "1.5"):
        with pytest.raises(BadValue):
            exit_codes([wrong])
    for asked in (
        QueueRequest(retries=101),
        QueueRequest(retries=-1),
        QueueRequest(retries=1, retry_on=[0]),
        QueueRequest(retries=1, retry_on=[256]),
        QueueRequest(retries=1, retry_delay=3601),
    ):
        with pytest.raises(BadValue):
            queue_options_of(asked, is_admin=True)
    for asked in (QueueRequest(retry_on=[75]), QueueRequest(retry_delay=5)):
        with pytest.raises(BadValue) as refused:
            queue_options_of(asked, is_admin=False)
        assert mentions(refused.value.hint, "--retries")
    options = queue_options_of(
        QueueRequest(retries=2, retry_on=[75], retry_delay=0), is_admin=False
    )
    assert (options.retries, options.retry_on, options.retry_delay) == (2, (75,), timedelta(0))
