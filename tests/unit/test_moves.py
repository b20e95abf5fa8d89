"""Where moved jobs go: before the jobs named, and never before those of other users."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ALICE, BOB, NOON, FakeClock, G, MemoryStore, order, reading
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import State
from gpulease.domain.plan import order_after, plan
from gpulease.domain.queue import Moves
from gpulease.domain.queue_options import PolicyName, QueueOptions, QueuePolicy
from gpulease.domain.snapshot import Snapshot
from gpulease.errors import GpuleaseError
from gpulease.service.editing import Move, move

FULL = reading(used=8 * G)
POLICIES = (PolicyName.FAIR, PolicyName.FIFO, PolicyName.EASY)
every_policy = pytest.mark.parametrize("policy", POLICIES)
LONG, SHORT = timedelta(hours=20), timedelta(minutes=10)


def queue(*submissions: tuple[object, timedelta]) -> MemoryStore:
    """Return a store with waiting jobs of these owners and time limits."""
    store = MemoryStore()
    with store.write() as tx:
        for owner, limit in submissions:
            tx.add(order(G, owner=owner, time_limit=limit), NOON)  # type: ignore[arg-type]
    return store


def order_of(jobs: Sequence[Job], policy: PolicyName) -> list[JobId]:
    decided = plan(Snapshot(jobs, (FULL,), NOON, policy=QueuePolicy(name=policy)))
    assert not decided.grants
    return [job.id for job in order_after(decided)]


def moved(store: MemoryStore, job: int, before: int | None, *, by_admin: bool = False) -> None:
    uid = 0 if by_admin else 1000
    wanted = Move(before if before is None else JobId(before), uid, "x", is_admin=by_admin)
    move(store, [JobId(job)], wanted, FakeClock())


@every_policy
def test_an_admin_lets_a_job_rise_before_another_or_before_all(policy: PolicyName) -> None:
    store = queue((ALICE, SHORT), (BOB, SHORT), (BOB, LONG), (ALICE, LONG))
    before = order_of(store.live(), policy)
    moved(store, 4, before[0], by_admin=True)
    assert order_of(store.live(), policy) == [4, *(job for job in before if job != 4)]
    for first in (3, 2, 3, 1):
        moved(store, first, None, by_admin=True)
        assert order_of(store.live(), policy)[0] == first, "the latest move wins"
    moved(store, 4, 1, by_admin=True)
    assert order_of(store.live(), policy)[:2] == [4, 1]


@pytest.mark.parametrize("by_admin", [False, True])
@pytest.mark.parametrize("circle", [False, True])
def test_a_chain_of_ten_thousand_moves_takes_as_many_steps(by_admin: bool, circle: bool) -> None:
    """Each job was moved before the previous one; in a circle, the first before the last."""
    number = 10_000
    computed: list[JobId] = []

    def own_merit(job: Job) -> float:
        computed.append(job.id)
        return float(job.id)

    jobs = {}
    for job_id in map(JobId, range(1, number + 1)):
        before = JobId(number) if circle and job_id == 1 else JobId(job_id - 1)
        options = QueueOptions(moved_before=before or None, moved_by_admin=by_admin)
        jobs[job_id] = replace(order(G).queued(job_id, NOON), queue=options)
    moved = [job for job in jobs.values() if job.queue.moved_before is not None]
    moves = Moves(moved, jobs, own_merit, lambda _: 1.0)

    merits = [moves.merit(job) for job in jobs.values()]

    assert sorted(computed) == list(jobs), "each was computed once"
    assert circle or all(before < after for before, after in pairwise(merits))


_MOVES = st.lists(
    st.tuples(st.integers(1, 8), st.none() | st.integers(1, 8), st.booleans()), max_size=12
)


@every_policy
@given(
    jobs=st.lists(st.tuples(st.sampled_from((ALICE, BOB)), st.sampled_from((SHORT, LONG))),
                  min_size=2, max_size=8),
    moves=_MOVES,
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_any_moves_of_a_user_are_in_force_and_delay_nobody_else(
    policy: PolicyName, jobs: list[tuple[object, timedelta]], moves: list[tuple[int, int, bool]]
) -> None:
    store = queue(*jobs)
    before = order_of(store.live(), policy)
    for job, target, _ in moves:
        if job > len(jobs) or jobs[job - 1][0] is BOB:
            continue
        with suppress(GpuleaseError):
            moved(store, job, target)
    live = {job.id: job for job in store.live()}
    after = order_of(store.live(), policy)
    for job in live.values():
        target = job.queue.moved_before
        if target == 0:
            behind = [each.id for each in live.values() if each.owner == job.owner]
        else:
            behind = [] if target is None else [target]
        assert all(after.index(job.id) <= after.index(each) for each in behind), (job.id, behind)
        if job.owner is BOB:
            assert after.index(job.id) <= before.index(job.id)
    assert sorted(after) == sorted(before)
    unmoved = [replace(job, queue=replace(job.queue, moved_before=None)) for job in live.values()]
    assert order_of(unmoved, policy) == before
    assert all(job.state is State.QUEUED for job in live.values())
