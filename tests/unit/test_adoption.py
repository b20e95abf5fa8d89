"""Leases for processes that use GPUs already: granted at once, or refused with a reason."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import BOB, HOLDER, NOON, FakeClock, FakeFinder, G, MemoryStore, order, reading
from goldens import sentence
from gpulease.domain.gpu import ComputeMode, GpuReading, JobId, ProcessReading
from gpulease.domain.job import Holder, Job
from gpulease.domain.lease import State
from gpulease.domain.limits import Beyond, UserLimits
from gpulease.domain.snapshot import ledgers
from gpulease.errors import AlreadyLeased, BadValue, GpuleaseError, NoRoomNow, TooMany, WrongState
from gpulease.host.holds import HoldLauncher
from gpulease.host.process_finder import ProcessWatch
from gpulease.service.adoption import Adoption, adopt, find_uses, refuse_unlisted
from gpulease.service.observation import Observation, snapshot
from gpulease.service.ports import Policy, Quotas, Submission, WorkerStarted
from gpulease.service.queue_state import QueueState
from gpulease.service.scheduler import planned, reconcile

MINE, CHILD, OTHER = HOLDER.pid, HOLDER.pid + 1, 99
FINDER = FakeFinder({MINE: JobId(0), CHILD: JobId(0)})


def gpu(index: int, *held: tuple[int, int | None], **fields: object) -> GpuReading:
    processes = tuple(ProcessReading(pid, memory) for pid, memory in held)
    used = sum(memory or 0 for _, memory in held)
    return reading(f"GPU-{index}", index, used=used, processes=processes, **fields)


def lease(memory: int = G, **claim: Any) -> Submission:
    wanted = order(memory)
    holder = Holder(HOLDER, None, adopted=True)
    return replace(wanted, holder=holder, claim=replace(wanted.claim, **claim))


class Machine:
    """A store and what is seen of its GPUs."""

    def __init__(self, *gpus: GpuReading, **policy: Any) -> None:
        self.store = MemoryStore()
        self.seen = Observation(gpus, {}, NOON)
        self.policy = Policy(**policy)

    def submit(self, memory: int, **more: Any) -> Job:
        with self.store.write() as tx:
            return tx.add(order(memory, owner=BOB, **more), NOON)

    def start(self) -> None:
        reconcile(self.store, self.seen, self.policy, FakeClock())

    def adopt(self, size: int | None = None, *, by_admin: bool = False, **claim: Any) -> Job:
        wanted = lease(G if size is None else size, **claim)
        uses = find_uses(wanted, self.seen, FINDER)
        adoption = Adoption(wanted, uses, "root", size is not None, FINDER, by_admin)
        with self.store.write() as tx:
            decided = planned(tx, self.seen, self.policy, NOON, None, QueueState(self.store))
            return adopt(tx, adoption, decided, self.seen, self.policy, NOON)


def leases(job: Job) -> list[tuple[str, int]]:
    return [(each.gpu, each.memory) for each in job.leases]


def test_it_is_granted_where_the_process_and_those_below_it_are() -> None:
    job = Machine(gpu(0), gpu(1, (MINE, 2 * G), (CHILD, G)), gpu(2, (MINE, G))).adopt()
    assert job.state is State.GRANTED
    assert leases(job) == [("GPU-1", 3 * G), ("GPU-2", G)]
    assert (job.claim.memory, job.claim.gpus, job.claim.named) == (3 * G, 2, ("GPU-1", "GPU-2"))


@pytest.mark.parametrize(("size", "leased"), [(G, 3 * G), (3 * G, 3 * G), (5 * G, 5 * G)])
def test_it_is_for_what_the_process_holds_or_more(size: int, leased: int) -> None:
    assert leases(Machine(gpu(0, (MINE, 3 * G))).adopt(size)) == [("GPU-0", leased)]


def test_memory_of_others_on_its_gpu_is_not_there() -> None:
    machine = Machine(gpu(0, (MINE, 3 * G), (OTHER, 2 * G)))
    with pytest.raises(NoRoomNow, match="GPU 0") as caught:
        machine.adopt(7 * G)
    sentence("adopt-no-room", f"{caught.value.message}\n{caught.value.hint}")
    assert not machine.store.live()
    assert leases(machine.adopt(6 * G)) == [("GPU-0", 6 * G)]


def test_what_it_does_not_hold_yet_may_be_reserved_for_others() -> None:
    machine = Machine(gpu(0, (MINE, 3 * G)), gpu(1))
    machine.submit(4 * G, gpus=2)
    # That starts in the pass that decides about the process, or just before.
    with pytest.raises(NoRoomNow, match="GPU 0"):
        machine.adopt(6 * G)
    assert leases(machine.adopt()) == [("GPU-0", 3 * G)]


def test_a_gpu_for_one_process_is_its_own() -> None:
    single = gpu(0, (MINE, 3 * G), compute_mode=ComputeMode.EXCLUSIVE_PROCESS)
    assert leases(Machine(single).adopt(5 * G)) == [("GPU-0", 5 * G)]
    assert leases(Machine(gpu(0, (MINE, G))).adopt(exclusive=True)) == [("GPU-0", G)]


def test_it_asks_for_no_more_gpus_than_it_uses() -> None:
    with pytest.raises(BadValue, match="uses 1"):
        Machine(gpu(0, (MINE, G)), gpu(1)).adopt(gpus=2)


def test_limits_apply_to_users_and_not_to_what_an_admin_adopts() -> None:
    limits = UserLimits(most_memory=2 * G, over_limit=Beyond.WAIT)
    for policy in ({"limits_of": lambda _: limits}, {"quotas": Quotas(holds=0)}):
        machine = Machine(gpu(0, (MINE, 3 * G)), **policy)
        with pytest.raises((NoRoomNow, TooMany)):
            machine.adopt()
        assert leases(machine.adopt(by_admin=True)) == [("GPU-0", 3 * G)]


def test_unknown_figures_are_said() -> None:
    with pytest.raises(WrongState, match="GPU 0") as caught:
        Machine(gpu(0, (MINE, None))).adopt()
    sentence("adopt-unknown-figures", f"{caught.value.message}\n{caught.value.hint}")
    for seen in (
        Observation((gpu(0), reading("GPU-1", 1, processes=None)), {}, NOON),
        Observation((gpu(0),), {}, NOON, foreign=True),
    ):
        with pytest.raises(WrongState, match="known"):
            refuse_unlisted(seen, {})


def test_a_lease_that_came_after_the_observation_counts() -> None:
    machine = Machine(gpu(0, (MINE, G)))
    machine.adopt()
    finder = FakeFinder({MINE: machine.store.live()[0].id})
    uses = find_uses(lease(), machine.seen, FINDER)
    late = Adoption(lease(), uses, "root", names_size=False, processes=finder)
    with machine.store.write() as tx, pytest.raises(AlreadyLeased):
        decided = planned(tx, machine.seen, machine.policy, NOON, None, QueueState(machine.store))
        adopt(tx, late, decided, machine.seen, machine.policy, NOON)


def test_a_gpu_that_cannot_be_read_does_not_matter_if_another_shows_the_process() -> None:
    machine = Machine(gpu(0, (MINE, G)), reading("GPU-1", 1, processes=None))
    refuse_unlisted(machine.seen, find_uses(lease(), machine.seen, FINDER))
    job = machine.adopt()
    assert "GPU 1" in str(machine.store.events(job.id)[-1].detail)


@pytest.mark.parametrize(
    ("adopted", "levels"), [(True, ("watch",)), (False, ("framework", "watch"))]
)
def test_an_adopted_process_has_no_hooks(adopted: bool, levels: tuple[str, ...]) -> None:
    job = Machine(gpu(0, (MINE, G))).adopt()
    job = replace(job, holder=Holder(HOLDER, None, adopted))
    holds = HoldLauncher(FakeClock(), ProcessWatch(), lambda: ("framework", "watch"))

    async def first() -> object:
        async for news in holds.follow(job):
            return news
        return None

    news = asyncio.run(first())
    assert isinstance(news, WorkerStarted)
    assert ("framework" in news.levels) is not adopted


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 2)), max_size=4),
    st.one_of(st.none(), st.integers(1, 8)),
)
def test_no_byte_is_promised_twice_by_an_adoption(
    held: list[tuple[int, int]], others: list[tuple[int, int]], size: int | None
) -> None:
    gpus = [
        gpu(index, *([(MINE, mine * G)] if mine else []), *([(OTHER, its * G)] if its else []))
        for index, (mine, its) in enumerate(held)
    ]
    machine = Machine(*gpus)
    for memory, count in others:
        if count <= len(gpus):
            machine.submit(memory * G, gpus=count)
    machine.start()
    try:
        job = machine.adopt(size and size * G) if any(mine for mine, _ in held) else None
    except GpuleaseError as error:
        assert error.message
        return
    if job is None:
        return
    assert {each.gpu for each in job.leases} == {
        f"GPU-{index}" for index, (mine, _) in enumerate(held) if mine
    }
    seen = replace(machine.seen, jobs_by_pid={MINE: job.id})
    for ledger in ledgers(snapshot(machine.store.live(), seen, machine.policy, {}, NOON)):
        assert ledger.allocatable is not None and ledger.unmanaged is not None
        assert ledger.committed + ledger.unmanaged <= ledger.allocatable
