"""What is kept free beside a pool, by what was observed; some of the observers lie."""

from hypothesis import given
from hypothesis import strategies as st

from gpulease.domain.memory_estimate import learned_overhead
from gpulease.units import MIB

START = 700 * MIB
anything = st.integers(0, 2**50)
users = st.dictionaries(st.integers(1, 9), st.lists(anything, max_size=25), max_size=6)


def test_the_table_holds_until_enough_was_seen() -> None:
    assert learned_overhead(START, 1, {}) == START
    assert learned_overhead(START, 1, {1: [500 * MIB] * 2}) == START
    assert learned_overhead(START, 2, {1: [1900 * MIB]}) == START


def test_a_users_own_jobs_decide_for_that_user() -> None:
    assert learned_overhead(START, 1, {1: [500 * MIB] * 3}) == 560 * MIB
    assert learned_overhead(START, 1, {1: [900 * MIB, 500 * MIB, 500 * MIB]}) == 960 * MIB


def test_a_single_job_that_needed_more_decides_for_the_next_of_its_user() -> None:
    assert learned_overhead(START, 1, {1: [1869 * MIB]}) == 1920 * MIB


def test_one_odd_job_in_ten_does_not_count() -> None:
    assert learned_overhead(START, 1, {1: [2000 * MIB] + [500 * MIB] * 9}) == 560 * MIB


def test_what_one_or_two_others_saw_is_not_taken_over() -> None:
    seen = {2: [500 * MIB] * 5, 3: [500 * MIB] * 5}

    assert learned_overhead(START, 1, seen) == START
    assert learned_overhead(START, 1, seen | {4: [500 * MIB] * 5}) == 560 * MIB


@given(anything, users)
def test_a_figure_is_never_far_from_the_default(lie: int, seen: dict[int, list[int]]) -> None:
    found = learned_overhead(START, 1, {**seen, 1: [lie] * 5})

    assert START // 3 <= found <= START + 2048 * MIB + 16 * MIB


@given(anything)
def test_one_liar_moves_others_no_further_than_the_honest_are_apart(lie: int) -> None:
    honest = {2: [500 * MIB] * 5, 3: [520 * MIB] * 5, 4: [540 * MIB] * 5}

    found = learned_overhead(START, 1, honest | {9: [lie] * 20})

    assert learned_overhead(START, 2, honest) <= found <= learned_overhead(START, 4, honest)
