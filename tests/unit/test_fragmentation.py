"""Which free memory is of use to typical jobs, and the placement that keeps it so."""

import pytest

from fakes import G, reading
from gpulease.domain.choice import best_fit
from gpulease.domain.gpu import GpuMemory, GpuUuid, JobId, LedgerEntry, build_ledger
from gpulease.domain.lease import Claim
from gpulease.domain.placement import Placement, place
from gpulease.replay.engine import Workload, fragmentation_gradient, points, typical

HALF_AND_HALF = Workload.of([(4 * G, 0.5), (1 * G, 0.5)])


def gpus(*leased: int) -> list[GpuMemory]:
    """Return ledgers of 8 GiB GPUs with so many GiB leased on each."""
    return [
        build_ledger(
            reading(f"GPU-{index}", index),
            [LedgerEntry(JobId(index + 1), size * G)] if size else [],
            {},
        )
        for index, size in enumerate(leased)
    ]


def on(uuid: str) -> Placement:
    return Placement(((GpuUuid(uuid), 1 * G),))


@pytest.mark.parametrize(
    ("free", "fragments"), [(8 * G, 0), (4 * G, 0), (3 * G, 1.5 * G), (G - 1, G - 1), (0, 0)]
)
def test_memory_is_a_fragment_for_the_jobs_that_ask_for_more(free: int, fragments: float) -> None:
    assert HALF_AND_HALF.fragments(free) == fragments


def test_the_most_frequent_shapes_are_typical() -> None:
    assert typical({"rare": 4, "often": 60, "sometimes": 36}) == {
        "often": 60 / 96,
        "sometimes": 36 / 96,
    }


def test_a_placement_that_leaves_no_fragment_is_preferred_to_the_best_fit() -> None:
    claim, partly = Claim(1 * G), gpus(4, 3)  # 4 and 5 GiB are free
    gradient = place(claim, partly, fragmentation_gradient(HALF_AND_HALF))

    assert place(claim, partly, best_fit) == on("GPU-0")
    assert gradient == on("GPU-1")


def test_equal_gradients_go_to_the_best_fit() -> None:
    score = fragmentation_gradient(HALF_AND_HALF)

    assert place(Claim(1 * G), gpus(0, 2, 1), score) == on("GPU-1")


def test_differences_that_do_not_matter_get_equal_points() -> None:
    assert points(0) == points(0.001) == 50
    assert points(-1) < points(0) < points(1)
