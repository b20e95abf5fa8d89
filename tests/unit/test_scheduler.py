"""The loop that grants, and the life of a job from its grant to its end."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, get_type_hints

import pytest

from fakes import (
    ALICE,
    BOB,
    NOON,
    FakeClock,
    FakeFinder,
    FakeGpus,
    FakeLauncher,
    G,
    MemoryStore,
    hold_order,
    kept,
    order,
    waits,
)
from goldens import mentions
from gpulease.domain.explain import Explanations
from gpulease.domain.forecast import Start
from gpulease.domain.gpu import GpuReading, JobId
from gpulease.domain.job import Exit, Job, Outcome
from gpulease.domain.lease import State
from gpulease.domain.placement import Placement
from gpulease.domain.queue_options import QueueOptions
from gpulease.domain.snapshot import ledgers
from gpulease.errors import CommandNotFound, LaunchDeferred, NoRoomNow, RecordUnwritable
from gpulease.service.drains import Pauses
from gpulease.service.job_list import JobQuery
from gpulease.service.job_supervisor import LAUNCHES_AT_ONCE
from gpulease.service.jobs import Settle, take_back_grants
from gpulease.service.observation import GpuObserver, snapshot
from gpulease.service.ports import MainExited, Policy, WorkerExited, WorkerStarted
from gpulease.service.scheduler import Scheduler, reconcile

T = TypeVar("T")
_TURNS = 200
SPARE = QueueOptions(preemptible=True)


async def at_once(call: Callable[[], T]) -> T:
    return call()


async def in_a_moment(call: Callable[[], T]) -> T:
    await asyncio.sleep(0)
    return call()


async def as_it_is(job: JobId, news: WorkerExited) -> Settle:
    return lambda _, before, ended: ended


class World:
    """A scheduler among fakes."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.gpus = FakeGpus({"GPU-a": 8 * G})
        self.launcher = FakeLauncher()
        self.clock = FakeClock()
        self.finder = FakeFinder()
        self.policy = Policy()
        self.why_not: str | None = None
        """Why no job can be started on the machine."""
        self.writes = 0
        """Calls of the writer."""
        self.scheduler = self.new_scheduler()

    async def obstacle(self) -> str | None:
        return self.why_not

    def new_scheduler(self) -> Scheduler:
        def writing(call: Callable[[], T]) -> Awaitable[T]:
            self.writes += 1
            return at_once(call)

        def looking(call: Callable[[], T]) -> Awaitable[T]:
            return in_a_moment(call)

        observer = GpuObserver(self.store, self.gpus, self.finder, self.clock, looking)
        return Scheduler(
            self.store, observer, lambda _: self.launcher, self.clock, lambda: self.policy,
            in_writer=writing, settle_exit=as_it_is,
            obstacle=self.obstacle,
        )  # fmt: skip

    async def submit(self, memory: int = 6 * G, **fields: Any) -> JobId:
        return (await self.scheduler.submit(order(memory, **fields))).id

    async def settle(self) -> None:
        """Let everything happen that can happen now."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    def job(self, job: JobId) -> Job:
        return kept(self.store, job)

    def state(self, job: JobId) -> State:
        return self.job(job).state


W = TypeVar("W", bound=World)


def play(scenario: Callable[[W], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Make a test of a scenario: its world is made, and the loop runs beside it."""
    kind: Callable[[], W] = next(iter(get_type_hints(scenario).values()))

    async def whole() -> None:
        world = kind()
        granting = asyncio.create_task(world.scheduler.run())
        try:
            await scenario(world)
        finally:
            granting.cancel()
            await world.scheduler.supervisor.stop()

    return lambda: asyncio.run(whole())


@play
async def test_a_job_is_granted_launched_and_followed_to_its_end(world: World) -> None:
    job = await world.submit()
    await world.settle()
    assert world.launcher.launched == [job]
    assert world.state(job) is State.ACTIVE
    world.launcher.exits(job, 7)
    await world.settle()
    ended = world.job(job)
    assert (ended.state, ended.exit and ended.exit.code) == (State.ENDED, 7)
    assert ended.leases[0].released_at == NOON


