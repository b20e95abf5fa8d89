"""What is settled with the end of a job, in the transaction of the end itself."""

import asyncio
from dataclasses import replace
from fractions import Fraction

import pytest

from fakes import (
    NOON,
    FakeClock,
    FakeFinder,
    FakeGpus,
    G,
    MemoryStore,
    hold_order,
    kept,
    order,
    running_job,
)
from goldens import mentions
from gpulease.domain.enforcement import with_enforcement
from gpulease.domain.gpu import Fault, GpuUuid, JobId
from gpulease.domain.host_memory import HostReading
from gpulease.domain.job import (
    CommandFingerprint,
    Exit,
    HostUse,
    Invocation,
    Job,
    JobUsage,
    Outcome,
    asked_to_end,
)
from gpulease.domain.lease import Trigger
from gpulease.domain.limits import UserLimits
from gpulease.domain.memory_estimate import PastRun
from gpulease.service import jobs, submission
from gpulease.service.job_accounting import MOST_RETRIES, JobAccounting
from gpulease.service.observation import GpuObserver, Observation
from gpulease.service.ports import Event, Policy, Submission, WorkerExited

GPU = GpuUuid("GPU-a")
M = G // 1024
FULL = "CUDA out of memory. Tried to allocate 20.00 MiB"
WATCHED = ("framework", "watch")
FAILED = WorkerExited(Outcome.EXITED, Exit(1), NOON)


class World:
    """A store with one job that runs, and what looks at its end."""

    def __init__(
        self,
        retry: float | None = None,
        attempt: int = 0,
        memory: int = 2 * G,
        *,
        ranged: bool = False,
    ) -> None:
        self.store = MemoryStore()
        gpus = FakeGpus({"GPU-a": 8 * G})
        self.policy = Policy()
        self.observer = GpuObserver(
            self.store, gpus, FakeFinder(), FakeClock(), None,  # type: ignore[arg-type]
        )  # fmt: skip
        self.observer.latest = a_look()
        self.tail = FULL
        self.idle = 0
        self.stops = True
        self.accounting = JobAccounting(
            self.store,
            self.observer,
            lambda: self.policy,
            self.read,
            lambda job, gpu: self.idle,
            lambda job: self.stops,
            lambda job: 40,
            lambda job: job,
        )
        account = JobUsage(retry_factor=None if retry is None else Fraction(retry), attempt=attempt)
        with self.store.write() as tx:
            job = tx.add(replace(order(memory), usage=account), NOON)
            if ranged:
                job = replace(job, claim=replace(job.claim, memory_bound=6 * G))
            tx.save(running_job(job), Event(NOON, "worker_started"))

    async def read(self, job: JobId) -> str:
        return self.tail

    def job(self) -> Job:
        return kept(self.store, JobId(1))

    def used(self, peak: int) -> None:
        self.observer.peaks.by_lease[JobId(1), GPU] = peak

    def end(self, news: WorkerExited = FAILED) -> Job:
        settle = asyncio.run(self.accounting.settle_exit(JobId(1), news))
        return jobs.note_exited(self.store, JobId(1), news, settle)


def a_look() -> Observation:
    return Observation(FakeGpus({"GPU-a": 8 * G}).read(), {}, NOON)


def test_what_a_job_needed_is_its_peak_less_what_was_taken_and_never_filled() -> None:
    world = World()
    world.used(2 * G)
    world.idle = G

    ended = world.end(WorkerExited(Outcome.EXITED, Exit(0), NOON))

    assert [(lease.used, lease.peak) for lease in ended.leases] == [(G, 2 * G)]
    assert not ended.usage.out_of_memory


def test_the_peak_of_before_a_restart_counts_too() -> None:
    world = World()
    with world.store.write() as tx:
        (lease,) = world.job().leases
        tx.save(replace(world.job(), leases=(replace(lease, peak=2 * G),)), Event(NOON, "restart"))
    world.used(G)
    (lease,) = world.end(WorkerExited(Outcome.EXITED, Exit(0), NOON)).leases
    assert (lease.used, lease.peak) == (2 * G, 2 * G)


@pytest.mark.parametrize(("stops", "held"), [(False, ("framework",)), (True, WATCHED)])
def test_what_held_a_lease_is_kept_as_it_was_at_its_end(stops: bool, held: object) -> None:
    world = World()
    with world.store.write() as tx:
        tx.save(with_enforcement(world.job(), WATCHED), Event(NOON, "enclosed"))
    world.stops = stops

    ended = world.end()

    assert [lease.enforced_by for lease in ended.leases] == [held]


def test_a_hold_that_is_taken_back_ends_for_that_reason_in_its_history_too() -> None:
    store = MemoryStore()
    with store.write() as tx:
        tx.save(running_job(tx.add(hold_order(), NOON)), Event(NOON, "worker_started"))
    jobs.revoke(store, JobId(1), Outcome.IDLE, "it did nothing", FakeClock())

    news = WorkerExited(Outcome.RELEASED, None, NOON, "released")
    assert jobs.note_exited(store, JobId(1), news).outcome is Outcome.IDLE

    assert store.events(JobId(1))[-1].detail == Outcome.IDLE


