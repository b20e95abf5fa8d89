"""What frameworks take beside their pools, as gpulease assumes before it has seen anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.worker.overhead import FRAMEWORKS, MIB, default_overhead

frameworks = st.sampled_from(FRAMEWORKS)


@given(frameworks, st.integers(2, 16), st.sampled_from([None, "470.82", "610.1"]))
def test_working_on_several_gpus_costs_each_of_them_the_buffers_of_nccl(
    framework: str, gpus: int, driver: str | None
) -> None:
    one = default_overhead(framework, 1, "H100", driver)

    assert default_overhead(framework, gpus, "H100", driver) - one == 700 * MIB


@given(frameworks, st.integers(1, 16), st.text(max_size=8), st.text(max_size=8) | st.none())
def test_there_is_a_figure_for_every_model_and_driver(
    framework: str, gpus: int, model: str, driver: str | None
) -> None:
    assert default_overhead(framework, gpus, model, driver) > 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_driver_that_loads_all_kernels_at_once_costs_more(framework: str) -> None:
    lazy = default_overhead(framework, 1, driver="515.43.04")

    assert default_overhead(framework, 1, driver="510.108.03") > lazy
    assert default_overhead(framework, 1, driver=None) == lazy


def test_an_unknown_framework_has_no_made_up_figure() -> None:
    with pytest.raises(KeyError):
        default_overhead("caffe", 1)