@play
async def test_after_an_expensive_pass_the_next_one_decides_about_all_changes_since(
    world: World,
) -> None:
    spent = iter(range(1000))
    world.clock.thread_s = lambda: next(spent) / 10  # type: ignore[method-assign]
    world.gpus.sizes |= {"GPU-b": 8 * G}
    first = await world.submit()
    await world.settle()
    assert world.state(first) is State.ACTIVE, "an idle machine grants at once"
    writes = world.writes
    second, third = await world.submit(), await world.submit()
    await world.settle()
    assert world.state(second) is State.QUEUED
    assert world.writes == writes + 2, "the submissions"
    async with asyncio.timeout(5):
        while world.state(second) is not State.ACTIVE:
            await asyncio.sleep(0.01)
    assert world.state(third) is State.QUEUED


@play
async def test_an_owner_is_told_in_the_record_and_in_the_output(world: World) -> None:
    job, waiting = await world.submit(), await world.submit()
    await world.settle()
    await world.scheduler.notify_owner(job, "over\x1b[2J its\nlease")
    await world.scheduler.notify_owner(waiting, "not yet")
    await world.settle()

    assert world.launcher.notices == [(job, "over?[2J its lease")]
    assert [each.detail for each in world.store.events(waiting) if each.kind == "notice"] == [
        "not yet"
    ]

    world.launcher.exits(job)
    await world.settle()
    await world.scheduler.notify_owner(job, "it took less")
    assert world.store.events(job)[-1].detail == "it took less"
    assert len(world.launcher.notices) == 1, "nobody is there to write it"


@play
async def test_a_failed_launch_gives_the_memory_back_and_says_why(world: World) -> None:
    world.launcher.refuse[JobId(1)] = CommandNotFound("cannot run x: no such file", "look")
    first, second = await world.submit(), await world.submit()
    await world.settle()
    failed = world.job(first)
    assert (failed.state, failed.outcome) == (State.ENDED, Outcome.LAUNCH_FAILED)
    assert mentions(failed.detail, "cannot run x: no such file", "look")
    assert failed.exit is not None
    assert failed.exit.code == 127
    assert world.launcher.launched == [second]


@play
async def test_memory_of_a_cancelled_job_is_free_only_when_its_worker_is_gone(world: World) -> None:
    first, second = await world.submit(), await world.submit()
    await world.settle()
    await world.scheduler.cancel(first, "alice")
    await world.settle()
    assert world.launcher.stopped == [first]
    assert (world.state(first), world.state(second)) == (State.RELEASING, State.QUEUED)
    world.launcher.exits(first, outcome=Outcome.CANCELLED)
    await world.settle()
    assert (world.state(first), world.state(second)) == (State.ENDED, State.ACTIVE)


@play
async def test_after_a_restart_jobs_are_followed_and_not_launched_again(world: World) -> None:
    job = await world.submit()
    await world.settle()
    await world.scheduler.supervisor.stop()
    world.scheduler = world.new_scheduler()
    assert world.scheduler.supervisor.recover() == 1
    await world.settle()
    assert world.launcher.launched == [job]
    world.launcher.exits(job, 3)
    await world.settle()
    assert world.state(job) is State.ENDED


@play
async def test_a_job_granted_just_before_the_crash_is_launched_after_it(world: World) -> None:
    world.launcher.may_launch.clear()
    job = await world.submit()
    await world.settle()
    assert world.state(job) is State.GRANTED
    await world.scheduler.supervisor.stop()
    world.launcher.may_launch.set()
    world.scheduler = world.new_scheduler()
    world.scheduler.supervisor.recover()
    await world.settle()
    assert world.launcher.launched == [job]


@play
async def test_a_job_cancelled_while_it_was_being_launched_is_stopped_when_it_runs(
    world: World,
) -> None:
    world.launcher.may_launch.clear()
    job = await world.submit()
    await world.settle()
    await world.scheduler.cancel(job, "alice")
    assert world.state(job) is State.RELEASING
    world.launcher.may_launch.set()
    await world.settle()
    assert world.launcher.stopped == [job]