def test_a_job_that_nobody_saw_on_a_gpu_has_no_known_use() -> None:
    assert [lease.used for lease in World().end().leases] == [None]


def test_without_a_factor_the_owner_is_told_and_nothing_is_queued() -> None:
    world = World()
    world.used(2 * G - 1)

    ended = world.end()

    assert ended.usage.out_of_memory
    assert mentions(ended.detail, "1.9G", "2G", "--mem 2.5G")
    assert world.store.live() == ()


@pytest.mark.parametrize(
    ("peak", "advice"),
    [
        pytest.param(6 * G - 1, "--mem 7.5G", id="it needs more than its bound"),
        pytest.param(4 * G, "--mem 5G", id="others held the rest up to the bound"),
    ],
)
def test_a_job_with_a_range_is_told_to_ask_for_more_than_it_reached(peak: int, advice: str) -> None:
    world = World(ranged=True)
    world.used(peak)
    ended = world.end()
    assert ended.usage.out_of_memory
    assert mentions(ended.detail, "2G..6G", advice)


def test_a_new_try_of_a_job_with_a_range_has_its_size_guaranteed() -> None:
    world = World(retry=1.5, ranged=True)
    world.used(4 * G)
    world.end()
    (again,) = world.store.live()
    assert again.claim.size == "6G"


def test_with_a_factor_another_job_is_queued_that_points_back() -> None:
    world = World(retry=1.5)

    ended = world.end()

    (again,) = world.store.live()
    assert (ended.usage.retried_as, again.usage.retry_of) == (again.id, ended.id)
    assert again.claim.memory == 3 * G
    assert again.usage.attempt == 1
    assert again.usage.retry_factor == Fraction(3, 2)
    assert world.store.invocation(again.id) == world.store.invocation(ended.id)


@pytest.mark.parametrize(
    "news",
    [
        WorkerExited(Outcome.EXITED, Exit(0), NOON),
        WorkerExited(Outcome.TIME_LIMIT, Exit(1), NOON),
        WorkerExited(Outcome.CANCELLED, Exit(1), NOON),
        WorkerExited(Outcome.LOST, None, NOON),
    ],
)
def test_other_ends_queue_nothing(news: WorkerExited) -> None:
    world = World(retry=2)

    world.end(news)

    assert world.store.live() == ()


def test_one_that_was_asked_to_go_and_failed_first_queues_nothing() -> None:
    world = World(retry=2)
    going = asked_to_end(world.job(), Trigger.CANCEL, Outcome.CANCELLED, "by alice", NOON)
    assert going is not None
    with world.store.write() as tx:
        tx.save(going, Event(NOON, "cancel"))

    world.end()

    assert world.store.live() == ()


def test_the_last_try_queues_nothing_and_says_how_often_it_was_tried() -> None:
    world = World(retry=2, attempt=MOST_RETRIES)

    ended = world.end()

    assert world.store.live() == ()
    assert "3 times" in (ended.detail or "")


@pytest.mark.parametrize(("memory", "wanted"), [(6 * G, 8 * G), (8 * G, None)])
def test_no_try_gets_more_than_the_largest_gpu_has(memory: int, wanted: int | None) -> None:
    world = World(retry=2, memory=memory)

    world.end()

    assert [job.claim.memory for job in world.store.live()] == ([wanted] if wanted else [])


def test_a_gpu_that_cannot_be_read_at_that_moment_keeps_nobody_from_a_new_try() -> None:
    world = World(retry=1.5)
    (seen,) = a_look().readings
    lost = replace(seen, total=None, used=None, processes=None, fault=Fault.LOST)
    world.observer.latest = Observation((lost,), {}, NOON)

    world.end()

    assert kept(world.store, JobId(2)).claim.memory == 3 * G


def test_a_claim_without_a_size_gets_what_its_likes_used() -> None:
    world = World()
    world.store.known_runs = [PastRun(8 * G, 3 * G), PastRun(8 * G, 2 * G)]
    unsized = an_unsized_order()

    job = submission.submit(world.store, unsized, a_look(), Policy(), FakeClock())

    assert job.claim.memory == 3584 << 20
    assert mentions(job.usage.size_reason, "3.5G", "train.py", "3G in 2 runs")

    short = PastRun(8 * G, 7 * G, out_of_memory=True)
    world.store.known_runs = [PastRun(8 * G, 3 * G), short, PastRun(8 * G, 2 * G)]
    job = submission.submit(world.store, unsized, a_look(), Policy(), FakeClock())
    assert mentions(job.usage.size_reason, "3.5G", "train.py", "3G in 2 of 3 runs")


