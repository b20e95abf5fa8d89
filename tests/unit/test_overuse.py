"""The rule of the watch: what it does about a lease that holds more than it was granted."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.domain.overuse import (
    MOST_EXCESS_OVERHEAD,
    Consequence,
    OveruseAction,
    OverusePolicy,
    OveruseState,
    excess_overhead,
    judge,
)

LEASE, TOLERANCE = 1000, 100
GRACE = timedelta(seconds=30)
STOPS = OverusePolicy(Consequence.STOP, TOLERANCE, GRACE)
WARNS = OverusePolicy(Consequence.WARN, TOLERANCE, GRACE)
ELASTIC = OverusePolicy(Consequence.STOP, TOLERANCE, GRACE, elastic=True)
OVER, EDGE = LEASE + TOLERANCE + 1, LEASE + TOLERANCE
N, W, S, C = OveruseAction.NOTHING, OveruseAction.WARN, OveruseAction.STOP, OveruseAction.CLEAR

Look = tuple[float, int | None, bool]
"""Seconds, use, and whether somebody waits."""


def play(
    policy: OverusePolicy, looks: Iterable[Look]
) -> tuple[list[OveruseAction], list[OveruseState]]:
    standing, steps, availabilities = OveruseState(), [], []
    for seconds, used, wanted in looks:
        standing, step = judge(
            LEASE, used, standing, policy, wanted=wanted, now=timedelta(seconds=seconds)
        )
        steps.append(step)
        availabilities.append(standing)
    return steps, availabilities


def looks(*uses: tuple[float, int | None]) -> list[Look]:
    return [(at, used, False) for at, used in uses]


@pytest.mark.parametrize(
    ("policy", "seen", "steps"),
    [
        pytest.param(STOPS, looks((0, LEASE), (1, EDGE), (2, 0)), [N, N, N], id="within"),
        pytest.param(STOPS, looks((0, EDGE), (1, OVER)), [N, W], id="the first look over warns"),
        pytest.param(STOPS, looks((0, OVER), (29.9, OVER)), [W, N], id="within the grace"),
        pytest.param(STOPS, looks((0, OVER), (30, OVER)), [W, S], id="after the grace"),
        pytest.param(
            STOPS, looks((0, OVER), (30, OVER), (31, OVER)), [W, S, N], id="stopped but once"
        ),
        pytest.param(
            STOPS,
            looks((0, OVER), (20, EDGE), (21, OVER), (40, OVER), (50, OVER), (51, OVER)),
            [W, N, N, W, N, S],
            id="back within starts anew; it is told again, though not at once",
        ),
        pytest.param(
            STOPS,
            looks((0, OVER), (1, EDGE), (400, OVER)),
            [W, N, W],
            id="told at once again after a while",
        ),
        pytest.param(
            STOPS,
            looks((0, OVER), (1, EDGE), (30, EDGE), (31, EDGE), (99, EDGE)),
            [W, N, N, C, N],
            id="told once that all is well when it has been so for a grace",
        ),
        pytest.param(
            STOPS,
            looks((0, OVER), (1, EDGE), (20, OVER), (21, EDGE), (40, EDGE), (51, EDGE)),
            [W, N, N, N, N, C],
            id="and not while it comes and goes",
        ),
        pytest.param(WARNS, looks((0, OVER), (1, EDGE), (99, EDGE)), [W, N, N], id="no threat"),
        pytest.param(
            STOPS,
            looks((0, OVER), (10, None), (1000, OVER), (1019, OVER), (1020, OVER)),
            [W, N, N, N, N],
            id="what nobody saw does not count as over",
        ),
        pytest.param(
            STOPS,
            looks((0, OVER), (20, OVER), (21, None), (1000, OVER), (1010, OVER)),
            [W, N, N, N, S],
            id="and does not make it forgotten",
        ),
        pytest.param(STOPS, looks((0, None), (100, None)), [N, N], id="unknown is not over"),
        pytest.param(
            STOPS,
            looks((0, OVER), (20, OVER), (21, EDGE), (26, OVER), (40, OVER), (41, OVER)),
            [W, N, N, W, N, S],
            id="a moment within its lease pays back that moment",
        ),
        pytest.param(
            STOPS,
            looks((0, OVER), (20, OVER), (21, EDGE), (41, EDGE), (42, OVER), (70, OVER)),
            [W, N, N, N, N, W],
            id="and as long as it was over all of it",
        ),
        pytest.param(WARNS, looks((0, OVER), (3000, OVER)), [W, N], id="warn alone"),
        pytest.param(ELASTIC, looks((0, OVER), (3000, OVER)), [N, N], id="elastic"),
        pytest.param(
            ELASTIC,
            [(0, OVER, False), (100, OVER, True), (129, OVER, True), (130, OVER, True)],
            [N, W, N, S],
            id="elastic until somebody waits, and then a whole grace",
        ),
        pytest.param(
            ELASTIC,
            [(0, OVER, True), (20, OVER, False), (40, OVER, True), (41, OVER, True)],
            [W, N, N, N],
            id="who waited has gone",
        ),
        pytest.param(
            ELASTIC,
            [(0, OVER, True), (20, OVER, False), (50, OVER, False)],
            [W, N, C],
            id="who waited has gone for good",
        ),
        pytest.param(
            OverusePolicy(Consequence.STOP, TOLERANCE, timedelta(0)),
            looks((0, OVER), (1, OVER)),
            [W, S],
            id="without a grace it is told all the same",
        ),
    ],
)
def test_the_table(policy: OverusePolicy, seen: Sequence[Look], steps: list[OveruseAction]) -> None:
    assert play(policy, seen)[0] == steps


USES = st.none() | st.integers(0, 3 * LEASE) | st.sampled_from([EDGE, OVER])
SPANS = st.floats(0, 100) | st.sampled_from([1.0, 15.0, 30.0])
POLICIES = st.builds(
    OverusePolicy,
    st.sampled_from(Consequence),
    st.sampled_from([0, TOLERANCE]),
    st.sampled_from([timedelta(0), GRACE, timedelta(hours=1)]),
    st.booleans(),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Look]:
    at, seen = 0.0, []
    for span, used, wanted in draw(
        st.lists(st.tuples(SPANS, USES, st.booleans()), min_size=1, max_size=40)
    ):
        at += span
        seen.append((at, used, wanted))
    return seen


def is_over(policy: OverusePolicy, look: Look) -> bool:
    used = look[1]
    return used is not None and used > LEASE + policy.tolerance and (look[2] or not policy.elastic)


@given(POLICIES, histories())
def test_no_job_is_stopped_before_it_was_over_for_a_whole_grace_and_told(
    policy: OverusePolicy, seen: list[Look]
) -> None:
    steps, _ = play(policy, seen)
    for number, step in enumerate(steps):
        if step is not OveruseAction.STOP:
            continue
        assert policy.consequence is Consequence.STOP
        back = [
            each
            for each in range(number)
            if seen[each][1] is not None and not is_over(policy, seen[each])
        ]
        first = back[-1] + 1 if back else 0
        assert OveruseAction.WARN in steps[first:number]
        over_for = sum(
            seen[each + 1][0] - seen[each][0]
            for each in range(number)
            if is_over(policy, seen[each]) and is_over(policy, seen[each + 1])
        )
        assert over_for >= policy.grace.total_seconds() - 1e-3


@given(st.floats(3, 20), st.floats(1, 19))
def test_who_is_over_for_longer_than_within_is_stopped_however_often_it_goes_back(
    over: float, within: float
) -> None:
    within = min(within, over - 1)
    at, seen = 0.0, []
    for _ in range(250):
        seen += looks((at, OVER), (at + over, OVER), (at + over, EDGE), (at + over + within, EDGE))
        at += over + within
    assert OveruseAction.STOP in play(STOPS, seen)[0]


@given(POLICIES, histories())
def test_only_what_is_seen_to_be_over_has_consequences(
    policy: OverusePolicy, seen: list[Look]
) -> None:
    steps, availabilities = play(policy, seen)
    for look, step, standing in zip(seen, steps, availabilities, strict=True):
        if not is_over(policy, look):
            assert step in (OveruseAction.NOTHING, OveruseAction.CLEAR)
        if look[1] is not None and not is_over(policy, look):
            assert standing.over_for is None


@given(POLICIES, histories())
def test_what_nobody_saw_changes_nothing_but_that_it_was_not_seen(
    policy: OverusePolicy, seen: list[Look]
) -> None:
    _, availabilities = play(policy, seen)
    for before, after, look in zip(
        [OveruseState(), *availabilities], availabilities, seen, strict=False
    ):
        if look[1] is None:
            assert after.over_for == before.over_for
            assert after.warned == before.warned


@given(POLICIES, histories())
def test_the_first_look_over_warns_unless_it_was_told_of_late(
    policy: OverusePolicy, seen: list[Look]
) -> None:
    steps, availabilities = play(policy, seen)
    first = next((number for number, look in enumerate(seen) if is_over(policy, look)), None)
    if first is not None:
        assert steps[first] is OveruseAction.WARN
        assert availabilities[first].left(policy) == (
            policy.grace if policy.consequence is Consequence.STOP else None
        )


EXCUSED = OVER + 400


@pytest.mark.parametrize(
    ("seen", "steps"),
    [
        pytest.param([(0, 400, OVER), (1, 400, OVER), (999, 400, OVER)], [W, N, N], id="never"),
        pytest.param(
            [(0, 0, OVER), (1, 400, OVER), (99, 400, OVER)], [W, C, N], id="reported a second late"
        ),
        pytest.param(
            [(0, 400, OVER), (99, 400, EXCUSED), (100, 400, EXCUSED), (129, 400, EXCUSED)],
            [W, W, N, S],
            id="more than that is stopped, after a notice and a whole grace",
        ),
        pytest.param(
            [(0, 0, OVER), (20, 0, OVER), (21, 400, OVER), (22, 0, OVER), (33, 0, OVER)],
            [W, N, C, W, S],
            id="a moment of it pays back that moment",
        ),
    ],
)
def test_what_lies_beside_a_pool_within_its_limit_is_told_and_stops_nothing(
    seen: Sequence[tuple[float, int, int]], steps: list[OveruseAction]
) -> None:
    standing, found = OveruseState(), []
    for seconds, overhead, used in seen:
        standing, step = judge(
            LEASE,
            used,
            standing,
            STOPS,
            wanted=True,
            now=timedelta(seconds=seconds),
            overhead=overhead,
        )
        found.append(step)
        assert (standing.left(STOPS) is None) == (used <= EDGE + overhead)

    assert found == steps


@given(
    st.integers(1, 80 * 2**30),
    st.lists(st.tuples(st.integers(0, 80 * 2**30), st.integers(0, 80 * 2**30)), max_size=5),
    st.data(),
)
def test_memory_in_pools_and_of_other_processes_is_never_taken_for_overhead(
    lease: int, processes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """`processes` are the limits of pools, and what lies beside them."""
    pools = [data.draw(st.integers(0, limit)) for limit, _ in processes]
    used = [pool + beside for pool, (_, beside) in zip(pools, processes, strict=True)]
    reserved = max(0, lease - sum(limit for limit, _ in processes))

    found = excess_overhead(
        lease, [(each, limit) for each, (limit, _) in zip(used, processes, strict=True)]
    )

    assert 0 <= found <= MOST_EXCESS_OVERHEAD
    assert found <= max(0, sum(beside for _, beside in processes) - reserved)
    if len(processes) == 1 and processes[0][0] <= lease:
        assert found == min(max(0, used[0] - lease), MOST_EXCESS_OVERHEAD)