@play
async def test_only_a_range_that_was_shown_is_compared_with_the_start(world: World) -> None:
    later = NOON + timedelta(hours=2)
    ranges = {JobId(1): (NOON, NOON), JobId(2): (NOON, later)}
    jobs = [await world.submit(2 * G) for _ in ranges]
    seen = await world.scheduler.observer.observe()
    predicted = {
        job: Start(NOON, Placement(()), later, None, *ends) for job, ends in ranges.items()
    }
    reconcile(world.store, seen, world.policy, world.clock, predicted=predicted)
    kept = [(world.job(job).predicted_start_at, world.job(job).predicted_until_at) for job in jobs]
    assert kept == [(NOON, None), (NOON, later)]


async def many_starts(world: World) -> list[JobId]:
    """Submit twice as many jobs as may be launched at once; no launch ends."""
    for number in range(2 * LAUNCHES_AT_ONCE):
        world.gpus.sizes[f"GPU-{number}"] = 8 * G
    world.launcher.may_launch.clear()
    return [await world.submit() for _ in range(2 * LAUNCHES_AT_ONCE)]


@play
async def test_few_launches_are_in_flight_and_the_others_follow_in_their_order(
    world: World,
) -> None:
    jobs = await many_starts(world)
    await world.settle()
    assert {world.state(job) for job in jobs} == {State.GRANTED}
    assert world.launcher.begun == jobs[:LAUNCHES_AT_ONCE]
    cancelled = jobs[LAUNCHES_AT_ONCE]
    await world.scheduler.cancel(cancelled, "alice")
    world.launcher.may_launch.set()
    await world.settle()
    assert world.launcher.forbidden == [cancelled], "it was cancelled before its turn"
    assert world.launcher.launched == [job for job in jobs if job != cancelled]


@play
async def test_launches_that_hang_do_not_stop_those_of_others(world: World) -> None:
    world.scheduler.supervisor.launch_hangs_after_s = 0.0
    jobs = await many_starts(world)
    await world.settle()
    assert world.launcher.begun == jobs


async def cancelled_before_its_launch(world: World) -> JobId:
    """Return a job that was granted and then cancelled by a daemon that never launched it."""

    world.launcher.may_launch.clear()
    job = await world.submit()
    await world.settle()
    await world.scheduler.cancel(job, "alice")
    await world.scheduler.supervisor.stop()
    assert world.state(job) is State.RELEASING
    world.scheduler = world.new_scheduler()
    return job


@play
async def test_a_job_cancelled_before_its_launch_ends_when_no_launch_can_come_any_more(
    world: World,
) -> None:
    job = await cancelled_before_its_launch(world)
    world.scheduler.supervisor.recover()
    await world.settle()
    assert world.launcher.forbidden == [job]
    ended = world.job(job)
    assert (ended.state, ended.outcome) == (State.ENDED, Outcome.CANCELLED)


@play
async def test_a_launch_that_the_daemon_before_had_asked_for_is_followed_and_stopped(
    world: World,
) -> None:
    job = await cancelled_before_its_launch(world)

    async def too_late(_: object) -> bool:
        world.launcher.hears(job, WorkerStarted(100, 200, NOON))
        return False

    world.launcher.forbid = too_late  # type: ignore[method-assign,assignment]
    world.scheduler.supervisor.recover()
    await world.settle()
    assert world.launcher.stopped == [job]
    assert world.state(job) is State.RELEASING, "its memory is not free before it has gone"


@play
async def test_memory_that_came_free_is_not_granted_before_it_is_seen_to_be_free(
    world: World,
) -> None:
    first, second = await world.submit(), await world.submit()
    await world.settle()
    # The driver has not given the memory back yet when the process is gone.
    world.gpus.unmanaged["GPU-a"] = 6 * G
    world.launcher.exits(first)
    await world.settle()
    assert world.state(second) is State.QUEUED


@play
async def test_who_does_not_want_to_wait_is_refused_or_granted_never_left_waiting(
    world: World,
) -> None:
    job = await world.submit(wait_for=timedelta(0))
    await world.settle()
    assert world.state(job) is State.ACTIVE
    with pytest.raises(NoRoomNow) as refused:
        await world.submit(wait_for=timedelta(0))
    assert mentions(refused.value.message, "GPU 0", "2G")


