"""Ranges of memory such as 4G..10G: what is guaranteed, and what is given back to others."""

from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest

from fakes import G, hold_order, order, reading
from goldens import mentions, sentence
from gpulease.domain.forecast import forecast
from gpulease.domain.gpu import (
    GpuMemory,
    GpuUuid,
    JobId,
    LedgerEntry,
    Link,
    NeighbourLease,
    ProcessReading,
    build_ledger,
)
from gpulease.domain.job import Outcome
from gpulease.domain.lease import Claim, State
from gpulease.domain.overuse import Consequence, OverusePolicy
from gpulease.domain.placement import (
    ObstacleKind,
    Placement,
    Refusal,
    asked_back,
    find_obstacle,
    granted,
    place,
)
from gpulease.domain.plan import order_after
from gpulease.errors import BadValue, CannotLease
from gpulease.options import read_fields
from gpulease.server.reasons import why_it_waits
from gpulease.server.validation import Defaults, claim_of
from gpulease.service.overuse import overdrawn
from gpulease.units import MIB, Share, parse_memory_range
from gpulease.wire.requests import ClaimRequest

from .test_enforcement_loop import GRACE, Watched, running
from .test_scheduler import play

GPU = GpuUuid("GPU-a")


def test_a_range_is_read_with_sizes_and_shares() -> None:
    assert parse_memory_range("4G") == (4 * G, None)
    assert parse_memory_range("4G .. 10G") == (4 * G, 10 * G)
    assert parse_memory_range("512M..40%") == (G // 2, Share(Fraction(40)))
    for text, missing in (("4G..", "bound"), ("..10G", "guarantee"), ("..", "guarantee")):
        with pytest.raises(BadValue) as refused:
            parse_memory_range(text)
        assert mentions(refused.value.text(), missing, "4G..10G")
    with pytest.raises(BadValue):
        parse_memory_range("4G..10G..12G")


def test_the_table_of_options_sets_both_ends_and_clears_what_an_edit_does_not_name() -> None:
    assert read_fields({"mem": "4G..40%"})["claim"] == {
        "memory": 4 * G, "share": None, "memory_bound": None, "share_bound": 40.0,
    }  # fmt: skip
    assert read_fields({"mem": 4 * G})["claim"]["memory_bound"] is None


def test_a_bound_below_the_guarantee_is_refused_and_the_same_size_is_no_range() -> None:
    defaults = Defaults(G)
    for asked in (
        ClaimRequest(memory=10 * G, memory_bound=4 * G),
        ClaimRequest(share=40, share_bound=10),
        ClaimRequest(memory_bound=4 * G),
        ClaimRequest(memory=G, memory_bound=4 * G, share_bound=40),
        ClaimRequest(memory=G, share_bound=140),
        ClaimRequest(memory=G, memory_bound=4 * G, exclusive=True),
    ):
        with pytest.raises(BadValue):
            claim_of(asked, defaults)
    assert claim_of(ClaimRequest(memory=4 * G, memory_bound=4 * G), defaults) == Claim(4 * G)
    assert claim_of(ClaimRequest(share=10, share_bound=40), defaults).size == "10%..40%"


@pytest.mark.parametrize(
    ("size", "why"), [(0, "above zero"), (-1, "above zero"), (1 << 61, "so many")]
)
def test_a_size_is_refused_for_being_nothing_or_too_much(size: int, why: str) -> None:
    with pytest.raises(BadValue, match=why):
        claim_of(ClaimRequest(memory=size), Defaults(G))


def test_the_bound_is_at_most_what_the_gpu_offers_and_no_less_than_the_guarantee() -> None:
    for bound, found in ((6 * G, 6 * G), (20 * G, 8 * G), (Share(Fraction(75)), 6 * G)):
        placed = place(Claim(2 * G, memory_bound=bound), [build_ledger(reading(), [], {})])
        assert placed == Placement(((GPU, 2 * G),), ((GPU, found),))
    small = place(Claim(2 * G, memory_bound=Share(Fraction(10))), [build_ledger(reading(), [], {})])
    assert small == Placement(((GPU, 2 * G),))


def test_jobs_with_ranges_are_placed_where_there_is_room_up_to_their_bounds() -> None:
    ranged = Claim(2 * G, memory_bound=5 * G)
    gpus = {f"GPU-{n}": build_ledger(reading(f"GPU-{n}", n), [], {}) for n in (1, 2)}
    found = []
    for job in range(1, 5):
        placed = place(ranged, list(gpus.values()))
        assert isinstance(placed, Placement)
        ((gpu, memory),) = placed.allocations
        gpus[gpu] = granted(JobId(job), ranged, memory, gpus[gpu])
        found.append(gpu)
    assert found == ["GPU-1", "GPU-2", "GPU-1", "GPU-2"]


def test_a_job_with_a_range_leaves_an_empty_gpu_alone_if_it_has_room_elsewhere() -> None:
    ranged = Claim(2 * G, memory_bound=5 * G)
    busy = ledger((1, 3, 3), gpu="GPU-9", index=9)
    busy = replace(busy, entries=(replace(busy.entries[0], bound=None),))
    placed = place(ranged, [ledger(), busy])
    assert isinstance(placed, Placement)
    assert placed.allocations == ((GpuUuid("GPU-9"), 2 * G),)


def ledger(*held: tuple[int, int, int], gpu: str = "GPU-a", index: int = 0) -> GpuMemory:
    """Return the ledger of an 8 GiB GPU: the job, its guarantee and its use, in GiB, of each."""
    processes = tuple(ProcessReading(job, used * G) for job, _, used in held)
    entries = [
        LedgerEntry(JobId(job), memory * G, running=True, bound=8 * G) for job, memory, _ in held
    ]
    used = sum(used * G for *_, used in held)
    seen = reading(gpu, index, used=used, processes=processes)
    return build_ledger(seen, entries, {job: JobId(job) for job, *_ in held})


@pytest.mark.parametrize(
    ("held", "wanted", "asked"),
    [
        pytest.param([(1, 2, 6)], 4, (1,), id="it gives back enough"),
        pytest.param([(1, 2, 6)], 7, None, id="its guarantee is in the way"),
        pytest.param([(1, 1, 4), (2, 1, 4)], 3, (2,), id="one is enough: that which came last"),
        pytest.param([(1, 1, 4), (2, 1, 2)], 4, (1,), id="the other is not enough"),
        pytest.param([(1, 1, 4), (2, 1, 4)], 5, (1, 2), id="both are needed"),
        pytest.param([(1, 2, 2)], 7, None, id="nothing is above the guarantee"),
    ],
)
def test_no_more_jobs_are_asked_than_are_needed(
    held: list[tuple[int, int, int]], wanted: int, asked: tuple[int, ...] | None
) -> None:
    obstacle = find_obstacle(Claim(wanted * G), ledger(*held))
    assert obstacle is not None
    assert obstacle.kind is (ObstacleKind.LEASED if asked is None else ObstacleKind.EXCESS)
    if asked is not None:
        assert obstacle.waits_for == asked


def test_what_a_job_uses_without_a_range_is_never_asked_back() -> None:
    full = ledger((1, 2, 6))
    plain = replace(full, entries=(replace(full.entries[0], bound=None),))
    obstacle = find_obstacle(Claim(4 * G), plain)
    assert obstacle is not None and obstacle.kind is ObstacleKind.LEASED


def test_memory_is_asked_back_on_as_many_gpus_as_are_missing_or_on_none() -> None:
    gpus = [ledger((n, 2, 6), gpu=f"GPU-{n}", index=n) for n in (1, 2, 3)]

    def asked(claim: Claim, *also: GpuMemory) -> list[int]:
        refused = place(claim, [*gpus, *also])
        assert isinstance(refused, Refusal)
        return [each.index for each in asked_back(claim, refused, [*gpus, *also])]

    assert asked(Claim(4 * G)) == [3]
    assert asked(Claim(4 * G, gpus=2)) == [3, 2]
    free = ledger(gpu="GPU-9", index=9)
    assert asked(Claim(4 * G, gpus=2), free) == [3]
    assert asked(Claim(4 * G, gpus=4)) == []


def test_what_other_leases_need_is_asked_back_without_a_waiter() -> None:
    quiet = LedgerEntry(JobId(9), 4 * G, running=True, used=G)
    assert overdrawn([ledger((1, 2, 4)).with_entry(quiet)]) == set()
    assert overdrawn([ledger((1, 2, 6)).with_entry(quiet)]) == {(JobId(1), GPU)}
    full = replace(quiet, memory=8 * G)
    assert overdrawn([ledger((1, 2, 6)).with_entry(full)]) == {(JobId(1), GPU)}


def test_of_linked_gpus_memory_is_asked_back_on_those_that_are_linked() -> None:
    gpus = [ledger((n, 2, 6), gpu=f"GPU-{n}", index=n) for n in (1, 2, 3)]
    for one, other in ((0, 1), (1, 0)):
        read = replace(gpus[one].reading, links=(Link(gpus[other].uuid, 4),))
        gpus[one] = replace(gpus[one], reading=read)

    def asked(count: int) -> set[int]:
        claim = Claim(4 * G, gpus=count, linked=True)
        refused = place(claim, gpus)
        assert isinstance(refused, Refusal)
        return {each.index for each in asked_back(claim, refused, gpus)}

    assert asked(2) == {1, 2}
    assert asked(3) == set()


def beside(gpu: GpuMemory, leased: int, used: int = 0) -> GpuMemory:
    """Return a ledger where another user's daemon leases some GiB, and its process uses some."""
    theirs = ProcessReading(200, used * G)
    seen = replace(
        gpu.reading,
        used=(gpu.reading.used or 0) + used * G,
        processes=(*(gpu.reading.processes or ()), *([theirs] if used else [])),
        neighbours=(NeighbourLease(1001, GPU, leased * G, frozenset({200})),),
    )
    return build_ledger(seen, gpu.entries, {entry.job: entry.job for entry in gpu.entries})


def test_what_a_daemon_of_another_user_has_leased_is_given_back_to_it() -> None:
    assert overdrawn([beside(ledger((1, 2, 4)), 4)]) == set()
    assert overdrawn([beside(ledger((1, 2, 6)), 4)]) == {(JobId(1), GPU)}
    # What its processes use by now is in the reading, and does not count twice.
    assert overdrawn([beside(ledger((1, 2, 4)), 4, used=3)]) == set()
    assert overdrawn([beside(ledger((1, 2, 4)), 4, used=5)]) == {(JobId(1), GPU)}


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [(1, None), (5, ObstacleKind.EXCESS), (6, ObstacleKind.LEASED), (8, ObstacleKind.UNMANAGED)],
)
def test_no_more_is_asked_back_than_daemons_of_others_leave(
    wanted: int, kind: ObstacleKind | None
) -> None:
    obstacle = find_obstacle(Claim(wanted * G), beside(ledger((1, 2, 6)), 1))
    assert (None if obstacle is None else obstacle.kind) == kind


