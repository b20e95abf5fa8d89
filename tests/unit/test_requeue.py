"""Jobs that are queued again: what continues, and what only ends."""

import asyncio
from dataclasses import replace

import pytest

from fakes import (
    NOON,
    FakeClock,
    FakeFinder,
    FakeGpus,
    G,
    MemoryStore,
    granted_job,
    hold_order,
    kept,
    order,
    reading,
    started,
)
from gpulease.domain.gpu import Fault, GpuUuid, JobId
from gpulease.domain.health import GpuEvent
from gpulease.domain.job import Exit, Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.queue_options import ArrayElement, Priority, QueueOptions
from gpulease.errors import NoSuchJob, WrongState
from gpulease.service import jobs
from gpulease.service.job_accounting import JobAccounting
from gpulease.service.observation import GpuObserver
from gpulease.service.ports import Event, Policy, Submission, WorkerExited
from gpulease.service.requeue import MOST_FAILURES

GPU = GpuUuid("GPU-a")
OLD = JobId(1)
LOST = WorkerExited(Outcome.LOST, None, NOON, "the machine was restarted")
AGAIN = QueueOptions(requeue=True)


def running(
    store: MemoryStore, options: QueueOptions = AGAIN, submission: Submission | None = None
) -> Job:
    """Return a job that was granted and started."""
    with store.write() as tx:
        job = tx.add(replace(submission or order(), queue=options), NOON)
    return started(store, job)


def continued(store: MemoryStore, job: Job) -> Job:
    return kept(store, job.usage.retried_as)


def test_a_job_that_the_machine_lost_is_queued_again_with_all_that_it_had() -> None:
    store = MemoryStore()
    options = QueueOptions(
        requeue=True,
        priority=Priority.LOW,
        nice=5,
        array=ArrayElement(JobId(17), 3),
        aging_since_at=NOON,
    )
    old = running(store, options)

    ended = jobs.note_exited(store, old.id, LOST)

    new = continued(store, ended)
    assert (ended.state, ended.outcome) == (State.ENDED, Outcome.LOST)
    assert ended.detail == "the machine was restarted; requeued as job 2"
    assert (new.state, new.label, new.usage.retry_of) == (State.QUEUED, "17_3", old.id)
    assert new.queue == replace(options, requeued=1)
    assert (new.claim, new.name, new.owner) == (old.claim, old.name, old.owner)
    assert store.invocation(new.id) == store.invocation(old.id)


def test_a_job_without_requeue_is_not_queued_again_when_the_machine_lost_it() -> None:
    store = MemoryStore()
    job = running(store, QueueOptions())
    assert jobs.note_exited(store, job.id, LOST).usage.retried_as is None


def test_a_job_that_had_done_its_work_is_not_repeated_for_its_leftover_processes() -> None:
    store = MemoryStore()
    job = running(store)
    with store.write() as tx:
        tx.save(replace(job, exit=Exit(0), main_exited_at=NOON), Event(NOON, "main_exited"))
    assert jobs.note_exited(store, OLD, LOST).usage.retried_as is None


@pytest.mark.parametrize("exit_", [Exit(0), Exit(None, 15)])
def test_a_job_that_a_shutdown_ended_is_queued_again(exit_: Exit) -> None:
    """Exit status 0 is that of a program that saves its work at SIGTERM."""
    store = MemoryStore()
    job = running(store)
    outcome = Outcome.EXITED if exit_.code == 0 else Outcome.SIGNALED
    ended = jobs.note_exited(store, job.id, WorkerExited(outcome, exit_, NOON, by_shutdown=True))
    assert (ended.outcome, ended.exit) == (outcome, exit_)
    assert ended.detail == "the machine was shut down; requeued as job 2"


@pytest.mark.parametrize("news", [Exit(0), Exit(1), Exit(None, 9)])
def test_a_job_that_ends_by_itself_is_not_queued_again(news: Exit) -> None:
    store = MemoryStore()
    job = running(store)
    ended = jobs.note_exited(store, job.id, WorkerExited(Outcome.EXITED, news, NOON))
    assert ended.usage.retried_as is None


def test_the_same_end_reported_twice_queues_one_job() -> None:
    store = MemoryStore()
    job = running(store)
    for _ in range(2):
        jobs.note_exited(store, job.id, LOST)
    assert [each.id for each in store.live()] == [JobId(2)]