@play
async def test_no_job_is_refused_for_memory_that_has_come_free_since_the_last_look(
    world: World,
) -> None:
    world.gpus.unmanaged["GPU-a"] = 8 * G
    await world.scheduler.observer.observe()
    world.gpus.unmanaged.clear()
    job = await world.submit(wait_for=timedelta(0))
    await world.settle()
    assert world.state(job) is State.ACTIVE


@play
async def test_who_waited_long_enough_gives_up(world: World) -> None:
    await world.submit()
    impatient = await world.submit(wait_for=timedelta(minutes=5))
    world.clock.forward(minutes=4)
    await world.scheduler.one_pass()
    assert world.state(impatient) is State.QUEUED
    world.clock.forward(minutes=1)
    await world.scheduler.one_pass()
    ended = world.job(impatient)
    assert ended.outcome is Outcome.GAVE_UP


@play
async def test_a_begin_time_comes_though_nothing_else_has_changed(world: World) -> None:
    options = QueueOptions(begin_at=NOON + timedelta(hours=1))
    job = (await world.scheduler.submit(replace(order(), queue=options))).id
    for state in (State.QUEUED, State.QUEUED, State.GRANTED):
        assert (await world.scheduler.one_pass()) and world.state(job) is state
        world.clock.forward(minutes=30)


@play
async def test_a_look_requests_a_pass_only_where_that_may_decide_otherwise(world: World) -> None:
    passes = 0

    async def looks() -> bool:
        """Look at the GPUs, and return whether a pass was made."""
        nonlocal passes
        seen = await world.scheduler.observer.observe()
        holding = world.store.holding()
        world.scheduler.look(ledgers(snapshot(holding, seen, world.policy, {}, seen.at)))
        await world.settle()
        before, passes = passes, sum(world.scheduler.passes.counts)
        return passes > before

    running, waiting = await world.submit(), await world.submit()
    world.finder.jobs[7] = running
    await world.settle()
    await looks()
    assert not await looks()
    world.gpus.processes["GPU-a"] = {7: 3 * G}
    assert not await looks(), "a job uses its lease"
    world.gpus.unmanaged["GPU-a"] = G
    assert await looks()
    assert not await looks()
    with world.store.write() as tx:
        tx.note_aging([waiting], NOON - timedelta(hours=1))
    assert await looks()
    assert not await looks()


@play
async def test_the_end_of_a_wait_is_not_missed(world: World) -> None:
    await world.submit()
    await world.submit(wait_for=timedelta(minutes=5))
    await world.settle()
    decided = await world.scheduler.one_pass()
    assert decided.wakes_at == NOON + timedelta(minutes=5)


@play
async def test_a_job_that_gave_up_says_what_blocked_it_until_then(world: World) -> None:
    held = replace(order(wait_for=timedelta(minutes=5)), queue=QueueOptions(held=True))
    job = await world.scheduler.submit(held)
    world.clock.forward(minutes=5)
    await world.scheduler.one_pass()
    ended = world.job(job.id)
    assert ended.outcome is Outcome.GAVE_UP
    assert mentions(ended.detail, "still held", "--wait")


@play
async def test_a_job_extended_while_it_was_being_launched_is_told_when_it_runs(
    world: World,
) -> None:
    world.launcher.may_launch.clear()
    job = await world.submit(time_limit=timedelta(hours=1))
    await world.settle()
    extending = asyncio.create_task(world.scheduler.extend(job, timedelta(hours=1), "alice"))
    await world.settle()
    assert world.launcher.told == []
    assert not extending.done(), "the promise is kept before it is given"
    world.launcher.may_launch.set()
    assert (await extending).claim.time_limit == timedelta(hours=2)
    await world.settle()
    assert world.launcher.told[-1] == (job, timedelta(hours=2))


@play
async def test_of_two_extensions_that_overtake_each_other_the_worker_keeps_the_latest(
    world: World,
) -> None:
    job = await world.submit(time_limit=timedelta(hours=1))
    await world.settle()
    first = world.launcher.may_tell[timedelta(hours=2)] = asyncio.Event()
    one = asyncio.create_task(world.scheduler.extend(job, timedelta(hours=1), "alice"))
    await world.settle()
    await world.scheduler.extend(job, timedelta(hours=1), "alice")
    assert not one.done(), "its worker has not been told yet"
    first.set()
    await one
    await world.settle()
    assert world.launcher.told[-1] == (job, timedelta(hours=3))


