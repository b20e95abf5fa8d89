"""Where a claim goes, and why it does not."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from fakes import G, reading
from goldens import mentions, sentence
from gpulease.domain.gpu import (
    ComputeMode,
    Fault,
    GpuMemory,
    GpuUuid,
    JobId,
    LedgerEntry,
    ProcessReading,
)
from gpulease.domain.gpu import build_ledger as stock
from gpulease.domain.lease import Claim
from gpulease.domain.placement import ObstacleKind, Placement, Refusal, can_ever_hold, place
from gpulease.units import Share

ONE = JobId(1)


def gpus(*leased: int) -> list[GpuMemory]:
    """Return ledgers of 8 GiB GPUs with so many GiB leased on each."""
    return [
        stock(
            reading(f"GPU-{index}", index),
            [LedgerEntry(JobId(index + 1), size * G)] if size else [],
            {},
        )
        for index, size in enumerate(leased)
    ]


def chosen(answer: Placement | Refusal) -> list[str]:
    assert isinstance(answer, Placement), answer
    return [uuid for uuid, _ in answer.allocations]


def obstacles(answer: Placement | Refusal) -> list[ObstacleKind]:
    assert isinstance(answer, Refusal), answer
    return [each.kind for each in answer.obstacles]


def test_the_fullest_gpu_that_still_fits_is_taken() -> None:
    assert chosen(place(Claim(2 * G), gpus(0, 5, 7))) == ["GPU-1"]


def test_equal_gpus_are_taken_by_index() -> None:
    assert chosen(place(Claim(2 * G), gpus(3, 3, 3))) == ["GPU-0"]


def test_a_gang_gets_all_its_gpus_or_none() -> None:
    assert chosen(place(Claim(2 * G, gpus=2), gpus(0, 7, 5))) == ["GPU-0", "GPU-2"]
    refused = place(Claim(2 * G, gpus=2), gpus(0, 7, 7))
    assert isinstance(refused, Refusal)
    assert refused.fits == ("GPU-0",)
    assert refused.waits_for == (2, 3)


def test_a_refusal_says_for_each_gpu_what_is_free_and_who_holds_the_rest() -> None:
    refused = place(Claim(6 * G), gpus(5, 6))
    assert isinstance(refused, Refusal)
    assert [(each.index, each.waits_for) for each in refused.obstacles] == [(0, (1,)), (1, (2,))]
    assert [each.why.split()[0] for each in refused.obstacles] == ["3G", "2G"]


def test_alone_means_without_a_job_that_has_its_lease_on_another_gpu() -> None:
    seen = reading(used=6 * G, processes=(ProcessReading(7, 6 * G),))
    there = stock(seen, [], {7: ONE})
    for claim, words in (
        (Claim(G, exclusive=True), ("job 1",)),
        (Claim(4 * G), ("6G", "job 1")),
    ):
        refused = place(claim, [there])
        assert isinstance(refused, Refusal)
        assert obstacles(refused) == [ObstacleKind.UNMANAGED]
        assert mentions(refused.obstacles[0].why, *words)


def in_mode(mode: ComputeMode | None, *holders: int, pid: int = 0, **process: Any) -> GpuMemory:
    there = (ProcessReading(pid, G, **process),) if pid else ()
    held = [LedgerEntry(JobId(job), G) for job in holders]
    seen = reading(used=G if pid else 0, processes=there, compute_mode=mode)
    return stock(seen, held, {}, mps_servers=(50,))


def test_a_gpu_that_no_program_can_use_takes_no_lease() -> None:
    refused = place(Claim(G), [in_mode(ComputeMode.PROHIBITED)])
    assert isinstance(refused, Refusal)
    assert obstacles(refused) == [ObstacleKind.PROHIBITED]
    sentence("mode-prohibited", refused.obstacles[0].why)
    free = replace(in_mode(ComputeMode.DEFAULT).reading, uuid=GpuUuid("GPU-b"), index=1)
    assert chosen(place(Claim(G), [in_mode(ComputeMode.PROHIBITED), stock(free, [], {})])) == [
        "GPU-b"
    ]
    assert can_ever_hold(Claim(G), in_mode(ComputeMode.PROHIBITED)), "an admin may change it"


def test_a_gpu_whose_compute_mode_is_not_known_takes_no_lease() -> None:
    refused = place(Claim(G), [in_mode(None)])
    assert isinstance(refused, Refusal)
    sentence("mode-unknown", refused.obstacles[0].why)


def test_a_gpu_for_one_process_takes_one_lease_at_a_time() -> None:
    mode = ComputeMode.EXCLUSIVE_PROCESS
    assert chosen(place(Claim(G), [in_mode(mode)])) == ["GPU-a"]
    taken = in_mode(mode, 1)
    refused = place(Claim(G), [taken])
    assert isinstance(refused, Refusal)
    assert (obstacles(refused), refused.waits_for) == ([ObstacleKind.LEASED], (1,))
    assert "exclusive" in refused.obstacles[0].why
    assert taken.headroom == 0
    first = in_mode(mode).with_entry(LedgerEntry(ONE, G))
    assert first.headroom == 0, "also within one plan"


def test_a_gpu_for_one_process_waits_for_a_stranger_who_computes_and_for_no_display() -> None:
    mode = ComputeMode.EXCLUSIVE_PROCESS
    assert obstacles(place(Claim(G), [in_mode(mode, pid=9)])) == [ObstacleKind.UNMANAGED]
    assert chosen(place(Claim(G), [in_mode(mode, pid=9, graphics=True)])) == ["GPU-a"]


def test_an_mps_server_shares_a_gpu_for_one_process_out() -> None:
    mode = ComputeMode.EXCLUSIVE_PROCESS
    assert chosen(place(Claim(G), [in_mode(mode, 1, 2, pid=50)])) == ["GPU-a"]


def test_alone_means_without_anyone_elses_lease() -> None:
    assert chosen(place(Claim(G, exclusive=True), gpus(1, 0))) == ["GPU-1"]
    assert obstacles(place(Claim(G, exclusive=True), gpus(1, 1))) == [ObstacleKind.LEASED] * 2


def test_alone_means_without_a_strangers_process_however_small() -> None:
    seen = reading(used=G // 1024, processes=(ProcessReading(9, G // 1024),))
    gpu = stock(seen, [], {})
    assert obstacles(place(Claim(G, exclusive=True), [gpu])) == [ObstacleKind.UNMANAGED]


def test_residue_of_the_driver_does_not_stand_against_being_alone() -> None:
    gpu = stock(reading(used=G // 8), [], {})
    assert chosen(place(Claim(G, exclusive=True), [gpu])) == ["GPU-a"]


@pytest.mark.parametrize(
    ("gpu", "obstacle"),
    [
        (stock(reading(fault=Fault.LOST), [], {}), ObstacleKind.LOST),
        (stock(reading(fault=Fault.UNREADABLE), [], {}), ObstacleKind.UNREADABLE),
        (stock(reading(used=None), [], {}), ObstacleKind.UNREADABLE),
        (stock(reading(), [], {}, drained="fan"), ObstacleKind.DRAINED),
        (stock(reading(total=G), [], {}), ObstacleKind.TOO_SMALL),
        (stock(reading(used=7 * G), [], {}), ObstacleKind.UNMANAGED),
        (stock(reading(), [LedgerEntry(ONE, 7 * G)], {}), ObstacleKind.LEASED),
        (stock(reading(), [LedgerEntry(ONE, G, exclusive=True)], {}), ObstacleKind.LEASED),
    ],
)
def test_each_obstacle_is_named(gpu: GpuMemory, obstacle: ObstacleKind) -> None:
    assert obstacles(place(Claim(2 * G), [gpu])) == [obstacle]


def test_two_halves_of_a_gpu_fit_on_it_and_a_third_does_not() -> None:
    half = Claim(Share(Fraction(50)))
    (gpu,) = gpus(0)
    for _ in range(2):
        answer = place(half, [gpu])
        assert isinstance(answer, Placement)
        gpu = gpu.with_entry(LedgerEntry(ONE, answer.allocations[0][1]))
    assert obstacles(place(half, [gpu])) == [ObstacleKind.LEASED]


def test_a_gpu_whose_size_is_not_known_now_might_hold_anything() -> None:
    assert can_ever_hold(Claim(99 * G), stock(reading(fault=Fault.UNREADABLE), [], {}))
    assert not can_ever_hold(Claim(99 * G), stock(reading(), [], {}))
    unified = reading(total=None)
    assert not can_ever_hold(Claim(G), stock(unified, [], {})), GpuUuid("never leasable")


PART = reading("MIG-a", 0, parent=GpuUuid("GPU-a"), mig_index=0)
WHOLE = reading("GPU-a", 0, total=None, mig_mode=True)


def test_a_mig_device_is_leased_as_one_gpu_and_the_gpu_it_is_a_part_of_never() -> None:
    gpus = [stock(WHOLE, [], {}), stock(PART, [], {}), stock(reading("GPU-b", 1), [], {})]
    assert chosen(place(Claim(4 * G), gpus)) == ["MIG-a"]
    assert obstacles(place(Claim(4 * G), gpus[:1])) == [ObstacleKind.DIVIDED]
    assert not can_ever_hold(Claim(4 * G), gpus[0])


def test_a_job_of_several_gpus_never_gets_a_mig_device() -> None:
    second = replace(PART, uuid=GpuUuid("MIG-b"), mig_index=1)
    gpus = [stock(each, [], {}) for each in (WHOLE, PART, second, reading("GPU-b", 1))]
    refused = place(Claim(G, gpus=2), gpus)
    assert isinstance(refused, Refusal)
    assert [(each.label, each.kind) for each in refused.obstacles] == [
        ("0", ObstacleKind.DIVIDED),
        ("0:0", ObstacleKind.DIVIDED),
        ("0:1", ObstacleKind.DIVIDED),
    ]
    assert not can_ever_hold(Claim(G, gpus=2), gpus[1])
    assert chosen(place(Claim(G, gpus=2), [*gpus, stock(reading("GPU-c", 2), [], {})])) == [
        "GPU-b",
        "GPU-c",
    ]


def test_of_parts_that_fit_equally_the_first_on_its_gpu_is_taken() -> None:
    second = replace(PART, uuid=GpuUuid("MIG-0"), mig_index=1)
    assert chosen(place(Claim(G), [stock(second, [], {}), stock(PART, [], {})])) == ["MIG-a"]