def test_a_job_under_which_the_machine_fails_again_and_again_is_not_queued_for_ever() -> None:
    store = MemoryStore()
    job = running(store)
    for _ in range(MOST_FAILURES):
        job = started(store, continued(store, jobs.note_exited(store, job.id, LOST)))
    ended = jobs.note_exited(store, job.id, LOST)
    assert ended.usage.retried_as is None
    assert "not requeued: the machine failed 4 times in a row" in str(ended.detail)


def test_making_way_does_not_count_as_a_failure_of_the_machine() -> None:
    store = MemoryStore()
    job = running(store)
    for _ in range(MOST_FAILURES):
        job = started(store, continued(store, jobs.note_exited(store, job.id, LOST)))
    jobs.revoke(store, job.id, Outcome.PREEMPTED, "it made way for job 9", FakeClock())
    job = started(store, continued(store, jobs.note_exited(store, job.id, LOST)))
    assert jobs.note_exited(store, job.id, LOST).usage.retried_as is not None


@pytest.mark.parametrize("outcome", [Outcome.PREEMPTED, Outcome.LOST])
def test_a_job_that_made_way_is_queued_again_however_its_end_was_seen(outcome: Outcome) -> None:
    store = MemoryStore()
    job = running(store, QueueOptions(preemptible=True))
    jobs.revoke(store, job.id, Outcome.PREEMPTED, "it made way for job 9", FakeClock())
    assert [each.id for each in store.live()] == [job.id]  # not before its memory is free

    ended = jobs.note_exited(store, job.id, WorkerExited(outcome, Exit(0), NOON))

    assert (ended.outcome, continued(store, ended).state) == (Outcome.PREEMPTED, State.QUEUED)
    assert ended.detail == "it made way for job 9; requeued as job 2"


def test_a_job_that_finished_just_before_it_made_way_is_done() -> None:
    store = MemoryStore()
    job = running(store, QueueOptions(preemptible=True))
    jobs.revoke(store, job.id, Outcome.PREEMPTED, "it made way for job 9", FakeClock())
    ended = jobs.note_exited(store, job.id, WorkerExited(Outcome.EXITED, Exit(0), NOON))
    assert (ended.outcome, ended.usage.retried_as) == (Outcome.EXITED, None)


def test_a_job_that_its_shim_stopped_for_another_is_queued_again_by_the_next_daemon() -> None:
    """The database could not be written when it was revoked: only its record says why."""
    store = MemoryStore()
    job = running(store, QueueOptions(preemptible=True))
    ended = jobs.note_exited(store, job.id, WorkerExited(Outcome.PREEMPTED, Exit(0), NOON))
    assert continued(store, ended).queue.requeued == 1


def test_a_cancelled_job_is_not_queued_again_even_if_it_was_making_way() -> None:
    store = MemoryStore()
    job = running(store, QueueOptions(preemptible=True))
    jobs.revoke(store, job.id, Outcome.PREEMPTED, "it made way for job 9", FakeClock())
    jobs.cancel(store, job.id, "alice", FakeClock())
    ended = jobs.note_exited(store, job.id, WorkerExited(Outcome.PREEMPTED, Exit(0), NOON))
    assert (ended.outcome, ended.usage.retried_as) == (Outcome.CANCELLED, None)
    assert ended.detail == "cancelled by alice"


def test_a_job_whose_command_is_lost_ends_all_the_same() -> None:
    class Damaged(MemoryStore):
        def invocation(self, job: JobId) -> object:  # type: ignore[override]
            raise NoSuchJob(f"cannot start job {job} again: it has ended")

    store = Damaged()
    ended = jobs.note_exited(store, running(store).id, LOST)
    assert ended.state is State.ENDED
    assert "its command was lost" in str(ended.detail)


# The verb.


def test_requeue_stops_a_running_job_and_queues_it_at_its_end() -> None:
    store = MemoryStore()
    job = running(store, QueueOptions())
    stopping = jobs.requeue(store, job.id, "alice", FakeClock())
    assert (stopping.state, stopping.outcome) == (State.RELEASING, Outcome.REQUEUED)
    assert jobs.requeue(store, job.id, "alice", FakeClock()) == stopping
    ended = jobs.note_exited(store, job.id, WorkerExited(Outcome.REQUEUED, Exit(0), NOON))
    assert ended.detail == "stopped by alice; requeued as job 2"