@play
async def test_more_time_for_the_first_in_line_reaches_the_plan(world: World) -> None:
    running = await world.submit(time_limit=timedelta(hours=1))
    waiting = await world.submit()
    await world.settle()

    def expected() -> object:
        assert world.scheduler.plan is not None
        return Explanations(world.scheduler.plan).starts[waiting].at

    await world.scheduler.one_pass()
    assert expected() == NOON + timedelta(hours=1)
    await world.scheduler.extend(running, timedelta(hours=2), "alice")
    await world.settle()
    assert expected() == NOON + timedelta(hours=3)


@play
async def test_a_lease_that_its_owner_cancels_is_released_and_by_anyone_else_cancelled(
    world: World,
) -> None:
    for by, outcome in (("alice", Outcome.RELEASED), ("uid 0", Outcome.CANCELLED)):
        job = (await world.scheduler.submit(hold_order(6 * G))).id
        await world.settle()
        await world.scheduler.cancel(job, by)
        await world.settle()
        assert world.launcher.stopped[-1] == job
        gone = WorkerExited(Outcome.RELEASED, None, NOON, "released")
        world.launcher.hears(job, gone)
        await world.settle()
        ended = world.job(job)
        assert (ended.state, ended.outcome) == (State.ENDED, outcome)
        assert mentions(ended.detail, outcome, by)


@play
async def test_a_lease_that_still_waits_is_cancelled_also_by_its_owner(world: World) -> None:
    await world.submit()
    job = (await world.scheduler.submit(hold_order(6 * G))).id
    await world.settle()
    ended = await world.scheduler.cancel(job, "alice")
    assert (ended.state, ended.outcome) == (State.ENDED, Outcome.CANCELLED)


@play
async def test_the_end_of_the_main_process_is_kept_once_and_the_memory_with_it(
    world: World,
) -> None:
    job = await world.submit()
    for _ in range(2):
        world.launcher.hears(job, MainExited(Exit(3), NOON))
    await world.settle()
    found = world.job(job)
    assert (found.state, found.exit, found.main_exited_at) == (State.ACTIVE, Exit(3), NOON)
    assert [event.kind for event in world.store.events(job)].count("main_exited") == 1


def test_the_loop_makes_a_pass_now_and_then_though_nobody_wakes_it() -> None:
    async def scenario() -> None:
        world, passes = World(), asyncio.Semaphore(0)
        granting = asyncio.create_task(world.scheduler.run(0.01, passes.release))
        async with asyncio.timeout(20):
            for _ in range(3):
                await passes.acquire()
        granting.cancel()

    asyncio.run(scenario())


def test_a_pass_that_failed_is_not_told_as_one() -> None:
    async def scenario() -> None:
        world, passed = World(), []
        world.gpus.read = None  # type: ignore[method-assign,assignment]
        with pytest.raises(TypeError):
            await world.scheduler.run(0.01, lambda: passed.append(1))
        assert passed == []

    asyncio.run(scenario())


@play
async def test_nothing_is_granted_beside_a_stranger_who_came_after_the_last_look(
    world: World,
) -> None:
    await world.scheduler.observer.observe()
    world.gpus.unmanaged["GPU-a"] = 7 * G
    jobs = [await world.submit(2 * G) for _ in range(2)]
    await world.settle()
    assert [world.state(job) for job in jobs] == [State.QUEUED] * 2
    assert world.launcher.launched == []

    world.gpus.unmanaged.clear()
    await world.scheduler.observer.observe()
    world.scheduler.wake()
    await world.settle()
    assert world.launcher.launched == jobs


@play
async def test_a_job_that_may_not_wait_gives_up_where_a_stranger_was_faster(world: World) -> None:
    job = await world.submit(2 * G, wait_for=timedelta(0))
    world.gpus.unmanaged["GPU-a"] = 7 * G
    await world.settle()
    ended = world.job(job)
    assert (ended.state, ended.outcome) == (State.ENDED, Outcome.GAVE_UP)


