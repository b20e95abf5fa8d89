"""What the watch does at each look: among fakes, so that looks can be counted."""

import contextlib
from dataclasses import replace
from datetime import timedelta

import pytest

from fakes import NOON, G, hold_order
from goldens import mentions, sentence
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId, ProcessReading
from gpulease.domain.idle import IdlePolicy, Release
from gpulease.domain.job import Outcome
from gpulease.domain.lease import State
from gpulease.domain.overuse import Consequence, OverusePolicy
from gpulease.errors import RecordUnwritable
from gpulease.service.enforcement import EnforcementLoop
from gpulease.service.idleness import IdleWatch
from gpulease.service.jobs import revoke
from gpulease.service.overuse import OveruseWatch
from gpulease.service.ports import Policy, WorkerStarted

from .test_scheduler import World, at_once, play

GPU = GpuUuid("GPU-a")
GRACE = timedelta(seconds=40)


class Watched(World):
    """A world with a watch, whose time passes a second at each look."""

    def __init__(self) -> None:
        super().__init__()
        self.overuse = OverusePolicy(Consequence.STOP, G // 4, GRACE)
        self.idle = IdlePolicy()
        self.start_watch()

    def start_watch(self) -> None:
        """As after a restart of the daemon: with nothing but the record."""
        self.went_over: list[JobId] = []
        self.beside = 0
        self.watch = OveruseWatch(
            lambda _: self.overuse,
            lambda job: self.went_over.append(job.id),
            lambda *_: self.beside,
        )
        self.rests = IdleWatch(lambda _: self.idle)
        self.loop = EnforcementLoop(self.scheduler, self.watch, self.rests, self.clock, at_once)

    def hold(self, job: JobId, memory: int | None) -> None:
        """Let the processes of a job hold so many bytes; None: nobody can tell."""
        self.gpus.processes["GPU-a"] = {100 + job: memory}  # type: ignore[dict-item]
        self.finder.jobs[100 + job] = job

    async def look(self, times: int = 1, **span: float) -> None:
        for _ in range(times):
            self.clock.forward(**(span or {"seconds": 1}))
            seen = await self.scheduler.observer.observe()
            await self.loop.check_overuse(seen)
            await self.loop.check_idleness(seen)
            await self.loop.check_shortfalls(seen)
        await self.settle()

    def told(self, job: JobId) -> list[str]:
        return [text for of, text in self.launcher.notices if of == job]

    def over_for(self, job: JobId) -> timedelta | None:
        return self.job(job).leases[0].over_for


async def running(world: Watched, memory: int = 2 * G) -> JobId:
    job = await world.submit(memory)
    await world.settle()
    assert world.state(job) is State.ACTIVE
    return job


@play
async def test_the_first_look_after_the_crossing_tells_the_owner(world: Watched) -> None:
    job = await running(world)
    world.hold(job, 2 * G + G // 4)
    await world.look(3)
    assert world.told(job) == [], "within the tolerance"

    world.hold(job, 3 * G)
    await world.look()
    (told,) = world.told(job)
    sentence("over-lease", told)
    await world.look(3)
    assert world.went_over == [job], "counted once"
    world.hold(job, G)
    await world.look(60)
    world.hold(job, 3 * G)
    await world.look()
    assert world.went_over == [job, job]


@play
async def test_what_a_framework_needs_beside_its_pool_is_told_and_stops_nothing(
    world: Watched,
) -> None:
    job = await running(world)
    world.hold(job, 3 * G)
    world.beside = G
    await world.look(50)
    (told,) = world.told(job)
    sentence("over-lease-overhead", told)
    assert world.over_for(job) is None, "a daemon that comes back does not count it"

    world.hold(job, 4 * G)
    await world.look(10)
    (warned,) = world.told(job)[1:]
    assert "stopped in" in warned
    world.beside = 2 * G
    await world.look()
    sentence("over-lease-overhead-after-a-notice", world.told(job)[2])


def test_nobody_is_told_to_ask_for_more_than_a_gpu_has() -> None:
    async def scenario(world: Watched) -> None:
        job = await running(world, 7 * G)
        world.hold(job, 8 * G)
        await world.look()
        assert "--mem 8G" in world.told(job)[0]

    async def with_all_of_it(world: Watched) -> None:
        job = await running(world, 8 * G)
        world.hold(job, 9 * G)
        await world.look(50)
        sentence("over-lease-all-of-it", world.told(job)[0])
        sentence("stopped-all-of-it", world.told(job)[1])

    play(scenario)()
    play(with_all_of_it)()


@play
async def test_an_owner_who_was_told_of_a_stop_is_told_that_it_does_not_come(
    world: Watched,
) -> None:
    job = await running(world)
    world.hold(job, 3 * G)
    await world.look()
    world.hold(job, G)
    await world.look(40)
    assert len(world.told(job)) == 1
    assert world.over_for(job) is None
    await world.look(10)
    (spared,) = world.told(job)[1:]
    sentence("over-lease-no-more", spared)

    world.hold(job, 3 * G)
    await world.look(300)
    assert len(world.told(job)) == 4, "told of it anew, and of its end"


@play
async def test_settings_that_spare_a_job_are_told_and_those_that_hurry_it_say_now(
    world: Watched,
) -> None:
    job = await running(world)
    world.hold(job, 3 * G)
    await world.look()
    world.overuse = OverusePolicy(Consequence.WARN, G // 4, GRACE)
    await world.look(2)
    (spared,) = world.told(job)[1:]
    sentence("over-lease-spared", spared)
    world.overuse = OverusePolicy(Consequence.STOP, G // 4, timedelta(milliseconds=500))
    second = await running(world)
    world.hold(second, 3 * G)
    await world.look()
    sentence("over-lease-now", world.told(second)[0])


@play
async def test_after_the_grace_it_is_stopped_the_usual_way_with_its_reason(world: Watched) -> None:
    job = await running(world)
    world.hold(job, 5 * G)
    await world.look()
    world.hold(job, 3 * G)
    await world.look(39)
    assert world.launcher.stopped == []
    await world.look()
    assert world.launcher.stopped == [job]
    assert world.launcher.reasons == ["over_lease"]
    await world.look(5)
    assert world.launcher.stopped == [job], "once is enough"
    assert len(world.told(job)) == 2

    world.launcher.exits(job, 0, Outcome.OVER_LEASE)
    await world.settle()
    ended = world.job(job)
    assert ended.outcome is Outcome.OVER_LEASE
    assert mentions(ended.detail, "3G", "GPU 0", "5G", "2G", "40s", "--mem 6G")


@play
async def test_a_daemon_that_died_before_it_could_stop_the_job_stops_it_for_the_same_reason(
    world: Watched,
) -> None:
    job = await running(world)
    revoke(world.store, job, Outcome.OVER_LEASE, "it held too much", world.clock)
    await world.scheduler.supervisor.stop()

    world.scheduler = world.new_scheduler()
    world.scheduler.supervisor.recover()
    world.launcher.hears(job, WorkerStarted(101, 201, NOON))
    await world.settle()
    assert (world.launcher.stopped, world.launcher.reasons) == ([job], ["over_lease"])
    await world.scheduler.supervisor.stop()


@play
async def test_a_job_that_ends_by_itself_in_that_moment_ended_by_itself(world: Watched) -> None:
    job = await running(world)
    world.hold(job, 3 * G)
    await world.look(41)
    world.launcher.exits(job, 3)
    await world.settle()
    ended = world.job(job)
    assert (ended.outcome, ended.exit and ended.exit.code) == (Outcome.EXITED, 3)


@play
async def test_what_is_listed_for_the_dead_is_no_job_s_of_who_has_the_pid_now(
    world: Watched,
) -> None:
    job = await running(world)
    world.hold(job, 5 * G)
    world.finder.reused = frozenset({100 + job})
    await world.look(60)
    assert world.told(job) == []
    assert world.state(job) is State.ACTIVE
    world.finder.reused = frozenset()
    await world.look()
    assert world.told(job)


@play
async def test_what_cannot_be_recorded_is_done_at_a_later_look(world: Watched) -> None:
    job = await running(world)
    world.hold(job, 3 * G)
    world.store.is_full = True
    for _ in range(39):
        with contextlib.suppress(RecordUnwritable):
            await world.look()
    await world.settle()
    assert (len(world.told(job)), world.launcher.stopped) == (1, [])
    for _ in range(10):
        with contextlib.suppress(RecordUnwritable):
            await world.look()
    await world.settle()
    world.store.is_full = False
    assert (len(world.told(job)), world.launcher.stopped) == (2, [job])
    assert world.launcher.reasons == [Outcome.OVER_LEASE]
    world.launcher.exits(job, outcome=Outcome.OVER_LEASE)
    await world.settle()
    ended = world.job(job)
    assert ended.outcome is Outcome.OVER_LEASE
    assert "3G" in (ended.detail or ""), "what could not be stored comes with the end"


@play
async def test_a_hold_that_cannot_be_told_keeps_nothing_from_others_and_is_told_later(
    world: Watched,
) -> None:
    hold = (await world.scheduler.submit(hold_order(2 * G))).id
    job = await running(world)
    world.gpus.processes["GPU-a"] = {100 + hold: 3 * G, 100 + job: 3 * G}
    world.finder.jobs |= {100 + hold: hold, 100 + job: job}
    world.store.is_full = True
    for _ in range(3):
        with pytest.raises(RecordUnwritable):
            await world.look()
    await world.settle()
    world.store.is_full = False
    assert len(world.told(job)) == 1
    await world.look()
    assert [each.kind for each in world.store.events(hold)].count("notice") == 1


@play
async def test_a_daemon_that_comes_back_goes_on_with_what_is_on_record(world: Watched) -> None:
    job = await running(world)
    world.hold(job, 3 * G)
    await world.look(26)
    assert world.over_for(job) == timedelta(seconds=20), "a quarter of the grace at a time"

    world.start_watch()
    world.clock.forward(hours=1)
    await world.look(20)
    assert world.launcher.stopped == [], "what nobody saw does not count"
    await world.look()
    assert world.launcher.stopped == [job]
    assert [text for text in world.told(job) if "is stopped in" in text] == world.told(job)[:1]


@play
async def test_a_hold_is_told_on_record_and_never_taken_back_for_its_use(world: Watched) -> None:
    job = (await world.scheduler.submit(hold_order(2 * G))).id
    await world.settle()
    world.hold(job, 3 * G)
    await world.look(100)
    notices = [each.detail for each in world.store.events(job) if each.kind == "notice"]
    (said,) = notices
    sentence("over-hold", said)
    assert world.state(job) is State.ACTIVE


@play
async def test_an_exclusive_job_is_told_and_never_stopped(world: Watched) -> None:
    job = await world.submit(2 * G, exclusive=True)
    await world.settle()
    world.hold(job, 3 * G)
    await world.look(100)
    (said,) = world.told(job)
    sentence("over-lease-exclusive", said)
    assert world.launcher.stopped == []


@play
async def test_an_elastic_job_is_let_be_until_somebody_waits_for_that_gpu(world: Watched) -> None:
    world.overuse = OverusePolicy(Consequence.STOP, 0, GRACE, elastic=True)
    job = await running(world)
    world.hold(job, 5 * G)
    await world.look(100)
    assert world.told(job) == []

    await world.submit(4 * G)
    await world.settle()
    await world.look()
    (told,) = world.told(job)
    sentence("over-lease-elastic", told)
    await world.look(40)
    assert world.launcher.stopped == [job]


@play
async def test_an_owner_is_told_once_that_others_took_what_was_promised(world: Watched) -> None:
    first, second = await running(world, 4 * G), await running(world, 4 * G)
    world.gpus.unmanaged["GPU-a"] = 5 * G
    await world.look()
    assert world.told(first) == [], "it may be a process that is not known as a job's yet"
    await world.look(20)
    (said,) = world.told(first)
    sentence("short-of-memory", said)
    (said,) = world.told(second)
    assert mentions(said, f"job {second}", "5G")

    world.gpus.unmanaged.clear()
    await world.look(20)
    world.gpus.unmanaged["GPU-a"] = 5 * G
    await world.look(20)
    assert len(world.told(first)) == 1, "the same again within minutes"
    world.gpus.unmanaged.clear()
    await world.look(minutes=6)
    world.gpus.unmanaged["GPU-a"] = 5 * G
    await world.look(20)
    assert len(world.told(first)) == 2


def test_an_owner_is_told_nothing_of_memory_that_the_lease_does_not_need() -> None:
    async def scenario(world: Watched) -> None:
        job = await running(world, 4 * G)
        world.gpus.unmanaged["GPU-a"] = 4 * G + G // 4
        await world.look(5)
        assert world.told(job) == [], "what little a driver keeps comes and goes"

        world.gpus.unmanaged["GPU-a"] = 4 * G
        world.hold(job, 4 * G)
        await world.look(5)
        world.gpus.sizes["GPU-a"] = 7 * G
        await world.look(5)
        assert world.told(job) == [], "it has all of its lease"

    async def with_a_margin(world: Watched) -> None:
        world.policy = Policy(margin=G)
        job = await running(world, 4 * G)
        world.gpus.unmanaged["GPU-a"] = 4 * G
        await world.look(5)
        assert world.told(job) == [], "the margin is promised to nobody"
        world.gpus.unmanaged["GPU-a"] = 5 * G
        await world.look(5)
        (said,) = world.told(job)
        assert mentions(said, f"job {job}", "1G")

    play(scenario)()
    play(with_a_margin)()


class Elsewhere(Watched):
    """A watched world with a second GPU, which the job of the scenario does not lease."""

    def __init__(self) -> None:
        super().__init__()
        self.gpus.sizes["GPU-b"] = 8 * G

    def uses_b(self, job: JobId, memory: int | None) -> None:
        self.gpus.processes["GPU-b"] = {100 + job: memory}  # type: ignore[dict-item]
        self.finder.jobs[100 + job] = job


@play
async def test_a_job_that_uses_a_gpu_without_a_lease_is_stopped_after_the_grace(
    world: Elsewhere,
) -> None:
    job = await running(world)
    world.uses_b(job, 3 * G)
    await world.look()
    (told,) = world.told(job)
    sentence("no-lease", told)

    await world.look(39)
    assert world.state(job) is State.ACTIVE
    await world.look()
    assert world.launcher.stopped == [job]
    ended = world.job(job)
    assert ended.outcome is Outcome.OVER_LEASE
    assert mentions(ended.detail, "3G", "GPU 1", "40s")


def test_a_job_that_only_opens_a_context_elsewhere_is_told_once_and_never_stopped() -> None:
    async def scenario(world: Elsewhere) -> None:
        job = await running(world)
        world.uses_b(job, 600 * 2**20)
        await world.look(100)
        (told,) = world.told(job)
        sentence("no-lease-context", told)
        assert world.launcher.stopped == []

    async def without_figures(world: Elsewhere) -> None:
        job = await running(world)
        world.uses_b(job, None)
        await world.look(100)
        (told,) = world.told(job)
        sentence("no-lease-no-figures", told)
        assert world.launcher.stopped == []

    play(scenario)()
    play(without_figures)()


@play
async def test_a_job_that_leaves_the_other_gpu_in_time_is_not_stopped(world: Elsewhere) -> None:
    job = await running(world)
    world.uses_b(job, 3 * G)
    await world.look(30)
    world.gpus.processes.clear()
    await world.look(100)
    (spared,) = world.told(job)[1:]
    sentence("no-lease-no-more", spared)
    assert world.launcher.stopped == []


def test_use_without_a_lease_follows_the_settings_for_use_beyond_one() -> None:
    async def warned(world: Elsewhere) -> None:
        world.overuse = replace(world.overuse, consequence=Consequence.WARN)
        job = await running(world)
        world.uses_b(job, 3 * G)
        await world.look(100)
        (told,) = world.told(job)
        sentence("no-lease-spared", told)
        assert world.launcher.stopped == []

    async def elastic(world: Elsewhere) -> None:
        world.overuse = replace(world.overuse, elastic=True)
        job = await running(world)
        world.uses_b(job, 3 * G)
        await world.look(100)
        (told,) = world.told(job)
        sentence("no-lease-spared", told)

        waiting = await world.submit(7 * G)
        await world.settle()
        await world.look()
        assert world.state(waiting) is State.QUEUED
        sentence("no-lease-elastic", world.told(job)[1])
        await world.look(41)
        assert world.launcher.stopped == [job]

    async def exclusive(world: Elsewhere) -> None:
        job = await world.submit(2 * G, exclusive=True)
        await world.settle()
        world.uses_b(job, 3 * G)
        await world.look(42)
        assert world.launcher.stopped == [job], "it is alone on its own GPU only"

    async def hold(world: Elsewhere) -> None:
        job = (await world.scheduler.submit(hold_order(2 * G))).id
        await world.settle()
        world.uses_b(job, 3 * G)
        await world.look(100)
        assert world.launcher.stopped == []

    for scenario in (warned, elastic, exclusive, hold):
        play(scenario)()


@play
async def test_a_process_of_a_mig_device_is_not_taken_for_one_on_the_whole_gpu(
    world: Elsewhere,
) -> None:
    job = await running(world)
    world.finder.jobs[7] = job
    world.gpus.broken["GPU-b"] = GpuReading(
        GpuUuid("GPU-b"),
        1,
        "Fake",
        used=G,
        mig_mode=True,
        processes=(ProcessReading(7, 3 * G),),
    )
    await world.look(50)
    assert world.told(job) == []


@play
async def test_an_idle_job_is_told_and_released_only_while_somebody_waits(world: Watched) -> None:
    world.idle = IdlePolicy(Release.RELEASE, timedelta(seconds=30), timedelta(seconds=10))
    job = await running(world, 6 * G)
    world.hold(job, 6 * G)
    world.gpus.utilization["GPU-a"] = 0
    await world.look(100)
    assert (world.told(job), world.launcher.stopped) == ([], []), "nobody waits"

    await world.submit(6 * G)
    await world.settle()
    await world.look()
    (told,) = world.told(job)
    sentence("idle", told)
    await world.look(9)
    assert world.launcher.stopped == []
    await world.look()
    assert (world.launcher.stopped, world.launcher.reasons) == ([job], ["idle"])
