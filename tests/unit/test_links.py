"""Which GPUs a job on several of them gets, by the links between these."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import ALICE, NOON, FakeClock, G, MemoryStore, order
from goldens import sentence
from gpulease.domain.gpu import Fault, GpuReading, GpuUuid, JobId, LedgerEntry, Link, build_ledger
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.links import best_linked, fewest_nvlinks
from gpulease.domain.placement import Placement, Refusal, place
from gpulease.domain.plan import plan
from gpulease.domain.snapshot import Snapshot
from gpulease.errors import CannotLease
from gpulease.server.reasons import why_it_waits
from gpulease.service.observation import Observation
from gpulease.service.ports import Policy, Submission
from gpulease.service.submission import submit
from topologies import TOPOLOGIES, readings

names = st.sampled_from(sorted(TOPOLOGIES))
everywhere = pytest.mark.parametrize("name", sorted(TOPOLOGIES))


def without_links(gpus: Sequence[GpuReading]) -> list[GpuReading]:
    return [replace(gpu, links=()) for gpu in gpus]


def placed(
    claim: Claim, gpus: Sequence[GpuReading], taken: Sequence[int] = ()
) -> Placement | Refusal:
    """Place a claim where some GiB of each GPU are leased."""
    sizes = [*taken, *[0] * (len(gpus) - len(taken))]
    ledgers = [
        build_ledger(gpu, [LedgerEntry(JobId(gpu.index + 1), size * G)] if size else [], {})
        for gpu, size in zip(gpus, sizes, strict=True)
    ]
    return place(claim, ledgers)


def chosen(answer: Placement | Refusal) -> tuple[GpuUuid, ...]:
    assert isinstance(answer, Placement)
    return tuple(uuid for uuid, _ in answer.allocations)


def linked_sets(gpus: Sequence[GpuReading], count: int) -> list[Collection[GpuUuid]]:
    """Return the sets of GPUs of which each two are linked, found by trying all."""
    return [
        {gpu.uuid for gpu in some} for some in combinations(gpus, count) if fewest_nvlinks(some)
    ]


@everywhere
@pytest.mark.parametrize("count", [2, 3, 4])
def test_linked_gpus_are_taken_where_enough_are_free(name: str, count: int) -> None:
    gpus = readings(name)
    claim = Claim(80 * G, count)
    for free in range(1 << len(gpus)):
        taken = [0 if free >> gpu.index & 1 else 1 for gpu in gpus]
        able = [gpu for gpu, size in zip(gpus, taken, strict=True) if not size]
        answer, asking = (
            placed(claim, gpus, taken),
            placed(replace(claim, linked=True), gpus, taken),
        )
        assert isinstance(answer, Placement) == (len(able) >= count)
        if found := linked_sets(able, count):
            assert set(chosen(answer)) in found
            assert set(chosen(asking)) in found
        else:
            assert isinstance(asking, Refusal)


@given(names, st.lists(st.integers(0, 79), min_size=8, max_size=8), st.integers(2, 8))
def test_where_links_are_equal_the_best_fit_is_taken(
    name: str, taken: list[int], count: int
) -> None:
    gpus = readings("NVSwitch")
    claim = Claim(8 * G, count)
    assert placed(claim, gpus, taken) == placed(claim, without_links(gpus), taken)
    # All eight of any machine are one set.
    all_of_it = Claim(G, 8), readings(name)
    assert placed(*all_of_it, taken) == placed(all_of_it[0], without_links(all_of_it[1]), taken)


def test_of_two_linked_pairs_the_fuller_one_is_taken() -> None:
    gpus = readings("bridged pairs")
    assert chosen(placed(Claim(8 * G, 2), gpus, [0, 0, 0, 0, 60, 60])) == ("GPU-4", "GPU-5")
    # The fullest GPUs are no pair.
    assert chosen(placed(Claim(8 * G, 2), gpus, [60, 0, 60])) == ("GPU-0", "GPU-1")


def test_more_links_are_better_and_of_a_set_the_weakest_link_counts_first() -> None:
    gpus = readings("DGX-1 mesh")
    assert chosen(placed(Claim(80 * G, 2), gpus)) == ("GPU-0", "GPU-3")
    assert chosen(placed(Claim(80 * G, 4), gpus, [1])) == ("GPU-4", "GPU-5", "GPU-6", "GPU-7")


def test_without_nvlink_the_fit_decides_and_among_equals_the_way_through_pci_express() -> None:
    pcie = readings("PCIe only")
    assert chosen(placed(Claim(8 * G, 2), pcie, [60, 0, 0, 0, 60])) == ("GPU-0", "GPU-4")
    assert chosen(placed(Claim(80 * G, 2), pcie, [1])) == ("GPU-2", "GPU-3")
    assert chosen(placed(Claim(80 * G, 4), pcie, [1])) == ("GPU-4", "GPU-5", "GPU-6", "GPU-7")


@given(
    names,
    st.lists(st.integers(0, 80), min_size=8, max_size=8),
    st.integers(1, 8),
    st.integers(1, 80),
    st.booleans(),
)
def test_no_job_starts_later_for_its_links(
    name: str, taken: list[int], count: int, size: int, exclusive: bool
) -> None:
    def starts(gpus: Sequence[GpuReading]) -> bool:
        used = [replace(gpu, used=each * G) for gpu, each in zip(gpus, taken, strict=True)]
        claim = Claim(size * G, count, exclusive=exclusive)
        return bool(plan(Snapshot([waiting(claim)], used, NOON)).grants)

    gpus = readings(name)
    assert starts(gpus) == starts(without_links(gpus))


def waiting(claim: Claim) -> Job:
    return Job(JobId(1), ALICE, "job", "true", claim, NOON)


def test_a_job_that_asks_for_linked_gpus_waits_for_them_and_says_so() -> None:
    claim = Claim(80 * G, 2, linked=True)
    gpus = [
        replace(gpu, used=G if gpu.index in (1, 3, 5) else 0) for gpu in readings("bridged pairs")
    ]
    job = waiting(claim)
    decided = plan(Snapshot([job], gpus, NOON))
    assert chosen(dict(decided.grants)[job.id]) == ("GPU-6", "GPU-7")

    gpus[7] = replace(gpus[7], used=G)
    decided = plan(Snapshot([job], gpus, NOON))
    assert decided.grants == ()
    why = decided.reason(job)
    assert why.refusal.fits == ()
    sentence("waits for linked GPUs", why_it_waits(claim, why, 8))
    [other] = {each.why for each in why.refusal.obstacles if each.kind == "not_linked"}
    sentence("GPU not linked with others", other)
    assert dict(plan(Snapshot([waiting(replace(claim, linked=False))], gpus, NOON)).grants)


def test_more_linked_gpus_than_there_are_are_refused_at_once() -> None:
    def asking(count: int) -> Submission:
        return replace(order(), claim=Claim(G, count, linked=True))

    def refused(gpus: Sequence[GpuReading], count: int) -> str:
        seen = Observation(tuple(gpus), {}, NOON)
        with pytest.raises(CannotLease) as error:
            submit(MemoryStore(), asking(count), seen, Policy(), FakeClock())
        return f"{error.value.message}\n{error.value.hint}"

    sentence("more linked GPUs than there are", refused(readings("DGX-1 mesh"), 5))
    sentence("linked GPUs without NVLink", refused(readings("PCIe only"), 2))
    # The links of a GPU that cannot be read are not known yet.
    lost = replace(readings("PCIe only")[0], fault=Fault.UNREADABLE, links=())
    seen = Observation((lost, *readings("PCIe only")[1:]), {}, NOON)
    submit(MemoryStore(), asking(2), seen, Policy(), FakeClock())


def test_a_linked_set_is_found_where_growing_by_the_best_link_misses_it() -> None:
    """From each GPU of the triangle 0, 1, 2 the strongest link leads out of it."""
    pairs = {(0, 1): 1, (1, 2): 1, (0, 2): 1, (0, 3): 9, (1, 4): 9, (2, 5): 9}
    gpus = [GpuReading(GpuUuid(f"GPU-{n}"), n, "Fake", 8 * G, 0, 0, ()) for n in range(6)]
    for (one, other), count in pairs.items():
        for here, there in ((one, other), (other, one)):
            link = Link(gpus[there].uuid, count)
            gpus[here] = replace(gpus[here], links=(*gpus[here].links, link))
    found = best_linked(gpus, [0.0] * 6, 3, by_nvlink=True)
    assert sorted(found or ()) == [0, 1, 2]
    assert best_linked(gpus, [0.0] * 6, 4, by_nvlink=True) is None