class CountedGpus(FakeGpus):
    """GPUs that remember how often they were read."""

    reads = 0

    def read(self) -> tuple[GpuReading, ...]:
        self.reads += 1
        return super().read()


def test_many_submissions_at_once_cost_few_looks() -> None:
    async def scenario() -> None:
        world = World()
        world.gpus = CountedGpus({f"GPU-{n}": 8 * G for n in range(100)})
        world.scheduler = world.new_scheduler()
        granting = asyncio.create_task(world.scheduler.run())
        await asyncio.gather(*(world.submit(G) for _ in range(200)))
        await world.settle()
        assert len(world.launcher.launched) == 200
        assert world.gpus.reads < 10

        reads = world.gpus.reads
        await asyncio.gather(*(world.submit(8 * G) for _ in range(200)))
        await world.settle()
        assert len(world.launcher.launched) == 200, "none of these fits"
        assert world.gpus.reads <= reads + 1, "and later passes without grants need no look"
        granting.cancel()
        await world.scheduler.supervisor.stop()

    asyncio.run(scenario())


@play
async def test_while_the_machine_shuts_down_a_grant_is_kept_and_nothing_more_is_granted(
    world: World,
) -> None:
    why = "cannot start jobs now: the machine is shutting down"
    world.launcher.refuse[JobId(1)] = LaunchDeferred(why)
    first = await world.submit(G)
    await world.settle()
    second = await world.submit(G)
    await world.settle()
    assert (world.state(first), world.state(second)) == (State.GRANTED, State.QUEUED)
    assert world.scheduler.plan is not None
    (find_obstacle,) = waits(world.scheduler.plan, second).refusal.obstacles
    assert find_obstacle.why == why

    # The shutdown was called off.
    world.launcher.refuse.clear()
    world.scheduler.supervisor.attend(first)
    await world.settle()
    assert (world.state(first), world.state(second)) == (State.ACTIVE, State.ACTIVE)


class FailsAfterCommit(MemoryStore):
    """Commits, and then fails as often as it is told, as if its file had been removed."""

    fails = 0

    @contextmanager
    def write(self) -> Iterator[MemoryStore]:
        with super().write():
            yield self
        granted = any(job.state is State.GRANTED for job in self.live())
        if granted and self.fails:
            self.fails -= 1
            raise RecordUnwritable("cannot write the record: it was removed")


def test_a_grant_whose_pass_failed_after_the_commit_is_launched_by_the_next_pass() -> None:
    async def scenario() -> None:
        world = World()
        world.store = FailsAfterCommit()
        world.store.fails = 1
        world.scheduler = world.new_scheduler()
        job = await world.submit()
        with pytest.raises(RecordUnwritable):
            await world.scheduler.one_pass()
        assert world.state(job) is State.GRANTED
        assert world.launcher.launched == []

        await world.scheduler.one_pass()
        await world.settle()

        assert world.launcher.launched == [job]
        assert world.state(job) is State.ACTIVE
        await world.scheduler.one_pass()
        await world.settle()
        assert world.launcher.launched == [job]
        await world.scheduler.supervisor.stop()

    asyncio.run(scenario())


@play
async def test_a_pass_does_not_attend_to_a_job_that_waits_for_its_next_try(world: World) -> None:
    world.scheduler.supervisor.try_again_after_s = 3600.0
    world.launcher.refuse[JobId(1)] = RecordUnwritable("the disk is full")
    job = await world.submit()
    await world.settle()
    world.launcher.refuse.clear()

    world.scheduler.wake()
    await world.settle()

    assert world.state(job) is State.GRANTED
    assert world.launcher.launched == []


@play
async def test_a_launch_that_is_deferred_is_tried_again(world: World) -> None:
    world.scheduler.supervisor.try_again_after_s = 0.0
    world.launcher.refuse[JobId(1)] = LaunchDeferred("not now")
    job = await world.submit()
    await world.settle()
    world.launcher.refuse.clear()
    async with asyncio.timeout(20):
        while world.state(job) is not State.ACTIVE:
            await asyncio.sleep(0.01)


