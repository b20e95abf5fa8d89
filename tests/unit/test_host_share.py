"""Which cores a job gets, and what its share is when the machine is full."""

from hypothesis import given
from hypothesis import strategies as st

from gpulease.domain.host_share import choose_cores, host_share

G = 1 << 30
TWO_NODES = range(16)
"""Cores 0-3 and their second threads 8-11 are of one NUMA node, the others of the second."""
SIBLINGS = {cpu: cpu % 8 for cpu in TWO_NODES}
FIRST, SECOND = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}


def test_cores_are_near_the_gpu_and_whole() -> None:
    assert choose_cores(4, TWO_NODES, SECOND, [], SIBLINGS) == (4, 5, 12, 13)


def test_free_cores_elsewhere_come_before_held_ones_near_the_gpu() -> None:
    held = [{4, 5, 12, 13}, {6, 7, 14}]
    assert choose_cores(2, TWO_NODES, SECOND, held, SIBLINGS) == (0, 15)


def test_a_core_of_which_another_job_has_a_thread_comes_after_idle_ones() -> None:
    assert choose_cores(2, TWO_NODES, FIRST, [{0}], SIBLINGS) == (1, 9)


def test_without_free_cores_those_of_the_fewest_jobs_are_shared() -> None:
    held = [{0, 1}, {2, 3}, {0, 1}]
    assert choose_cores(2, range(4), (), held, {}) == (2, 3)
    assert choose_cores(8, range(4), (), held, {}) == (0, 1, 2, 3)


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=40))
def test_no_two_jobs_have_a_core_while_there_are_enough(wanted: list[tuple[int, bool]]) -> None:
    running: list[set[int]] = []
    for count, ends in wanted:
        free = len(TWO_NODES) - sum(map(len, running))
        taken = set(choose_cores(count, TWO_NODES, FIRST, running, SIBLINGS))
        assert len(taken) == count
        if count <= free:
            assert not any(taken & held for held in running)
            running.append(taken)
        if ends and running:
            running.pop(0)


def test_a_job_gets_the_part_of_the_machine_that_belongs_to_its_part_of_a_gpu() -> None:
    # Half of one of four GPUs, of 32 cores and 256G.
    share = host_share([0.5], 4, (32, 256 * G), (None, None))
    assert (share.weight, share.protected) == (400, 32 * G)
    whole = host_share([1.0] * 4, 4, (32, 256 * G), (None, None))
    assert (whole.weight, whole.protected) == (3200, 256 * G)


def test_leased_cores_and_ram_count_in_place_of_the_part_of_the_gpu() -> None:
    share = host_share([0.5], 4, (32, 256 * G), (2, 8 * G))
    assert (share.weight, share.protected) == (2000, 8 * G)


def test_weights_are_those_that_the_kernel_takes() -> None:
    for cores in (1, 64, 256, 1024):
        for own in (None, 1, cores):
            for part in (0.001, 1.0):
                assert 1 <= host_share([part], 8, (cores, G), (own, None)).weight <= 10_000
