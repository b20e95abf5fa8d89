"""The users of the queue side by side: shares, and whose turn it is."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fakes import (
    NOON,
    G,
    reading,
    running_job,
)
from gpulease.domain.explain import UserStanding, standings
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Claim
from gpulease.domain.limits import UserLimits
from gpulease.domain.past_jobs import PastUse
from gpulease.domain.plan import Plan, plan
from gpulease.domain.snapshot import Snapshot

HOUR = timedelta(hours=1)
USERS = {"alice": 1001, "bob": 1002, "carol": 1003}


def waiting(number: int, user: str, memory: int = 8 * G) -> Job:
    owner = Owner(USERS[user], USERS[user], user)
    return Job(JobId(number), owner, "job", "true", Claim(memory), NOON)


def running(number: int, user: str, memory: int = 8 * G, span: timedelta = HOUR) -> Job:
    return running_job(waiting(number, user, memory), at=NOON - span)


def decided(jobs: Sequence[Job], past: dict[str, float] | None = None, **fields: object) -> Plan:
    """Return a plan for one GPU of 8 GiB; `past` is the use of the last hour in GPUs."""
    use = PastUse(timedelta(days=1).total_seconds())
    now = NOON.timestamp()
    for user, rate in (past or {}).items():
        use.add(user, rate, now - 3600, now)
    snapshot = Snapshot(jobs, [reading()], NOON, use=use)
    return plan(replace(snapshot, **fields))  # type: ignore[arg-type]


def by_user(found: Sequence[UserStanding]) -> dict[str, UserStanding]:
    return {each.user: each for each in found}


def test_the_user_who_has_used_less_has_the_next_turn() -> None:
    jobs = [running(1, "carol"), waiting(2, "alice"), waiting(3, "bob")]

    found = standings(decided(jobs, {"alice": 1.0, "bob": 0.1}))

    assert [(each.user, each.turn) for each in found] == [("bob", 1), ("alice", 2), ("carol", None)]
    users = by_user(found)
    assert users["bob"].next_job == jobs[2]
    assert users["bob"].factor <= users["alice"].factor < users["carol"].factor


def test_the_turns_are_the_order_in_which_a_plan_starts_jobs() -> None:
    jobs = [running(1, "carol"), waiting(2, "alice"), waiting(3, "bob")]
    past = {"alice": 1.0, "bob": 0.1}
    first = standings(decided(jobs, past))[0]

    # The GPU is free, and takes one job.
    ((job, _),) = decided(jobs[1:], past).grants

    assert first.next_job is not None
    assert job == first.next_job.id


def test_a_user_has_no_turn_with_jobs_that_may_not_start() -> None:
    held = waiting(1, "alice")
    held = replace(held, queue=replace(held.queue, held=True))

    users = by_user(standings(decided([held, waiting(2, "bob")])))

    assert (users["alice"].turn, users["bob"].turn) == (None, 1)


def test_what_is_held_and_waits_is_counted_by_user() -> None:
    jobs = [running(1, "alice", 3 * G), running(2, "alice", 2 * G), waiting(3, "bob")]

    users = by_user(standings(decided(jobs)))

    assert (users["alice"].held, users["alice"].running, users["alice"].waiting) == (5 * G, 2, 0)
    assert (users["bob"].held, users["bob"].running, users["bob"].waiting) == (0, 0, 1)


def test_use_is_in_byte_seconds_and_includes_what_is_held() -> None:
    users = by_user(standings(decided([running(1, "alice", 4 * G)], {"bob": 1.0})))

    # An hour ago is a small part of the half-life.
    assert users["alice"].use == pytest.approx(4 * G * 3600, rel=0.02)
    assert users["bob"].use == pytest.approx(8 * G * 3600, rel=0.02)


def test_a_user_over_a_limit_has_no_turn() -> None:
    jobs = [running(1, "alice", 4 * G), waiting(2, "alice", 4 * G), waiting(3, "bob")]

    users = by_user(standings(decided(jobs, limits={USERS["alice"]: UserLimits(most_running=1)})))

    assert (users["alice"].turn, users["alice"].waiting) == (None, 1)
    assert users["bob"].turn == 1


@given(some.lists(some.tuples(some.sampled_from(sorted(USERS)), some.booleans()), max_size=12))
def test_shares_add_up_to_at_most_one_and_turns_count_from_one(
    jobs: list[tuple[str, bool]],
) -> None:
    made = [
        running(number, user, G // 2) if holds else waiting(number, user)
        for number, (user, holds) in enumerate(jobs, 1)
    ]

    found = standings(decided(made, {"alice": 0.5}))

    assert sum(each.share for each in found) <= 1.0 + 1e-9
    turns = [each.turn for each in found if each.turn is not None]
    assert turns == list(range(1, len(turns) + 1))
    assert {each.user for each in found} >= {user for user, _ in jobs}