def an_unsized_order() -> Submission:
    """Return one that runs train.py under another name."""
    invocation = Invocation(("python3", "/home/a/train.py"), "/", {})
    account = JobUsage(fingerprint=CommandFingerprint("a", "b"))
    return replace(order(4 * G), sizes_itself=True, usage=account, name="x", invocation=invocation)


def test_after_a_stop_over_the_lease_the_next_gets_what_was_told_to_be_asked_for() -> None:
    world = World()
    world.store.known_runs = [PastRun(200 * M, 300 * M, over_lease=True)]

    job = submission.submit(world.store, an_unsized_order(), a_look(), Policy(), FakeClock())

    assert job.claim.memory == 384 * M
    because = "384M, since train.py was stopped for holding 300M in a lease of 200M"
    assert job.usage.size_reason == because


def test_of_a_job_that_was_stopped_over_its_lease_all_that_it_held_counts() -> None:
    world = World()
    world.used(3 * G)
    world.idle = 2 * G

    ended = world.end(WorkerExited(Outcome.OVER_LEASE, Exit(143), NOON))

    assert [lease.used for lease in ended.leases] == [3 * G]


def test_what_no_gpu_has_in_one_piece_is_neither_advised_nor_tried() -> None:
    world = World(retry=2)
    world.tail = "CUDA out of memory. Tried to allocate 16.00 GiB"

    ended = world.end()

    assert ended.usage.out_of_memory
    hint = "hint: it requested 16G at once, and no GPU here has that much"
    assert (ended.detail or "").endswith(hint)
    assert world.store.live() == ()


@pytest.mark.parametrize(("had", "factor", "gets"), [(100, 1.5, 150), (300, 4, 1200), (1, 1.1, 2)])
def test_a_new_try_gets_as_much_more_as_was_said(had: int, factor: float, gets: int) -> None:
    world = World(retry=factor, memory=had * M)

    world.end()

    assert [job.claim.memory for job in world.store.live()] == [gets * M]


def test_a_user_whose_queue_is_full_gets_no_new_try_and_is_told_why() -> None:
    world = World(retry=1.5)
    world.policy = Policy(limits_of=lambda _: UserLimits(most_waiting=0))

    ended = world.end()

    assert ended.usage.retried_as is None
    assert mentions(ended.detail, "--mem 3G", "0 queued jobs")
    assert world.store.live() == ()


SHORT = WorkerExited(Outcome.SIGNALED, Exit(signal=9), NOON, "it used all", ram_limit=2 * G)


def test_a_job_that_met_its_limit_of_ram_is_retried_with_more_ram_and_as_much_gpu_memory() -> None:
    world = World(retry="3/2")
    ended = world.end(SHORT)
    again = kept(world.store, JobId(2))
    assert (again.claim.ram, again.claim.memory) == (3 * G, ended.claim.memory)
    assert again.usage.attempt == 1 and ended.usage.retried_as == 2
    # The size of its GPU memory was not what was wrong, and nothing is learnt of that.
    assert not ended.usage.out_of_memory
    assert mentions(ended.detail or "", "it used all", "job 2", "3G of RAM")


def test_without_retry_oom_the_end_says_how_much_ram_to_ask_for_and_that_there_is_one() -> None:
    assert mentions(World().end(SHORT).detail or "", "--ram 2.5G", "--retry-oom")
    # Where its shim watched it, it may have used more than its limit.
    much = replace(SHORT, host_use=HostUse(4 * G))
    assert mentions(World().end(much).detail or "", "--ram 5G")
    last = World(retry="3/2", attempt=3).end(SHORT)
    assert last.usage.retried_as is None and mentions(last.detail or "", "retried 3 times")


def test_a_job_that_succeeds_is_not_run_again_though_a_process_was_killed() -> None:
    world = World(retry="3/2")
    assert world.end(replace(SHORT, outcome=Outcome.EXITED, exit=Exit(0))).usage.retried_as is None


@pytest.mark.parametrize("retry", [None, "3/2"])
def test_no_more_ram_than_the_machine_has_is_advised_or_retried_with(retry: str | None) -> None:
    world = World(retry=retry)
    world.observer.latest = replace(a_look(), host=HostReading(2 * G, 2 * G, 8))
    ended = world.end(SHORT)
    assert ended.usage.retried_as is None
    assert (ended.detail or "").endswith(
        "hint: this machine has no more RAM to lease: reduce its use"
    )


def test_the_last_of_the_ram_of_the_machine_is_advised_and_retried_with() -> None:
    host = HostReading(5 * G // 2, 2 * G, 8)  # of which 5% are never leased
    advised = World()
    advised.observer.latest = replace(a_look(), host=host)
    much = replace(SHORT, ram_limit=2 * G - 512 * M, host_use=HostUse(4 * G))
    assert mentions(advised.end(much).detail or "", "use --ram 2G,")
    world = World(retry=4)
    world.observer.latest = replace(a_look(), host=host)
    world.end(much)
    assert [job.claim.ram for job in world.store.live()] == [2 * G]