def test_a_job_with_a_range_avoids_a_gpu_that_others_lease() -> None:
    ranged = Claim(2 * G, memory_bound=5 * G)
    placed = place(ranged, [beside(ledger(), 5), ledger(gpu="GPU-b", index=1)])
    assert isinstance(placed, Placement)
    assert placed.allocations == ((GpuUuid("GPU-b"), 2 * G),)
    # Its guarantee is enough where there is no other.
    assert isinstance(place(ranged, [beside(ledger(), 5)]), Placement)
    assert isinstance(place(ranged, [beside(ledger(), 7)]), Refusal)


class Ranged(Watched):
    """A GPU of 8 GiB, with a job of 2G..6G."""

    def use(self, **gib: float) -> None:
        """Let jobs hold so many GiB, by the number of the job: j1=6."""
        held = {int(job[1:]): int(amount * G) for job, amount in gib.items()}
        self.gpus.processes["GPU-a"] = {100 + job: size for job, size in held.items()}
        self.finder.jobs |= {100 + job: JobId(job) for job in held}

    async def look(self, times: int = 1, **span: float) -> None:
        for _ in range(times):
            self.scheduler.wake()
            await super().look(1, **span)

    async def range(self, **fields: Any) -> JobId:
        asked = order(2 * G, **fields)
        asked = replace(asked, claim=replace(asked.claim, memory_bound=6 * G))
        job = (await self.scheduler.submit(asked)).id
        await self.settle()
        assert self.state(job) is State.ACTIVE
        return job

    def why(self, job: JobId) -> str | None:
        plan = self.scheduler.plan
        assert plan is not None
        return why_it_waits(self.job(job).claim, plan.reason(self.job(job)), 1)