@play
async def test_a_daemon_that_leaves_launches_nothing_more(world: World) -> None:
    world.launcher.may_launch.clear()
    job = await world.submit(G)
    await world.settle()
    await world.scheduler.supervisor.stop()
    world.launcher.may_launch.set()
    later = await world.submit(G)
    await world.settle()
    assert world.launcher.launched == []
    assert (world.state(job), world.state(later)) == (State.GRANTED, State.GRANTED)


@play
async def test_what_was_granted_before_a_reboot_and_not_launched_is_queued_again(
    world: World,
) -> None:
    running = await world.submit(G)
    await world.settle()
    world.launcher.may_launch.clear()
    granted = await world.submit(G)
    await world.settle()
    assert (world.state(running), world.state(granted)) == (State.ACTIVE, State.GRANTED)

    took = take_back_grants(world.store, world.launcher.was_launched, world.clock)
    assert took == 1
    assert (world.state(running), world.state(granted)) == (State.ACTIVE, State.QUEUED)
    job = world.job(granted)
    assert (job.leases, job.granted_at) == ((), None)
    assert world.store.events(granted)[-1].kind == "launch_deferred"


@play
async def test_nothing_is_granted_while_no_job_can_be_started_and_the_reason_is_shown(
    world: World,
) -> None:
    world.why_not = "CUDA needs /dev/nvidia-uvm, which is missing"
    job = await world.submit()
    await world.settle()
    assert world.state(job) is State.QUEUED
    assert world.scheduler.plan is not None
    (hindrance,) = waits(world.scheduler.plan, job).refusal.obstacles
    assert hindrance.why == world.scheduler.closed == world.why_not

    world.why_not = None
    world.scheduler.wake()
    await world.settle()
    assert world.state(job) is State.ACTIVE
    assert world.scheduler.closed is None


def continuation(world: World, job: JobId) -> JobId:
    ended = world.job(job)
    assert ended.usage.retried_as is not None, ended.detail
    return ended.usage.retried_as


@play
async def test_a_preemptible_job_makes_way_and_runs_again_when_the_memory_is_free(
    world: World,
) -> None:
    spare = (await world.scheduler.submit(replace(order(6 * G), queue=SPARE))).id
    await world.settle()
    assert world.state(spare) is State.ACTIVE
    job = await world.submit(4 * G)
    await world.settle()
    assert (world.state(spare), world.state(job)) == (State.RELEASING, State.QUEUED)
    assert world.launcher.reasons == ["preempted"]
    notice = f"job {spare} makes way for job {job}, and is queued again"
    assert world.launcher.notices == [(spare, notice)]

    small = await world.submit(3 * G)  # would fit beside it, and so delay the job
    world.launcher.exits(spare, outcome=Outcome.PREEMPTED)
    await world.settle()
    again = continuation(world, spare)
    assert [world.state(each) for each in (job, small, again)] == [
        State.ACTIVE, State.ACTIVE, State.QUEUED
    ]  # fmt: skip
    world.launcher.exits(job)
    world.launcher.exits(small)
    await world.settle()
    assert world.state(again) is State.ACTIVE
    assert world.launcher.launched == [spare, job, small, again]


@play
async def test_a_preemptible_job_makes_way_within_five_minutes_whatever_grace_it_asked_for(
    world: World,
) -> None:
    for preempted_in_launch in (False, True):
        if preempted_in_launch:
            world.launcher.may_launch.clear()
        plain = order(6 * G)
        asks = replace(plain.invocation, grace=timedelta(hours=1))
        await world.scheduler.submit(replace(plain, queue=SPARE, invocation=asks))
        await world.settle()
        job = await world.submit(4 * G)
        await world.settle()
        going = world.job(JobId(job - 1))
        assert world.scheduler.grace(going) == timedelta(minutes=5)
        world.launcher.may_launch.set()
        await world.settle()
        world.launcher.exits(job - 1, outcome=Outcome.PREEMPTED)
        await world.scheduler.cancel(JobId(job), "alice")
        await world.settle()
        again = continuation(world, JobId(job - 1))
        await world.scheduler.cancel(again, "alice")
        world.launcher.exits(again)
        await world.settle()
    graces = zip(world.launcher.reasons, world.launcher.graces, strict=True)
    shortened = [grace for reason, grace in graces if reason == "preempted"]
    assert len(shortened) >= 2
    assert set(shortened) == {timedelta(minutes=5)}