def test_a_granted_job_that_never_started_is_queued_again() -> None:
    store = MemoryStore()
    with store.write() as tx:
        tx.save(granted_job(tx.add(order(), NOON)), Event(NOON, "grant"))
    jobs.requeue(store, OLD, "alice", FakeClock())
    why = WrongState("cancelled before its worker was started")
    ended = jobs.note_launch_failed(store, OLD, why, FakeClock())
    assert continued(store, ended).state is State.QUEUED


def test_what_cannot_be_requeued_is_refused_with_a_reason() -> None:
    store = MemoryStore()
    with store.write() as tx:
        queued = tx.add(order(), NOON)
    hold = running(store, QueueOptions(), hold_order())
    stopping = jobs.cancel(store, running(store).id, "alice", FakeClock())
    done = WorkerExited(Outcome.EXITED, Exit(0), NOON)
    ended = jobs.note_exited(store, running(store).id, done)
    for job, why in (
        (queued, "it waits already"),
        (hold, "it is a hold"),
        (stopping, "it is being stopped"),
        (ended, "it has ended"),
    ):
        with pytest.raises(WrongState, match=why):
            jobs.requeue(store, job.id, "alice", FakeClock())


def test_cancel_of_a_job_that_is_continued_names_the_last_attempt() -> None:
    store = MemoryStore()
    first = jobs.note_exited(store, running(store).id, LOST)
    second = jobs.note_exited(store, started(store, continued(store, first)).id, LOST)
    with pytest.raises(WrongState) as refused:
        jobs.cancel(store, first.id, "alice", FakeClock())
    assert refused.value.hint == "gpulease cancel 3"
    jobs.cancel(store, continued(store, second).id, "alice", FakeClock())
    with pytest.raises(WrongState, match="see gpulease show 1"):
        jobs.cancel(store, first.id, "alice", FakeClock())


# A GPU that fails under a job.


def ends_on(gpus: FakeGpus, store: MemoryStore, exit_: Exit) -> Job:
    """Let a job end on these GPUs, and return it."""

    async def in_thread(call):  # type: ignore[no-untyped-def]
        return call()

    observer = GpuObserver(store, gpus, FakeFinder(), FakeClock(), in_thread)

    async def no_output(job: JobId) -> str:
        return ""

    async def end() -> Job:
        accounting = JobAccounting(
            store,
            observer,
            Policy,
            no_output,
            lambda job, gpu: 0,
            lambda job: False,
            lambda job: None,
            lambda job: job,
        )
        news = WorkerExited(Outcome.EXITED, exit_, NOON)
        return jobs.note_exited(store, OLD, news, await accounting.settle_exit(OLD, news))

    return asyncio.run(end())


def broken() -> FakeGpus:
    lost = reading("GPU-a", total=None, used=None, fault=Fault.LOST, processes=None)
    return FakeGpus({"GPU-a": 8 * G}, broken={"GPU-a": lost})


@pytest.mark.parametrize(
    ("gpus", "exit_", "options", "again"),
    [
        (broken(), Exit(1), AGAIN, True),
        (broken(), Exit(0), AGAIN, False),
        (broken(), Exit(1), QueueOptions(), False),
        (FakeGpus({"GPU-a": 8 * G}), Exit(1), AGAIN, False),
        (FakeGpus({}), Exit(None, 9), AGAIN, True),
    ],
)
def test_a_job_that_failed_on_a_gpu_that_failed_is_queued_again(
    gpus: FakeGpus, exit_: Exit, options: QueueOptions, again: bool
) -> None:
    store = MemoryStore()
    running(store, options)
    ended = ends_on(gpus, store, exit_)
    assert (ended.usage.retried_as is not None) == again
    assert ended.exit == exit_
    if again:
        assert "failed; requeued as job 2" in str(ended.detail)


@pytest.mark.parametrize(
    ("kind", "again"), [("xid 79", True), ("xid 48", True), ("xid 13", False), ("back", False)]
)
def test_the_history_of_a_gpu_says_whether_it_failed_under_a_job(kind: str, again: bool) -> None:
    store = MemoryStore()
    running(store)
    store.noted.append(GpuEvent(GPU, NOON, kind, kind))
    ended = ends_on(FakeGpus({"GPU-a": 8 * G}), store, Exit(1))
    assert (ended.usage.retried_as is not None) == again
