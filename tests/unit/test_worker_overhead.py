"""What is left of a lease for a framework's pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.worker.overhead import (
    MIB,
    OUTSIDE_THE_POOL,
    SMALLEST_POOL,
    outside_the_pool,
    pool_limit,
    smallest_lease,
)

frameworks = st.sampled_from(sorted(OUTSIDE_THE_POOL))
gpu_counts = st.integers(1, 16)


@given(frameworks, st.integers(0, 2**40), gpu_counts)
def test_a_pool_and_what_lies_outside_never_exceed_a_lease_that_holds_both(
    framework: str, lease: int, gpus: int
) -> None:
    pool = pool_limit(framework, lease, gpus)

    assert pool == 0 or pool + outside_the_pool(framework, gpus) == lease
    assert pool >= 0


@given(frameworks, gpu_counts)
def test_the_smallest_lease_leaves_the_smallest_pool(framework: str, gpus: int) -> None:
    assert pool_limit(framework, smallest_lease(framework, gpus), gpus) == SMALLEST_POOL


@given(frameworks, st.integers(2, 16))
def test_working_on_several_gpus_costs_each_of_them_the_buffers_of_nccl(
    framework: str, gpus: int
) -> None:
    assert outside_the_pool(framework, gpus) - outside_the_pool(framework, 1) == 700 * MIB


def test_an_unknown_framework_has_no_made_up_limit() -> None:
    with pytest.raises(KeyError):
        pool_limit("caffe", 2**30, 1)
