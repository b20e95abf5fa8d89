"""How much memory is asked for and kept free, by what was used before; some observers lie."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    ALICE,
    NOON,
    ended_job,
    running_job,
)
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, JobUsage, Outcome
from gpulease.domain.lease import Claim
from gpulease.domain.memory_estimate import (
    LONG_ENOUGH,
    PastRun,
    advised_size,
    advised_size_after_oom,
    learned_overhead,
    size_for,
    size_next_time,
)
from gpulease.units import GIB, MIB

sizes = st.integers(64 * MIB, 80 * GIB)
runs = st.builds(PastRun, sizes, sizes, st.booleans(), st.booleans())


def test_without_a_run_there_is_no_size() -> None:
    assert size_for([]) is None


def test_the_highest_use_of_two_runs_counts_with_a_margin() -> None:
    assert size_for([PastRun(8 * GIB, 3 * GIB), PastRun(8 * GIB, 48 * GIB // 10)]) == 6 * GIB


def test_the_largest_of_the_last_ten_successes_decides_however_odd_it_is() -> None:
    usual, large = PastRun(4 * GIB, 400 * MIB), PastRun(4 * GIB, 29 * GIB // 10)
    for runs in ([large, usual, usual], [usual, large, usual], [usual] * 9 + [large]):
        assert size_for(runs) == 3584 * MIB
    assert size_for([usual] * 10 + [large]) == 512 * MIB


def test_a_run_that_ran_out_of_memory_counts_at_once_and_as_one_run_afterwards() -> None:
    usual, short = PastRun(4 * GIB, 3 * GIB), PastRun(4 * GIB, 4 * GIB, True)
    assert size_for([short, *[usual] * 9]) == 5 * GIB
    assert size_for([usual, short, *[usual] * 8]) == 3584 * MIB
    enough = PastRun(5 * GIB, 45 * GIB // 10)
    assert size_for([enough, short, *[usual] * 8]) == 5 * GIB, "and with its new try as two"


def test_a_framework_that_takes_all_it_may_does_not_grow_from_run_to_run() -> None:
    assert size_for([PastRun(4 * GIB, 4 * GIB)]) == 4 * GIB
    assert size_for([PastRun(4 * GIB, 4 * GIB - 1)] * 5) == 4 * GIB


def test_a_lease_that_did_after_one_that_did_not_is_asked_for_again() -> None:
    assert size_for([PastRun(6 * GIB, GIB), PastRun(4 * GIB, 4 * GIB, True)]) == 6 * GIB


def test_a_run_that_was_stopped_for_a_gpu_it_did_not_lease_needs_no_more_memory() -> None:
    assert size_for([PastRun(4 * GIB, 2 * GIB, over_lease=True)]) == 2560 * MIB


@given(st.lists(runs, min_size=1, max_size=15))
def test_a_size_is_never_one_that_was_too_small_of_late_or_twice(
    known: list[PastRun],
) -> None:
    found = size_for(known)

    assert found is not None
    too_small = sorted(run.leased for run in known[:10] if run.fell_short)
    assert not known[0].fell_short or found > known[0].leased
    assert len(too_small) < 2 or found > too_small[-2]


@given(st.lists(runs, min_size=1, max_size=15))
def test_a_size_is_never_below_what_a_recent_run_needed_that_had_enough(
    known: list[PastRun],
) -> None:
    enough = [min(run.used, run.leased) for run in known[:10] if not run.fell_short]
    assert (size_for(known) or 0) >= max(enough, default=0)


@pytest.mark.parametrize(
    ("leased", "peak", "lacking", "wanted"),
    [
        (4 * GIB, None, None, 5 * GIB),
        (4 * GIB, 4 * GIB, 256 * MIB, 5 * GIB),
        (4 * GIB, None, 3 * GIB, 7680 * MIB),
        (512 * MIB, None, None, 640 * MIB),
        (40 * GIB, None, None, 50 * GIB),
        (4 * GIB, 6 * GIB, None, 7 * GIB),
    ],
)
def test_after_out_of_memory_a_quarter_more_or_what_lacked_is_advised(
    leased: int, peak: int | None, lacking: int | None, wanted: int
) -> None:
    assert advised_size_after_oom(leased, peak, lacking) == wanted


@given(sizes, sizes, st.none() | sizes)
def test_a_job_over_its_lease_gets_the_same_advice_or_more_when_it_runs_out_of_memory(
    leased: int, more: int, lacking: int | None
) -> None:
    peak = leased + more
    at_the_end = advised_size_after_oom(leased, peak, lacking)
    assert at_the_end >= advised_size(peak) > peak
    assert size_for([PastRun(leased, peak, out_of_memory=True)]) >= advised_size(peak)
    assert size_for([PastRun(leased, peak, over_lease=True)]) >= advised_size(peak)


def ended(
    used: int | None,
    outcome: Outcome = Outcome.EXITED,
    code: int = 0,
    ran_for: timedelta = timedelta(hours=1),
) -> Job:
    """Return a job that leased 8G."""
    job = Job(JobId(1), ALICE, "a", "a", Claim(8 * GIB), NOON)
    running = running_job(job)
    measured = replace(running, leases=tuple(replace(each, used=used) for each in running.leases))
    return ended_job(measured, outcome, code, NOON + ran_for)


def test_a_job_with_more_than_it_needed_is_advised_what_others_are_told() -> None:
    used = 31 * GIB // 10
    assert size_next_time(ended(used)) == advised_size(used) == 4 * GIB
    for outcome in (Outcome.CANCELLED, Outcome.TIME_LIMIT, Outcome.RELEASED):
        assert size_next_time(ended(used, outcome)) == 4 * GIB
    assert size_next_time(ended(used), 5 * GIB) == 5 * GIB
    assert size_next_time(ended(used), 8 * GIB) is None


@pytest.mark.parametrize(
    "job",
    [
        ended(None),
        ended(0),
        ended(7 * GIB),
        ended(GIB, code=1),
        ended(GIB, Outcome.SIGNALED),
        ended(9 * GIB, Outcome.OVER_LEASE),
        ended(GIB, ran_for=LONG_ENOUGH - timedelta(seconds=1)),
        replace(ended(GIB, code=0), usage=JobUsage(out_of_memory=True)),
        replace(ended(GIB), usage=JobUsage(size_reason="4G, since it used 3G")),
    ],
)
def test_nothing_is_advised_where_the_size_was_right_or_little_is_known(job: Job) -> None:
    assert size_next_time(job) is None


# What is kept free beside a pool.


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