@play
async def test_a_job_stays_within_its_bound_until_another_needs_the_memory(world: Ranged) -> None:
    job = await world.range()
    world.use(j1=6)
    await world.look(100)
    assert world.told(job) == []

    waiter = await world.submit(5 * G)
    await world.look(2)
    (said,) = world.told(job)
    sentence("memory-range-asked-back", said)
    sentence("memory-range-wait-reason", world.why(waiter) or "")
    assert world.state(waiter) is State.QUEUED, "nothing is promised before it is free"

    world.use(j1=2.2)
    await world.look(50)
    assert world.state(waiter) is State.ACTIVE
    assert world.launcher.stopped == []


@play
async def test_a_job_that_gives_nothing_back_is_stopped_after_the_grace(world: Ranged) -> None:
    job = await world.range()
    world.use(j1=6)
    waiter = await world.submit(5 * G)
    await world.look(30)
    world.start_watch()
    await world.look(5)
    assert world.launcher.stopped == []
    assert len(world.told(job)) == 1, "a daemon that comes back repeats no notice"
    await world.look(20)
    assert world.launcher.stopped == [job]
    ending = world.job(job)
    assert ending.outcome is Outcome.OVER_LEASE
    sentence("memory-range-stopped", ending.detail or "")
    world.launcher.exits(job, 0)
    world.use()
    await world.look(3)
    assert world.state(waiter) is State.ACTIVE


