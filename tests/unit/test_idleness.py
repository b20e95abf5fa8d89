"""The rule about leases under which nothing happens while others wait."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.domain.idle import (
    Activity,
    IdleAction,
    IdlePolicy,
    IdleState,
    Release,
    judge_idleness,
)

AFTER, GRACE = timedelta(seconds=100), timedelta(seconds=50)
RELEASES = IdlePolicy(Release.RELEASE, AFTER, GRACE)
WARNS = IdlePolicy(Release.WARN, AFTER, GRACE)
OFF = IdlePolicy(Release.OFF, AFTER, GRACE)
STILL, COMPUTES, GROWN = (Activity(0, 7),), (Activity(3, 7),), (Activity(0, 8),)
UNKNOWN, UNSEEN = (Activity(None, 7),), (Activity(0, None),)
N, W, R = IdleAction.NOTHING, IdleAction.WARN, IdleAction.RELEASE

Look = tuple[float, tuple[Activity, ...], bool, bool]
"""Seconds, what is seen, whether somebody waits, and whether it is kept."""


def play(policy: IdlePolicy, looks: Iterable[Look]) -> tuple[list[IdleAction], list[IdleState]]:
    rest, steps, rests = IdleState(), [], []
    for seconds, seen, wanted, kept in looks:
        now = timedelta(seconds=seconds)
        rest, step = judge_idleness(seen, rest, policy, wanted=wanted, kept=kept, now=now)
        steps.append(step)
        rests.append(rest)
    return steps, rests


def looks(*seen: tuple[float, tuple[Activity, ...]], wanted: bool = True) -> list[Look]:
    return [(at, each, wanted, False) for at, each in seen]


@pytest.mark.parametrize(
    ("policy", "seen", "steps"),
    [
        pytest.param(
            RELEASES,
            looks((0, STILL), (1, STILL), (100, STILL), (101, STILL), (150, STILL), (151, STILL)),
            [N, N, N, W, N, R],
            id="told after the time, released after the grace",
        ),
        pytest.param(
            RELEASES,
            looks((0, STILL), (1, STILL), (101, STILL), (151, STILL), (152, STILL)),
            [N, N, W, R, N],
            id="released but once",
        ),
        pytest.param(
            RELEASES,
            looks((0, STILL), (1, STILL), (101, STILL), (120, COMPUTES), (130, STILL)),
            [N, N, W, N, N],
            id="who computes is not idle",
        ),
        pytest.param(
            RELEASES,
            looks((0, STILL), (1, STILL), (90, GROWN), (101, GROWN), (102, GROWN)),
            [N, N, N, N, N],
            id="who takes memory is not idle",
        ),
        pytest.param(
            RELEASES,
            looks((0, UNKNOWN), (1, UNKNOWN), (1000, UNKNOWN)),
            [N, N, N],
            id="unknown is not idle",
        ),
        pytest.param(
            RELEASES, looks((0, UNSEEN), (1, UNSEEN), (1000, UNSEEN)), [N, N, N], id="nor unseen"
        ),
        pytest.param(
            RELEASES,
            looks((0, STILL), (1, STILL), (1000, STILL), wanted=False),
            [N, N, N],
            id="nobody waits",
        ),
        pytest.param(
            RELEASES,
            [
                (0, STILL, False, False),
                (1, STILL, False, False),
                (500, STILL, True, False),
                (520, STILL, False, False),
                (560, STILL, True, False),
                (609, STILL, True, False),
                (610, STILL, True, False),
            ],
            [N, N, W, N, W, N, R],
            id="who waited has gone, and the next one has the grace run anew",
        ),
        pytest.param(
            RELEASES,
            [
                (0, STILL, True, False),
                (1, STILL, True, False),
                (101, STILL, True, False),
                (102, STILL, True, True),
                (300, STILL, True, True),
                (301, STILL, True, False),
                (401, STILL, True, False),
            ],
            [N, N, W, N, N, N, W],
            id="kept, and counted anew afterwards",
        ),
        pytest.param(
            WARNS,
            looks((0, STILL), (1, STILL), (101, STILL), (1000, STILL)),
            [N, N, W, N],
            id="warn alone",
        ),
        pytest.param(OFF, looks((0, STILL), (1, STILL), (1000, STILL)), [N, N, N], id="off"),
        pytest.param(
            RELEASES,
            looks((0, STILL * 2), (1, STILL * 2), (200, STILL + COMPUTES), (201, STILL * 2)),
            [N, N, N, N],
            id="one GPU that computes is enough",
        ),
    ],
)
def test_the_table(policy: IdlePolicy, seen: Sequence[Look], steps: list[IdleAction]) -> None:
    assert play(policy, seen)[0] == steps


@st.composite
def histories(draw: st.DrawFn) -> list[Look]:
    sights = st.sampled_from([STILL, STILL, STILL, COMPUTES, GROWN, UNKNOWN, UNSEEN])
    span = st.sampled_from([1.0, 30.0, 60.0, 120.0])
    often = st.sampled_from([True, True, True, False])
    at, seen = 0.0, []
    for after, each, wanted, unkept in draw(
        st.lists(st.tuples(span, sights, often, often), min_size=1, max_size=40)
    ):
        at += after
        seen.append((at, each, wanted, not unkept))
    return seen


@given(st.sampled_from([RELEASES, WARNS, OFF]), histories())
def test_nothing_is_released_but_after_a_warning_and_a_grace_of_nothing_happening(
    policy: IdlePolicy, seen: list[Look]
) -> None:
    steps, _ = play(policy, seen)
    for number, step in enumerate(steps):
        if step is not R:
            continue
        assert policy.release is Release.RELEASE
        told = max(each for each in range(number) if steps[each] is W)
        assert seen[number][0] - seen[told][0] >= GRACE.total_seconds()
        for at, each, wanted, kept in seen[told : number + 1]:
            assert (each in (STILL, GROWN), wanted, kept) == (True, True, False), at


@given(histories())
def test_whoever_is_kept_or_busy_or_unknown_starts_from_nothing(seen: list[Look]) -> None:
    _, rests = play(RELEASES, seen)
    for (_, each, _, kept), rest in zip(seen, rests, strict=True):
        if kept or each in (COMPUTES, UNKNOWN, UNSEEN):
            assert (rest.idle_for, rest.warned_for) == (None, None)
