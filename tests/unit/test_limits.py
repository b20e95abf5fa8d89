"""The limits of users: what waits, what is refused, and what counts."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fakes import (
    ALICE,
    BOB,
    NOON,
    FakeClock,
    FakeGpus,
    G,
    MemoryStore,
    ended_job,
    granted_job,
    kept,
)
from fakes import order as an_order
from goldens import mentions
from gpulease.domain.explain import Explanations
from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Trigger
from gpulease.domain.limits import (
    WEEK,
    Beyond,
    GroupLimits,
    RecentUse,
    UserLimits,
)
from gpulease.domain.plan import Plan, why_waiting
from gpulease.domain.queue_options import Indices, QueueOptions, QueuePolicy, WantedDependency
from gpulease.errors import BadValue, CannotLease, NoRoomNow, TooMany
from gpulease.service.jobs import extend
from gpulease.service.observation import Observation
from gpulease.service.ports import Event, Policy, Submission
from gpulease.service.queue_state import QueueState
from gpulease.service.scheduler import reconcile
from gpulease.service.submission import submit

HOUR = timedelta(hours=1)


class World:
    """A queue on one GPU of 16G, and alice with limits."""

    def __init__(self, **limits: object) -> None:
        self.store = MemoryStore()
        self.state = QueueState(self.store)
        self.clock = FakeClock()
        self.gpus = FakeGpus({"GPU-a": 16 * G, "GPU-b": 16 * G})
        self.limits = UserLimits(**limits)  # type: ignore[arg-type]
        self.members: dict[Owner, tuple[GroupLimits, ...]] = {}

    def limits_of(self, owner: Owner) -> UserLimits:
        limits = self.limits if owner == ALICE else UserLimits()
        return replace(limits, groups=self.members.get(owner, ()))

    @property
    def policy(self) -> Policy:
        return Policy(limits_of=self.limits_of, queue=QueuePolicy(most_sharing=100))

    def seen(self) -> Observation:
        return Observation(self.gpus.read(), {}, self.clock.now())

    def submit(self, submission: Submission) -> Job:
        return submit(self.store, submission, self.seen(), self.policy, self.clock, self.state)

    def run(self) -> Plan:
        return reconcile(self.store, self.seen(), self.policy, self.clock, state=self.state)

    def end(self, job_id: JobId) -> None:
        job, at = kept(self.store, job_id), self.clock.now()
        with self.store.write() as tx:
            tx.save(ended_job(job, at=at), Event(at, Trigger.WORKER_EXITED))

    def started(self) -> list[int]:
        return [job.id for job in self.store.live() if job.holds_memory]


def order(memory: int = G, **fields: object) -> Submission:
    return an_order(memory, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "starts"),
    [
        ({"most_running": 2}, 2),
        ({"most_gpus": 3}, 3),
        ({"most_memory": 2 * G}, 2),
        ({"most_gpus": 3, "most_running": 1}, 1),
        ({}, 5),
    ],
)
def test_no_more_starts_in_one_pass_than_the_limits_allow(
    limits: dict[str, int], starts: int
) -> None:
    world = World(**limits)
    for _ in range(5):
        world.submit(order())
    world.run()
    assert len(world.started()) == starts
    world.run()
    assert len(world.started()) == starts, "what runs counts in the next pass"


def test_a_job_over_a_limit_delays_nobody_and_says_which_limit() -> None:
    world = World(most_running=1)
    first, second = world.submit(order()), world.submit(order(16 * G))
    other = world.submit(order(16 * G, owner=BOB))
    decided = world.run()
    assert world.started() == [first.id, other.id]
    over = why_waiting(decided, second).over_limit
    assert over is not None
    assert over.setting == "most_running"

    world.end(first.id)
    world.run()
    assert world.started() == [second.id, other.id]


def test_a_job_over_a_limit_has_no_age() -> None:
    world = World(most_running=1)
    wide = world.submit(order(16 * G, gpus=2))
    waits = world.submit(order(16 * G, gpus=2))
    world.run()
    assert aging(world, waits) is None

    world.end(wide.id)
    world.limits = UserLimits()
    blocker = world.submit(order(16 * G, owner=BOB))
    world.store._jobs[blocker.id] = granted_job(blocker)
    world.run()
    assert aging(world, waits) == NOON, "it is within its limits, and waits for memory"

    world.limits = UserLimits(most_gpus=1)
    world.run()
    assert aging(world, waits) is None


@pytest.mark.parametrize(
    "blocked",
    [QueueOptions(begin_at=NOON + 9 * HOUR), QueueOptions(held=True), "after"],
)
def test_time_in_which_a_job_might_not_start_is_not_learnt_as_a_wait(
    blocked: QueueOptions | str,
) -> None:
    world = World()
    first = world.submit(order(owner=BOB))
    options = blocked if isinstance(blocked, QueueOptions) else QueueOptions()
    after = (WantedDependency(first.id),) if blocked == "after" else ()
    late = world.submit(replace(order(16 * G, gpus=2), queue=options, after=after))
    world.run()

    world.clock.at += 9 * HOUR
    job = kept(world.store, late.id)
    assert not job.holds_memory
    world.store._jobs[late.id] = replace(job, queue=replace(job.queue, held=False, after=()))
    world.run()
    world.clock.at += HOUR
    world.end(first.id)
    world.run()
    assert late.id in world.started(), "it has waited for memory for an hour"
    world.end(late.id)

    assert world.run().snapshot.usual_wait_s == 3600.0


def aging(world: World, job: Job) -> datetime | None:
    now = world.store.job(job.id)
    assert now is not None
    return now.queue.aging_since_at


@pytest.mark.parametrize(
    ("limits", "asked", "hint"),
    [
        ({"most_gpus": 1}, order(gpus=2), "--gpus 1"),
        ({"most_memory": 3 * G}, order(2 * G, gpus=2), "--mem 1.5G"),
    ],
)
def test_what_can_never_be_within_a_limit_is_refused(
    limits: dict[str, int], asked: Submission, hint: str
) -> None:
    world = World(**limits)
    with pytest.raises(CannotLease) as refused:
        world.submit(asked)
    assert hint in (refused.value.hint or "")
    assert next(iter(limits)) in refused.value.message
    world.submit(replace(asked, owner=BOB))


def test_an_array_beyond_a_limit_is_refused_with_how_much_of_it_fits() -> None:
    world = World(most_gpus=4, over_limit=Beyond.REFUSE)
    world.submit(order())
    array = replace(order(), indices=Indices(tuple(range(10)), None))
    with pytest.raises(TooMany) as refused:
        world.submit(array)
    assert mentions(refused.value.message, "array of 10 elements", "4 GPUs", "most_gpus", "only 3")
    assert mentions(refused.value.hint, "3 elements")
    world.submit(replace(order(), indices=Indices(tuple(range(3)), None)))
    with pytest.raises(TooMany) as refused:
        world.submit(array)
    assert mentions(refused.value.message, "4 are leased")


CAROL = Owner(4_000_003, 4_000_003, "carol")
"""In no group."""


@pytest.mark.parametrize(
    ("limits", "asked", "says"),
    [
        (UserLimits(most_memory=10 * G), 6 * G, ("10G", "most_memory", "6G is leased")),
        (UserLimits(most_gpus=1), G, ("1 GPU", "most_gpus", "1 are leased")),
    ],
)
def test_the_members_of_a_group_share_its_limits_and_others_do_not(
    limits: UserLimits, asked: int, says: tuple[str, ...]
) -> None:
    world = World()
    vision, all_of_us = GroupLimits("vision", limits), GroupLimits("all", UserLimits(most_gpus=9))
    world.members = {ALICE: (all_of_us, vision), BOB: (vision,)}
    first = world.submit(order(asked))
    waits = world.submit(order(asked, owner=BOB))
    other = world.submit(order(asked, owner=CAROL))
    decided = world.run()
    assert world.started() == [first.id, other.id]
    over = why_waiting(decided, waits).over_limit
    assert over is not None and mentions(str(over), "group vision", "all members together", *says)
    with pytest.raises(NoRoomNow, match="group vision"):
        world.submit(order(asked, owner=BOB, wait_for=timedelta(0)))
    with pytest.raises(CannotLease, match="the group vision may hold"):
        world.submit(order(11 * G, gpus=2, owner=BOB))

    world.end(first.id)
    world.run()
    assert waits.id in world.started()


def test_a_job_over_the_limit_of_its_group_waits_also_where_its_users_limits_refuse() -> None:
    world = World(most_gpus=2, over_limit=Beyond.REFUSE)
    both = (GroupLimits("vision", UserLimits(most_gpus=1)),)
    world.members = {ALICE: both, BOB: both}
    first = world.submit(order(owner=BOB))
    mine = world.submit(order())
    world.run()
    assert world.started() == [first.id]
    world.end(first.id)
    world.run()
    assert world.started() == [mine.id]


def test_the_budget_of_a_group_counts_members_without_jobs_also_after_a_restart() -> None:
    world = World()
    both = (GroupLimits("vision", UserLimits(gib_hours_per_week=15)),)
    world.members = {ALICE: both, BOB: both}
    job = world.submit(order(8 * G, owner=BOB))
    world.run()
    world.clock.forward(hours=2)
    world.end(job.id)
    waits, other = world.submit(order()), world.submit(order(owner=CAROL))
    for _ in range(2):
        decided = world.run()
        assert world.started() == [other.id]
        over = why_waiting(decided, waits).over_limit
        assert mentions(str(over), "group vision", "15 GiB hours", "16.0 are used")
        world.state = QueueState(world.store)
    world.clock.at = NOON + WEEK + timedelta(minutes=90)
    world.run()
    assert waits.id in world.started()


def test_a_job_without_a_time_gets_the_default_and_never_more_than_the_longest() -> None:
    world = World(default_time=HOUR, longest_time=2 * HOUR)
    assert world.submit(order()).claim.time_limit == HOUR
    assert world.submit(order(time_limit=2 * HOUR)).claim.time_limit == 2 * HOUR
    with pytest.raises(BadValue, match="longest_time"):
        world.submit(order(time_limit=3 * HOUR))
    world.limits = UserLimits(longest_time=2 * HOUR)
    assert world.submit(order()).claim.time_limit == 2 * HOUR


def test_root_gets_the_default_time_and_no_limit() -> None:
    root = Owner(0, 0, "root")
    world = World()
    limits = Policy(limits_of=lambda _: UserLimits(most_gpus=1, default_time=HOUR)).limits(root)
    assert limits == UserLimits(default_time=HOUR)
    assert world.submit(order(gpus=2, owner=root)).claim.gpus == 2


def test_a_hold_is_limited_by_both_and_gets_no_default_time() -> None:
    both = UserLimits(most_hold_time=HOUR, longest_time=2 * HOUR, default_time=HOUR / 2)
    assert both.longest(hold=True) == (HOUR, "most_hold_time")
    assert both.longest(hold=False) == (2 * HOUR, "longest_time")
    assert both.usual_time(hold=True) == (HOUR, "most_hold_time")
    assert UserLimits(default_time=HOUR).usual_time(hold=True) is None


def test_extend_goes_no_further_than_the_longest_time() -> None:
    world = World(longest_time=2 * HOUR)
    job = world.submit(order(time_limit=HOUR))
    extended = extend(world.store, job.id, HOUR, "alice", world.clock, world.limits)
    assert extended.claim.time_limit == 2 * HOUR
    with pytest.raises(BadValue, match="longest_time"):
        extend(world.store, job.id, HOUR, "alice", world.clock, world.limits)
    assert extend(world.store, job.id, HOUR, "an admin", world.clock).claim.time_limit == 3 * HOUR
    shorter = extend(world.store, job.id, -HOUR / 2, "alice", world.clock, world.limits)
    assert shorter.claim.time_limit == 2.5 * HOUR, "back towards the limit is always allowed"


def test_the_budget_of_a_week_counts_ended_and_running_jobs() -> None:
    world = World(gib_hours_per_week=20)
    first = world.submit(order(8 * G))
    world.run()
    world.clock.forward(hours=2)
    second = world.submit(order(2 * G))
    world.run()
    assert second.id in world.started(), "16 of 20 are used"
    world.end(first.id)
    world.clock.forward(hours=2)
    third = world.submit(order())
    decided = world.run()
    assert third.id not in world.started(), "16, and 4 of the job that still runs"
    over = why_waiting(decided, third).over_limit
    assert over is not None
    assert (over.setting, over.until_at) == ("gib_hours_per_week", NOON + WEEK)

    world.end(second.id)
    world.clock.at = NOON + WEEK + timedelta(minutes=1)
    world.run()
    assert third.id in world.started()


def test_a_job_over_the_budget_is_expected_when_enough_use_is_a_week_old() -> None:
    world = World(gib_hours_per_week=10)
    first = world.submit(order(8 * G))
    world.run()
    world.clock.forward(hours=2)
    world.end(first.id)
    waits = world.submit(order())
    decided = world.run()
    over = why_waiting(decided, waits).over_limit
    assert over is not None
    assert over.until_at is not None
    assert "16.0 are used" in str(over)
    start = Explanations(decided).starts[waits.id]
    assert timedelta(0) <= start.at - over.until_at <= timedelta(minutes=1)
    world.clock.at = start.at
    world.run()
    assert waits.id in world.started()


spans = some.tuples(some.integers(0, 12 * 60), some.integers(0, 300), some.integers(1, 64))


@given(some.lists(spans, max_size=8), some.integers(0, 240))
def test_the_use_of_a_week_is_the_sum_of_what_lies_in_it(
    jobs: list[tuple[int, int, int]], later: int
) -> None:
    use, end = RecentUse(), NOON
    exact = []
    for begin_h, length_h, gib in jobs:
        begin = NOON + timedelta(hours=begin_h / 60)
        end = max(end, begin + timedelta(hours=length_h))
        use.add(begin, begin + timedelta(hours=length_h), gib * G)
        exact.append((begin, begin + timedelta(hours=length_h), gib))
    at = end + timedelta(hours=later)
    expected = sum(
        max(timedelta(0), stop - max(begin, at - WEEK)) / HOUR * gib for begin, stop, gib in exact
    )
    # The hour that is partly over counts in proportion: at most an hour of each job.
    assert use.in_week_before(at) == pytest.approx(expected, abs=sum(gib for *_, gib in exact) + 1)
    total = use.in_week_before(at)
    until = use.expires_at(total / 2, at)
    if until is not None and total > 0:
        assert use.in_week_before(until) == pytest.approx(total / 2, abs=1e-3)
    assert use.in_week_before(at) == total, "a forecast changes nothing"