@play
async def test_a_hold_is_asked_and_never_stopped(world: Ranged) -> None:
    asked = hold_order(2 * G)
    asked = replace(asked, claim=replace(asked.claim, memory_bound=6 * G))
    hold = (await world.scheduler.submit(asked)).id
    await world.settle()
    world.use(**{f"j{hold}": 6})
    await world.submit(5 * G)
    await world.look(60)
    (said,) = [each.detail for each in world.store.events(hold) if each.kind == "notice"]
    sentence("memory-range-asked-back-of-a-hold", said)
    assert world.state(hold) is State.ACTIVE


@play
async def test_above_its_bound_a_job_is_over_its_lease_also_if_no_job_waits(world: Ranged) -> None:
    world.overuse = OverusePolicy(Consequence.STOP, 0, GRACE, elastic=True)
    job = await world.range()
    world.use(j1=7)
    await world.look(45)
    (said, *_) = world.told(job)
    sentence("memory-range-over-its-bound", said)
    assert world.launcher.stopped == [job]


@play
async def test_nobody_is_asked_for_a_job_that_does_not_fit_all_the_same(world: Ranged) -> None:
    job, other = await world.range(), await running(world, 2 * G)
    world.use(j1=6, j2=2)
    waiter = await world.submit(5 * G)
    await world.look(60)
    assert world.told(job) == world.told(other) == []
    assert "give back" not in (world.why(waiter) or "")


@play
async def test_nothing_is_asked_back_for_a_preemptible_job(world: Ranged) -> None:
    job = await world.range()
    world.use(j1=6)
    asked = order(5 * G)
    await world.scheduler.submit(replace(asked, queue=replace(asked.queue, preemptible=True)))
    await world.look(60)
    assert world.told(job) == []


@play
async def test_the_waiter_may_go_and_the_job_is_told_that_all_is_well(world: Ranged) -> None:
    job = await world.range()
    world.use(j1=6)
    waiter = await world.submit(5 * G)
    await world.look(10)
    await world.scheduler.cancel(waiter, "alice")
    await world.look(60)
    assert len(world.told(job)) == 2
    sentence("memory-range-not-needed", world.told(job)[1])
    assert world.launcher.stopped == []


@play
async def test_a_lease_that_is_not_used_yet_is_kept_free(world: Ranged) -> None:
    job, other = await world.range(), await running(world, 4 * G)
    world.use(j1=6, j2=1)
    await world.look(2)
    assert len(world.told(job)) == 1
    assert world.told(other) == []


@play
async def test_the_expected_start_of_the_waiter_counts_on_the_guarantee(world: Ranged) -> None:
    await world.range()
    world.use(j1=6)
    waiter = await world.submit(5 * G)
    await world.look(2)
    plan = world.scheduler.plan
    assert plan is not None
    start = forecast(plan, order_after(plan))[waiter]
    assert start.at - plan.snapshot.at <= timedelta(minutes=1)


@play
async def test_a_job_that_waits_for_memory_given_back_starts_after_no_other_job(
    world: Ranged,
) -> None:
    world.gpus.utilization["GPU-a"] = 0
    await world.range()
    await world.scheduler.submit(order(G, time_limit=timedelta(seconds=10)))
    await world.settle()
    world.use(j1=6, j2=1)
    waiter = await world.submit(5 * G)
    await world.look(2)
    plan = world.scheduler.plan
    assert plan is not None
    assert "give back" in (world.why(waiter) or "")
    start = forecast(plan, order_after(plan))[waiter]
    assert start.after is None
    assert start.at - plan.snapshot.at == timedelta(seconds=30)


@play
async def test_a_job_with_a_range_waits_for_its_guarantee_only(world: Ranged) -> None:
    await running(world, 7 * G)
    asked = order(2 * G)
    asked = replace(asked, claim=replace(asked.claim, memory_bound=6 * G))
    waiter = (await world.scheduler.submit(asked)).id
    await world.look(2)
    assert world.why(waiter) == "needs 2G, and at most 1G is free on a GPU now"


@play
async def test_a_range_cannot_be_exclusive(world: Ranged) -> None:
    with pytest.raises(CannotLease):
        await world.range(exclusive=True)


def test_a_lease_of_a_range_says_both_ends() -> None:
    assert Claim(4 * G, memory_bound=10 * G).size == "4G..10G"
    assert str(Claim(4 * G, 2, memory_bound=10 * G)) == "4G..10G on each of 2 GPUs"
    assert Claim(512 * MIB).size == "512M"
