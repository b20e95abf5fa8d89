"""Predictions from earlier runs, and the decayed use of users."""

from datetime import timedelta

import pytest

from fakes import G
from gpulease.domain.job import CommandFingerprint
from gpulease.domain.lease import Claim
from gpulease.domain.past_jobs import (
    ALL_JOBS,
    Keys,
    PastUse,
    RunTimes,
    Shares,
    keys_of,
    limit_class,
)

HOUR = timedelta(hours=1)
DAY_S = 86400.0


def keys(
    user: str = "alice",
    gpus: int = 1,
    limit: timedelta | None = None,
    command: tuple[str, str] | None = None,
    share: float = 1.0,
) -> Keys:
    fingerprint = None if command is None else CommandFingerprint(*command)
    return keys_of(user, Claim(G, gpus, time_limit=limit), share, fingerprint)


def test_limits_fall_into_five_classes() -> None:
    limits = [HOUR, HOUR * 1.5, 4 * HOUR, 24 * HOUR, 168 * HOUR, 169 * HOUR, None]
    assert [limit_class(each) for each in limits] == [0, 1, 1, 2, 3, 4, 4]


def test_nothing_is_predicted_before_the_first_end() -> None:
    assert RunTimes().seconds(keys()) is None
    assert RunTimes().utilization(keys()) is None


def test_the_most_specific_series_with_two_runs_predicts() -> None:
    history = RunTimes()
    history.record(keys(command=("train", "train --lr 1")), 100.0)
    history.record(keys(command=("train", "train --lr 1")), 300.0)
    history.record(keys(command=("train", "train --lr 2")), 5000.0)
    assert history.seconds(keys(command=("train", "train --lr 1"))) == 200.0
    assert history.seconds(keys(command=("train", "train --lr 2"))) == 1800.0, "a similar command"
    assert history.seconds(keys(command=("other", "other"))) == 1800.0, "the same size"
    assert history.seconds(keys(gpus=2)) == 1800.0, "the same user and class of limit"


def test_runs_of_others_count_where_nothing_is_known_of_the_user() -> None:
    history = RunTimes()
    for seconds in (100.0, 300.0):
        history.record(keys("bob", limit=HOUR), seconds)
    history.record(keys("alice", limit=HOUR), 10.0)
    assert history.seconds(keys("alice", limit=HOUR)) == pytest.approx(410 / 3)
    history.record(keys("alice", limit=HOUR), 20.0)
    assert history.seconds(keys("alice", limit=HOUR)) == 15.0
    assert history.seconds(keys("carol")) == pytest.approx(430 / 4), "another class: all jobs"


def test_only_the_last_runs_of_a_series_count() -> None:
    history = RunTimes(samples=3)
    for seconds in (9000.0, 1.0, 2.0, 3.0):
        history.record((ALL_JOBS,), seconds)
    assert history.seconds((ALL_JOBS,)) == 2.0


def test_utilization_is_predicted_from_one_run() -> None:
    history = RunTimes()
    history.record(keys("alice"), 100.0, 0.4)
    history.record(keys("alice"), 100.0)
    assert history.utilization(keys("alice")) == 0.4
    assert history.utilization(keys("bob")) == 0.4


def test_use_halves_with_each_half_life() -> None:
    use = PastUse(DAY_S)
    use.add("alice", 2.0, 0.0, 1.0)
    assert use.at(1.0)["alice"] == pytest.approx(2.0, rel=1e-4)
    assert use.at(1.0 + DAY_S)["alice"] == pytest.approx(1.0, rel=1e-4)
    use.add("bob", 1.0, 100 * DAY_S, 100 * DAY_S + 1)
    assert use.at(100 * DAY_S + 1)["alice"] == pytest.approx(2 * 0.5**100, rel=1e-3)


def test_use_in_the_future_does_not_grow() -> None:
    """A wrong clock may have stored it; 2,000 half-lives would be too large for a float."""
    use = PastUse(60.0)
    use.add("alice", 1.0, 200_000.0, 200_060.0)
    assert use.at(80_000.0) == use.at(200_060.0)


def test_the_order_of_ends_does_not_matter_for_use() -> None:
    spans = [(0.0, 3 * DAY_S), (DAY_S, 2 * DAY_S), (50 * DAY_S, 50.5 * DAY_S)]
    forward, backward = PastUse(DAY_S), PastUse(DAY_S)
    for begin, end in spans:
        forward.add("alice", 1.0, begin, end)
    for begin, end in reversed(spans):
        backward.add("alice", 1.0, begin, end)
    assert forward.at(51 * DAY_S)["alice"] == pytest.approx(backward.at(51 * DAY_S)["alice"])


def test_an_equal_share_has_the_factor_one_and_a_start_changes_no_other() -> None:
    shares = Shares({"alice": 30.0, "bob": 10.0}, active=2, least_total=1.0, floor=0.05)
    assert (shares.factor("alice"), shares.factor("bob")) == (1.5, 0.5)
    assert shares.factor("carol") == 0.05
    shares.add("alice", 20.0)
    assert (shares.factor("alice"), shares.factor("bob")) == (2.5, 0.5)
