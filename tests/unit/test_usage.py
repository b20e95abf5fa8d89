"""Reports beside looks: what a process holds beside its pool, and what is learnt from it."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

from fakes import ALICE, NOON, G, order, reading
from gpulease.domain.enforcement import HookReport, HookState
from gpulease.domain.gpu import GpuUuid, JobId, ProcessReading
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Lease, State
from gpulease.domain.memory_estimate import OverheadKey
from gpulease.service.observation import Observation
from gpulease.service.usage import MOST_PROCESSES, FrameworkReport, PoolReport, Usage
from gpulease.units import MIB

GPU = GpuUuid("GPU-a")
KIND = OverheadKey("torch", "Fake", "610.1", 1)
START = 600 * MIB


class World:
    """Reports and looks, a second apart."""

    def __init__(self) -> None:
        self.usage = Usage(lambda: "610.1", {})
        self.at = NOON
        self.owner = ALICE
        self.look()

    def job(self, number: int = 1) -> Job:
        job = order(4 * G, owner=self.owner).queued(JobId(number), NOON)
        return replace(job, state=State.ACTIVE, leases=(Lease(GPU, 4 * G, NOON),))

    def tick(self) -> datetime:
        self.at += timedelta(seconds=1)
        return self.at

    def hear(
        self, pool: int | None, job: int = 1, pid: int = 7, framework: str = "torch", peak: int = 1
    ) -> None:
        report = FrameworkReport(framework, "2.13", (PoolReport(GPU, pool, peak, 3 * G),))
        self.usage.hear(self.job(job), pid, report, self.tick())

    def look(self, *, job: int = 1, pid: int = 7, memory: int | None = None) -> None:
        processes = (ProcessReading(pid, memory),)
        seen = Observation((reading(processes=processes),), {pid: JobId(job)}, self.tick())
        asyncio.run(self.usage.observe(seen))

    def excess(self, memory: int, *limits: int | None, pid: int = 7, state: str = "limited") -> int:
        """Let a process use so much, and its hooks report these limits."""
        reports = tuple(
            HookReport(7, name, "1", HookState(state), NOON, ((GPU, limit),))
            for name, limit in zip(("torch", "jax"), limits, strict=False)
        )
        processes = (ProcessReading(pid, memory),)
        seen = Observation((reading(processes=processes),), {pid: JobId(1)}, self.tick())
        job = self.job()
        return self.usage.excess_overhead(job, job.leases[0], reports, seen)

    def beside(self, job: int = 1) -> int | None:
        return self.usage.of(JobId(job))[0].overhead

    def end(self) -> None:
        self.usage.written(self.usage.unwritten(), holding=set())


def test_what_the_driver_shows_between_two_equal_reports_is_more_than_the_pool_by_so_much() -> None:
    world = World()
    world.hear(2 * G)
    world.look(memory=2 * G + 500 * MIB)
    world.hear(2 * G)

    assert world.beside() == 500 * MIB
    assert world.usage.of(JobId(1))[0].kind == KIND


def test_of_a_uid_without_a_name_nothing_is_learnt() -> None:
    world = World()
    world.owner = Owner(100001, 100001, "100001")
    world.hear(2 * G)
    world.look(memory=2 * G + 500 * MIB)
    world.hear(2 * G)

    assert world.beside() is None


def test_a_pool_that_changed_meanwhile_says_nothing() -> None:
    world = World()
    world.hear(G)
    world.look(memory=2 * G + 500 * MIB)
    world.hear(2 * G)

    assert world.beside() is None


def test_a_pool_that_does_not_tell_what_it_holds_says_nothing() -> None:
    world = World()
    world.hear(None)
    world.look(memory=2 * G)
    world.hear(None)

    assert world.beside() is None


def test_two_frameworks_in_one_process_say_nothing_of_either() -> None:
    world = World()
    for _ in range(2):
        world.hear(G)
        world.hear(G, framework="tensorflow")
        world.look(memory=3 * G)

    assert [each.overhead for each in world.usage.of(JobId(1))] == [None, None]


def test_a_figure_of_another_process_says_nothing() -> None:
    world = World()
    world.hear(G)
    world.look(memory=3 * G, pid=8)
    world.hear(G)

    assert world.beside() is None


def test_a_job_claims_no_more_processes_than_are_heard() -> None:
    world = World()
    for pid in range(3 * MOST_PROCESSES):
        world.hear(G, pid=pid, peak=0)

    assert world.usage.idle(JobId(1), GPU) == 0
    for pid in range(3 * MOST_PROCESSES):
        world.hear(G, pid=pid, peak=G - MIB)
    assert world.usage.idle(JobId(1), GPU) == MOST_PROCESSES * MIB


def test_the_next_launches_of_a_user_go_by_what_three_jobs_showed() -> None:
    world = World()
    for number in (1, 2, 3):
        assert world.usage.beside(ALICE.uid, KIND, START) == START
        world.hear(G, number)
        world.look(job=number, memory=G + 400 * MIB)
        world.hear(G, number)
        world.end()

    assert world.usage.beside(ALICE.uid, KIND, START) == 448 * MIB
    assert world.usage.beside(ALICE.uid + 1, KIND, START) == START
    assert world.usage.beside(ALICE.uid, replace(KIND, driver="700"), START) == START
    assert world.usage.of(JobId(1)) == ()


def test_what_could_not_be_written_is_kept() -> None:
    world = World()
    world.hear(G)
    rows = world.usage.unwritten()
    world.hear(G, peak=2 * G)

    world.usage.written(rows, holding={JobId(1)})

    assert [row.peak for row in world.usage.unwritten()] == [2 * G]


def test_what_lies_beside_limited_pools_is_no_use_of_the_job_and_is_learnt() -> None:
    world = World()

    assert world.excess(5 * G, 3 * G) == G
    assert world.beside() == 2 * G, "its pool reports nothing: at least this much"
    assert world.usage.beside(ALICE.uid, KIND, START) == 2 * G + 48 * MIB, "while it still runs"
    world.end()
    assert world.usage.beside(ALICE.uid, KIND, START) == 2 * G + 48 * MIB
    assert world.usage.beside(ALICE.uid + 1, KIND, START) == START


def test_nothing_is_learnt_of_a_job_within_its_lease_or_of_two_frameworks() -> None:
    world = World()

    assert world.excess(4 * G, 3 * G) == 0
    assert world.excess(5 * G, 2 * G, G) == G
    assert world.usage.of(JobId(1)) == ()


def test_only_a_limited_pool_within_its_limit_excuses_a_process() -> None:
    world = World()

    assert world.excess(5 * G) == 0, "no hook"
    assert world.excess(5 * G, None) == 0, "a pool without a size"
    assert world.excess(5 * G, 3 * G, state="failed") == 0
    assert world.excess(5 * G, 3 * G, pid=8) == 0, "a second process"
    world.hear(3 * G + G // 2)
    assert world.excess(5 * G, 3 * G) == G // 2, "the pool has more than it may"