@play
async def test_a_job_that_ended_while_no_daemon_ran_is_queued_again_once(world: World) -> None:
    """The daemon is killed when it has revoked the job, and finds its end at the next start."""

    spare = (await world.scheduler.submit(replace(order(6 * G), queue=SPARE))).id
    await world.settle()
    await world.submit(4 * G)
    await world.settle()
    await world.scheduler.supervisor.stop()
    world.launcher.exits(spare, outcome=Outcome.PREEMPTED)
    for _ in range(2):
        world.scheduler = world.new_scheduler()
        world.scheduler.supervisor.recover()
        await world.settle()
        await world.scheduler.supervisor.stop()
    jobs = world.store.jobs(JobQuery(ended=True)).jobs
    assert [job.usage.retry_of for job in jobs if job.usage.retry_of] == [spare]


@play
async def test_a_paused_queue_starts_nothing_while_running_jobs_continue(world: World) -> None:
    pauses = Pauses(world.store, world.clock, at_once, world.scheduler.wake)
    running = await world.submit()
    await world.settle()
    pause, changed = await pauses.pause("root", "new driver")
    waiting = await world.submit(G)
    await world.settle()
    assert changed
    assert (world.state(running), world.state(waiting)) == (State.ACTIVE, State.QUEUED)
    assert world.scheduler.closed == str(pause)
    with pytest.raises(NoRoomNow) as refused:
        await world.submit(G, wait_for=timedelta(0))
    assert mentions(refused.value.message, "root", "new driver")
    assert await pauses.pause("eve", "") == (pause, False)

    world.scheduler = world.new_scheduler()
    await world.scheduler.one_pass()
    assert world.scheduler.closed == str(pause), "it survives a restart"
    assert world.state(waiting) is State.QUEUED

    assert await pauses.unpause()
    assert not await pauses.unpause()
    await world.scheduler.one_pass()
    await world.settle()
    assert world.state(waiting) is State.ACTIVE
    assert world.scheduler.closed is None
    await world.scheduler.supervisor.stop()


@play
async def test_ten_thousand_jobs_are_cancelled_in_one_transaction_and_none_starts_meanwhile(
    world: World,
) -> None:
    running = [await world.submit(4 * G) for _ in range(2)]
    await world.settle()
    others = await world.submit(owner=BOB)
    with world.store.write() as tx:
        waiting = [tx.add(order(G), NOON).id for _ in range(10_000)]
    before = world.store.writes

    done = await world.scheduler.cancel_all(
        lambda job: job.owner == ALICE, lambda job: job.owner.user
    )
    assert world.store.writes == before + 1
    assert len(done) == len(running) + len(waiting)
    await world.settle()
    assert world.launcher.stopped == running
    for job in running:
        world.launcher.exits(job, outcome=Outcome.CANCELLED)
    await world.settle()
    assert world.launcher.launched == [*running, others]
    assert {world.state(job) for job in waiting} == {State.ENDED}


@play
async def test_a_job_that_is_requeued_during_its_launch_is_stopped_when_it_has_started(
    world: World,
) -> None:
    world.launcher.may_launch.clear()
    job = await world.submit()
    await world.settle()
    await world.scheduler.requeue(job, "alice")
    assert world.launcher.stopped == []
    world.launcher.may_launch.set()
    await world.settle()
    assert world.launcher.reasons == ["requeued"]


@play
async def test_workers_are_stopped_together_and_not_all_at_once(world: World) -> None:
    world.gpus.sizes = {f"GPU-{number}": 8 * G for number in range(40)}
    running = [await world.submit(8 * G) for _ in range(40)]
    await world.settle()
    stops = world.launcher.may_stop
    stops.clear()
    await world.scheduler.cancel_all(lambda _: True, lambda _: "root")
    await world.settle()
    assert 1 < len(world.launcher.stopped) < len(running)
    stops.set()
    await world.settle()
    assert sorted(world.launcher.stopped) == running
