"""Who makes way for a job that does not fit."""

from dataclasses import replace
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import G, reading
from gpulease.domain.choice import PlannedGpu, best_fit, fits
from gpulease.domain.gpu import GpuUuid, JobId, LedgerEntry, build_ledger
from gpulease.domain.lease import Claim
from gpulease.domain.preemption import Preemptible, Wanted, who_makes_way, without
from gpulease.domain.queue_options import QueuePolicy

POLICY = QueuePolicy(most_sharing=100)
A, B = GpuUuid("GPU-0"), GpuUuid("GPU-1")


def job(number: int, ran_s: float = 0, *, rank: int = 1, **memory: int) -> Preemptible:
    """Return a job with so many GiB on GPU a or b."""
    where = {GpuUuid(f"GPU-{'ab'.index(name)}"): size * G for name, size in memory.items()}
    return Preemptible(JobId(number), rank, ran_s, where, Claim(max(where.values())))


def planned(
    *jobs: Preemptible, gpus: int = 2, others: dict[GpuUuid, int] | None = None
) -> list[PlannedGpu]:
    """Return GPUs of 8 GiB with these jobs on them, and others that make no way."""
    found = []
    for index in range(gpus):
        uuid = GpuUuid(f"GPU-{index}")
        entries = [LedgerEntry(each.job, each.memory[uuid]) for each in jobs if uuid in each.memory]
        if others and uuid in others:
            entries.append(LedgerEntry(JobId(99), others[uuid]))
        found.append(PlannedGpu(build_ledger(reading(uuid, index), entries, {}), index))
    return found


def wanted(claim: Claim, utilization: float = 0.0, policy: QueuePolicy = POLICY) -> Wanted:
    return Wanted(claim, utilization, policy, best_fit)


def making_way(claim: Claim, *jobs: Preemptible, **more: object) -> set[int] | None:
    way = who_makes_way(wanted(claim), planned(*jobs, **more), jobs)  # type: ignore[arg-type]
    return None if way is None else {each.job for each in way}


def test_the_youngest_makes_way_first() -> None:
    assert making_way(Claim(4 * G), job(1, 900, a=4), job(2, 100, a=4), gpus=1) == {2}


def test_the_lowest_class_makes_way_first_however_long_it_has_run() -> None:
    low, normal = job(1, 9000, rank=2, a=4), job(2, 10, rank=1, a=4)
    assert making_way(Claim(4 * G), low, normal, gpus=1) == {1}


def test_two_of_a_low_class_make_way_before_one_of_a_higher_class() -> None:
    low = [job(number, rank=2, a=4) for number in (1, 2)]
    assert making_way(Claim(8 * G), *low, job(3, rank=1, b=8)) == {1, 2}


def test_of_equal_losses_one_restart_is_better_than_two() -> None:
    assert making_way(Claim(8 * G), job(1, a=4), job(2, a=4), job(3, b=8)) == {3}


def test_only_jobs_on_gpus_where_it_helps_make_way() -> None:
    """On GPU a there is a job that stays; b would be free after a longer one."""
    young, old = job(1, 1, a=2), job(2, 900, b=8)
    assert making_way(Claim(8 * G), young, old, others={A: 6 * G}) == {2}


def test_a_gang_gets_its_gpus_together() -> None:
    jobs = job(1, 900, a=6), job(2, 900, b=6), job(3, a=2, b=2)
    assert making_way(Claim(8 * G, gpus=2), *jobs) == {1, 2, 3}
    assert making_way(Claim(2 * G, gpus=2), *jobs) == {3}


JOBS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "ab"]), st.integers(1, 4), st.integers(0, 50), st.integers(0, 2)
    ),
    max_size=5,
)


@settings(max_examples=300)
@given(JOBS, st.integers(1, 8), st.integers(1, 2), st.booleans())
def test_a_way_is_enough_and_nobody_in_it_is_in_excess(
    drawn: list[tuple[str, int, int, int]], size: int, gpus: int, exclusive: bool
) -> None:
    jobs, free = [], {"a": 8, "b": 8}
    for number, (where, memory, ran_s, rank) in enumerate(drawn, 1):
        if all(free[name] >= memory for name in where):
            jobs.append(job(number, ran_s, rank=rank, **dict.fromkeys(where, memory)))
            free = {name: left - memory * (name in where) for name, left in free.items()}
    claim = Claim(size * G, gpus, exclusive)
    here = planned(*jobs)

    def enough(going: tuple[Preemptible, ...]) -> bool:
        return sum(fits(claim, gpu) for gpu in without(here, going)) >= gpus

    way = who_makes_way(wanted(claim), here, jobs)

    every = chain.from_iterable(combinations(jobs, count) for count in range(len(jobs) + 1))
    if way is None:
        assert not any(map(enough, every))
        return
    assert enough(way)
    for each in way:
        assert not enough(tuple(other for other in way if other is not each))


def test_jobs_make_way_for_the_compute_that_they_take() -> None:
    """The memory is free, but the GPU is too busy for one more."""
    busy = replace(job(1, a=1), utilization=0.9), replace(job(2, a=1), utilization=0.1)
    here = planned(*busy, gpus=1)
    here[0].utilization = 1.0
    way = who_makes_way(wanted(Claim(G), 0.5, QueuePolicy(most_utilization=1.2)), here, busy)
    assert way is not None
    assert {each.job for each in way} == {1}
