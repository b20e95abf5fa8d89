"""Why a job waits, when it is expected to start, and with which options it would start now."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fakes import ALICE, BOB, NOON, G, reading
from gpulease.domain.backfill import expected_end
from gpulease.domain.explain import Explanations, start_of, suggestions
from gpulease.domain.gpu import GpuMemory, GpuReading, JobId, LedgerEntry
from gpulease.domain.job import Job, Outcome, aging, asked_to_end
from gpulease.domain.lease import Claim, Trigger
from gpulease.domain.limits import RecentUse, UserLimits
from gpulease.domain.past_jobs import ALL_JOBS, RunTimes
from gpulease.domain.placement import ObstacleKind, shared_by_too_many
from gpulease.domain.plan import Plan, plan, started, why_waiting
from gpulease.domain.queue import Queue
from gpulease.domain.queue_options import NO_OPTIONS, PolicyName, Priority, QueuePolicy
from gpulease.domain.snapshot import Snapshot, capacity, ledgers

HOUR = timedelta(hours=1)
GIB_STEP = G // 4


def job(number: int, memory: int = G, hours_old: float = 0, **claim: object) -> Job:
    submitted = NOON - hours_old * HOUR
    made = Job(JobId(number), ALICE, "job", "true", Claim(memory, **claim), submitted)  # type: ignore[arg-type]
    return replace(made, queue=replace(NO_OPTIONS, aging_since_at=submitted))


def running(number: int, memory: int, gpus: int = 1, limit: timedelta | None = None) -> Job:
    """Return a job that `world` starts an hour ago."""
    return job(number, memory, hours_old=1, gpus=gpus, time_limit=limit)


def world(
    before: Sequence[Job], waiting: Sequence[Job], readings: Sequence[GpuReading], **fields: object
) -> Plan:
    """Return the plan of a queue in which the first jobs were planned an hour ago."""
    base = Snapshot(before, readings, NOON - HOUR, **fields)  # type: ignore[arg-type]
    holding = [each for each in plan(base).after.jobs if each.holds_memory]
    return plan(replace(base, jobs=[*holding, *waiting], at=NOON))


def gpus(count: int = 1, busy: int | None = None) -> list[GpuReading]:
    return [replace(reading(f"GPU-{n}", n), utilization=busy) for n in range(count)]


def options_of(decided: Plan, waiting: Job) -> list[str]:
    return [each.options for each in suggestions(decided, waiting, 256 * 1024**2)]


def test_nothing_is_suggested_for_a_job_that_would_start_as_it_is() -> None:
    assert options_of(world([], [], gpus()), job(1, 2 * G)) == []


def test_the_order_is_that_of_the_plan() -> None:
    short = job(3, 6 * G, time_limit=timedelta(minutes=5))
    decided = world([running(1, 5 * G)], [job(2, 6 * G), short], gpus())
    assert [each.id for each in Explanations(decided).order] == [3, 2]


def test_a_job_that_asks_for_less_would_start_now() -> None:
    decided = world([running(1, 2 * G)], [waiting := job(2, 7 * G)], gpus())
    assert options_of(decided, waiting) == ["--mem 6G"]


def test_a_job_on_fewer_gpus_would_start_now() -> None:
    decided = world([running(1, 8 * G)], [waiting := job(2, 8 * G, gpus=2)], gpus(2))
    assert options_of(decided, waiting) == ["--gpus 1"]


def test_a_shorter_job_would_start_before_the_reservation() -> None:
    old = job(2, 8 * G, hours_old=50)
    first = running(1, 4 * G, limit=3 * HOUR)
    decided = world([first], [old, waiting := job(3, 2 * G)], gpus())
    assert decided.reservations
    assert decided.reservations[0].job == 2
    assert options_of(decided, waiting) == ["--time 2h"]
    assert suggestions(decided, waiting, G)[0].before == 2


def test_a_gpu_with_busy_jobs_is_an_obstacle_though_memory_is_free() -> None:
    policy = QueuePolicy(most_utilization=1.2)
    waiting = job(2, 2 * G)
    decided = world([running(1, 2 * G)], [waiting], gpus(busy=99), policy=policy)
    (obstacle,) = why_waiting(decided, waiting).refusal.obstacles
    assert (obstacle.kind, obstacle.waits_for) == (ObstacleKind.BUSY, (1,))


@pytest.mark.parametrize(("now", "expected"), [(0, True), (99, False)])
def test_a_gpu_that_only_rests_now_is_not_called_busy(now: int, expected: bool) -> None:
    (gpu,) = gpus(busy=now)
    ledger = GpuMemory(gpu, 8 * G, 0, (LedgerEntry(JobId(1), 2 * G),))
    assert ("expected" in shared_by_too_many(ledger).why) is expected


def test_a_job_that_others_make_way_for_is_expected_after_their_grace_of_at_most_five_minutes() -> (
    None
):
    for asked_min, minutes in ((None, 0), (1, 1), (60, 5)):
        asked = None if asked_min is None else timedelta(minutes=asked_min)
        spare = replace(running(1, 8 * G, limit=9 * HOUR), grace=asked)
        spare = replace(spare, queue=replace(spare.queue, preemptible=True))
        decided = world([spare], [job(2, 8 * G)], gpus())
        assert decided.preempts == ((1, 2),)
        assert Explanations(decided).starts[JobId(2)].at == NOON + timedelta(minutes=minutes)


def known(*hours: float) -> RunTimes:
    """Return what is known after runs of so many hours."""
    history = RunTimes()
    for each in hours:
        history.record((ALL_JOBS,), each * 3600)
    return history


def test_a_start_is_expected_from_a_third_by_the_medians_to_three_times_that_by_the_means() -> None:
    decided = world([running(1, 8 * G)], [job(2, 8 * G)], gpus(), history=known(7, 7, 7, 47))
    start = Explanations(decided).starts[JobId(2)]
    assert (start.at, start.after) == (NOON + 6 * HOUR, 1)
    assert (start.earliest, start.latest) == (NOON + 2 * HOUR, NOON + 3 * 16 * HOUR)


def test_within_the_hour_is_said_if_that_is_three_times_the_time_by_medians_and_by_means() -> None:
    for limit_min, hours, most in ((61, 4, 1), (75, 4, 1), (90, 4, 3), (None, 4, 9)):
        limit = None if limit_min is None else timedelta(minutes=limit_min)
        first = running(1, 8 * G, limit=limit)
        decided = world([first], [job(2, 8 * G)], gpus(), history=known(hours, hours))
        start = Explanations(decided).starts[JobId(2)]
        assert (start.earliest, start.latest) == (NOON, NOON + most * HOUR)


def test_a_begin_time_is_certain() -> None:
    waiting = job(2, 8 * G)
    waiting = replace(waiting, queue=replace(waiting.queue, begin_at=NOON + 6 * HOUR))
    start = Explanations(world([], [waiting], gpus())).starts[JobId(2)]
    assert (start.after, start.earliest, start.latest) == (None, start.at, start.at)


def test_no_range_begins_before_the_begin_time() -> None:
    waiting = job(2, 8 * G)
    waiting = replace(waiting, queue=replace(waiting.queue, begin_at=NOON + 2 * HOUR))
    decided = world([running(1, 8 * G)], [waiting], gpus(), history=known(4, 4, 4))
    start = Explanations(decided).starts[JobId(2)]
    assert (start.earliest, start.latest) == (NOON + 2 * HOUR, NOON + 9 * HOUR)


def test_memory_is_kept_for_the_oldest_job_that_is_due_and_may_still_wait() -> None:
    def kept_from(hours: float, *ages: float) -> object:
        waiting = [job(2 + place, 8 * G, hours_old=age) for place, age in enumerate(ages)]
        decided = world([running(1, 8 * G)], waiting, gpus(), history=known(hours, hours))
        return Explanations(decided).kept_from

    assert kept_from(1, 2, 0) == {2: NOON + 3 * HOUR, 3: NOON + 5 * HOUR}
    assert kept_from(10, 20, 19) == {2: NOON + 4 * HOUR}
    assert kept_from(10, 25, 19) == {2: NOON}


def test_a_job_past_its_prediction_is_late() -> None:
    for hours, late in ((0.5, {1}), (2, set())):
        decided = world([running(1, 8 * G)], [job(2, 8 * G)], gpus(), history=known(hours, hours))
        assert Explanations(decided).late == late


def test_no_start_is_expected_when_the_weekly_limit_will_be_used_up() -> None:
    limits = {ALICE.uid: UserLimits(gib_hours_per_week=16)}
    first = running(1, 8 * G, limit=3 * HOUR)
    decided = world([first], [waiting := job(2, 8 * G)], gpus(), limits=limits)
    assert decided.limits.exceeded_by(waiting) is None
    assert Explanations(decided).starts == {}


# Properties.

ENDS_ALONE = {ObstacleKind.LEASED, ObstacleKind.BUSY, ObstacleKind.RESERVED}
SPANS = st.sampled_from([None, timedelta(minutes=30), HOUR, 9 * HOUR])


@st.composite
def jobs(draw: st.DrawFn, number: int, hours: Sequence[float]) -> Job:
    exclusive = draw(st.integers(0, 5)) == 0
    claim = Claim(
        draw(st.integers(1, 32)) * GIB_STEP, draw(st.integers(1, 3)), exclusive, draw(SPANS)
    )
    submitted = NOON - draw(st.sampled_from(hours)) * HOUR
    owner = draw(st.sampled_from([ALICE, BOB]))
    grace = draw(st.sampled_from([None, None, timedelta(minutes=1), HOUR]))
    made = Job(JobId(number), owner, "job", "true", claim, submitted, grace=grace)
    priority = draw(st.sampled_from([Priority.NORMAL, Priority.NORMAL, Priority.LOW]))
    options = replace(NO_OPTIONS, aging_since_at=submitted, priority=priority)
    kind = draw(st.integers(0, 7))
    if kind == 0:
        options = replace(options, begin_at=NOON + draw(st.integers(1, 9)) * HOUR)
    elif kind == 1:
        options = replace(options, preemptible=True)
    return replace(made, queue=options)


@st.composite
def worlds(draw: st.DrawFn) -> Plan:
    early = [draw(jobs(n, [1, 2])) for n in range(1, 1 + draw(st.integers(0, 5)))]
    late = [draw(jobs(n, [0, 0, 20, 30, 50])) for n in range(10, 10 + draw(st.integers(1, 6)))]
    busy = draw(st.sampled_from([None, 0, 50, 95]))
    policy = QueuePolicy(name=draw(st.sampled_from(PolicyName)))
    history = RunTimes()
    for hours in draw(st.lists(st.integers(1, 12), max_size=3)):
        history.record((ALL_JOBS,), hours * 3600, 0.4)
    limits = {ALICE.uid: UserLimits(most_running=2)} if draw(st.booleans()) else {}
    readings = gpus(draw(st.integers(1, 3)), busy)
    return world(early, late, readings, policy=policy, history=history, limits=limits)


def waiting_after(decided: Plan) -> list[Job]:
    return [each for each in decided.after.jobs if not each.holds_memory]


@settings(max_examples=200)
@given(worlds())
def test_a_job_starts_with_what_is_suggested(decided: Plan) -> None:
    for each in waiting_after(decided):
        if start_of(decided, each) is not None:
            # When jobs make way, a start may take one pass more.
            assert decided.promised
            continue
        for suggestion in suggestions(decided, each, GIB_STEP):
            changed = replace(each, claim=suggestion.claim)
            queue = [changed if other.id == each.id else other for other in decided.after.jobs]
            assert each.id in dict(plan(replace(decided.after, jobs=queue)).grants), suggestion


def without_those_it_waits_for(decided: Plan, waiting: Job) -> Snapshot:
    """Return the snapshot with only `waiting`, and without the jobs that it waits for.

    The measured load stays: a GPU with jobs may be less busy than they usually make it.
    """
    gone = why_waiting(decided, waiting).refusal.waits_for
    left = [other for other in decided.after.jobs if other.holds_memory and other.id not in gone]
    return replace(decided.snapshot, jobs=[*left, waiting])


@settings(max_examples=200)
@given(worlds())
def test_a_job_starts_once_those_that_it_waits_for_are_gone(decided: Plan) -> None:
    for each in waiting_after(decided):
        waits = why_waiting(decided, each)
        if each.id in decided.blocked or waits.over_limit is not None:
            continue
        named = {obstacle.kind for obstacle in waits.refusal.obstacles}
        if named <= ENDS_ALONE and each.claim.gpus <= len(decided.gpus):
            later = without_those_it_waits_for(decided, each)
            assert each.id in dict(plan(later).grants)


@settings(max_examples=200)
@given(worlds())
def test_jobs_start_as_expected_if_jobs_run_as_predicted(decided: Plan) -> None:
    # When jobs make way, a start may take one pass more. The daemon has it within a second.
    assume(not any(each.queue.preemptible for each in decided.snapshot.jobs))
    assert {n: start.at for n, start in Explanations(decided).starts.items()} == run_on(decided)


def run_on(decided: Plan) -> dict[JobId, datetime]:
    """Let predicted ends happen one by one, and plan at each; return when each job starts."""
    live = {each.id: each for each in decided.after.jobs}
    base = settled(decided.snapshot)
    ends = [(end_of(base, each), each.id) for each in live.values() if each.holds_memory]
    ends += make_way(live, decided)
    note_ages(live, decided)
    wakes = [each.queue.begin_at.timestamp() for each in live.values() if each.queue.begin_at]
    starts = {}
    promised = decided.promised
    for _ in range(1000):
        left = [(end, number) for end, number in ends if number in live]
        moments = [end for end, _ in left] + [wake for wake in wakes if wake > base.at.timestamp()]
        if not moments:
            break
        now_s = max(min(moments), base.at.timestamp())
        for end, number in left:
            if end <= now_s:
                live.pop(number, None)
        at = datetime.fromtimestamp(now_s, UTC)
        base = replace(base, at=at, promised=promised)
        now = plan(as_measured(base, live.values()))
        promised = now.promised
        for number, placement in now.grants:
            live[number], starts[number] = started(live[number], placement, at), at
            ends.append((end_of(base, live[number]), number))
        ends += make_way(live, now)
        note_ages(live, now)
    return starts


def note_ages(live: dict[JobId, Job], decided: Plan) -> None:
    """Note since when jobs gain age, as the daemon does after each pass."""
    changes = (decided.aging, decided.snapshot.at), (decided.stops_aging, None)
    for numbers, since in changes:
        live |= {each: aging(live[each], since) for each in numbers if each in live}


def make_way(live: dict[JobId, Job], decided: Plan) -> list[tuple[float, JobId]]:
    """Stop the jobs that make way, and return when they end."""
    at, ends = decided.snapshot.at, []
    for number, _ in decided.preempts:
        stopping = asked_to_end(live[number], Trigger.REVOKE, Outcome.PREEMPTED, "", at)
        assert stopping is not None
        live[number] = stopping
        grace = min(stopping.grace or timedelta(0), timedelta(minutes=5))
        ends.append(((at + grace).timestamp(), number))
    return ends


def settled(base: Snapshot) -> Snapshot:
    """Return a snapshot in which the load of each job is in the readings at once."""
    return replace(base, policy=replace(base.policy, settling_time=timedelta(0)))


def as_measured(base: Snapshot, live: Iterable[Job]) -> Snapshot:
    """Return a snapshot of these jobs, with the utilization that they usually cause."""
    held = list(Queue.of(live := list(live), capacity(ledgers(base))).holding.values())
    loads = {
        gpu.uuid: sum(
            each.need.utilization(base.history)
            for each in held
            if gpu.uuid in {lease.gpu for lease in each.job.leases}
        )
        for gpu in base.readings
    }
    readings = [
        gpu
        if gpu.utilization is None
        else replace(gpu, utilization=min(100, round(100 * loads[gpu.uuid])))
        for gpu in base.readings
    ]
    return replace(base, jobs=live, readings=readings)


def end_of(base: Snapshot, running: Job) -> float:
    queue = Queue.of([running], capacity(ledgers(base)))
    now_s = base.at.timestamp()
    held = queue.holding[running.id]
    return expected_end(held, now_s, base.history.by_medians())


def test_looking_ahead_forgets_no_use_that_counts_now() -> None:
    use = RecentUse()
    use.add(NOON - timedelta(days=7), NOON - timedelta(days=6), 8 * G)
    limits = {ALICE.uid: UserLimits(gib_hours_per_week=1000)}
    decided = world(
        [running(1, 8 * G, limit=20 * HOUR)],
        [job(2, 8 * G)],
        gpus(),
        limits=limits,
        recent_use={ALICE.uid: use},
    )
    before = use.copy().in_week_before(NOON)

    assert Explanations(decided).starts

    assert use.in_week_before(NOON) == before
