"""One decision over the whole queue."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    ALICE,
    NOON,
    G,
    reading,
    running_job,
    waits,
)
from gpulease.domain.gpu import Fault, GpuReading, JobId, ProcessReading
from gpulease.domain.job import CommandFingerprint, Job, JobUsage, aging
from gpulease.domain.lease import Claim
from gpulease.domain.past_jobs import ALL_JOBS, RunTimes, command_keys
from gpulease.domain.placement import ObstacleKind
from gpulease.domain.plan import Plan, plan, why_waiting
from gpulease.domain.queue_options import PolicyName, QueuePolicy
from gpulease.domain.snapshot import Snapshot, ledgers
from gpulease.service.overuse import HELD_BY_OTHERS, IN_USE

HOUR = timedelta(hours=1)


def job(number: int, memory: int = G, **claim: object) -> Job:
    return Job(JobId(number), ALICE, "job", "true", Claim(memory, **claim), NOON)  # type: ignore[arg-type]


def running(number: int, gpu: str, memory: int, limit: timedelta | None = None) -> Job:
    return running_job(job(number, memory, time_limit=limit), gpu)


def gpus(count: int = 2) -> list[GpuReading]:
    return [reading(f"GPU-{index}", index) for index in range(count)]


def decide(
    jobs: list[Job], readings: list[GpuReading] | None = None, history: RunTimes | None = None
) -> Plan:
    seen = readings if readings is not None else gpus()
    return plan(Snapshot(jobs, seen, NOON, history=history or RunTimes()))


def granted(decided: Plan) -> list[tuple[int, list[str]]]:
    return [(job_id, [uuid for uuid, _ in place.allocations]) for job_id, place in decided.grants]


def test_two_fit_and_the_third_waits_and_says_for_whom() -> None:
    decided = decide([job(n, 6 * G) for n in (1, 2, 3)])
    assert granted(decided) == [(1, ["GPU-0"]), (2, ["GPU-1"])]
    assert waits(decided, 3).refusal.waits_for == (1, 2)


def test_strict_order_closes_the_gpus_behind_the_first() -> None:
    jobs = [running(1, "GPU-0", 5 * G), running(2, "GPU-1", 5 * G), job(3, 6 * G), job(4, G)]
    decided = plan(Snapshot(jobs, gpus(), NOON, policy=QueuePolicy(PolicyName.FIFO)))
    assert granted(decided) == []
    behind = why_waiting(decided, jobs[3]).refusal
    assert [each.kind for each in behind.obstacles] == [ObstacleKind.RESERVED] * 2
    assert behind.waits_for == (3,)


def test_a_small_job_starts_at_once_beside_a_large_one_that_waits() -> None:
    jobs = [running(n + 1, f"GPU-{n}", 6 * G) for n in range(4)]
    assert granted(decide([*jobs, job(5, 4 * G), job(6, G)], gpus(4))) == [(6, ["GPU-0"])]


def test_who_waits_for_a_strangers_memory_does_not_hold_up_the_others() -> None:
    stranger = [reading(used=5 * G, processes=(ProcessReading(9, 5 * G),))]
    decided = decide([job(1, 6 * G), job(2, 2 * G)], stranger)
    assert granted(decided) == [(2, ["GPU-a"])]
    assert waits(decided, 1).refusal.waits_for == ()


def aged(waiting: Job, hours: float) -> Job:
    since = NOON - hours * HOUR
    return replace(waiting, queue=replace(waiting.queue, aging_since_at=since))


@pytest.mark.parametrize(
    ("limit", "age", "reserved"),
    [
        (None, 19, False),  # the prediction is 4 hours while no run is known
        (None, 21, True),
        (timedelta(minutes=1), 0.08, False),
        (timedelta(minutes=1), 0.09, True),
        (timedelta(days=7), 21, True),
    ],
)
def test_memory_is_reserved_for_a_gang_that_has_waited_five_times_its_length(
    limit: timedelta | None, age: float, reserved: bool
) -> None:
    gang = aged(job(2, 8 * G, gpus=2, time_limit=limit), age)
    decided = decide([running(1, "GPU-0", 6 * G), job(3, G), gang])
    assert granted(decided) == ([] if reserved else [(3, ["GPU-0"])])
    assert set(decided.reserved) == ({"GPU-0", "GPU-1"} if reserved else set())


def test_memory_is_reserved_after_a_day_however_long_the_gang_runs() -> None:
    history = RunTimes()
    gang = job(2, 8 * G, gpus=2)
    history.record((ALL_JOBS,), 48 * 3600)
    jobs = [running(1, "GPU-0", 6 * G), job(3, G)]
    assert not decide([*jobs, aged(gang, 23)], history=history).reserved
    assert decide([*jobs, aged(gang, 25)], history=history).reserved


def test_a_gang_that_a_lost_gpu_makes_impossible_keeps_nothing() -> None:
    readings = [reading("GPU-0", 0), reading("GPU-1", 1, fault=Fault.LOST)]
    decided = decide([job(1, G, gpus=2), job(2, G)], readings)
    assert granted(decided) == [(2, ["GPU-0"])]


def test_who_gives_up_is_still_granted_what_fits_at_that_very_moment() -> None:
    impatient = replace(job(1), gives_up_at=NOON)
    assert granted(decide([impatient])) == [(1, ["GPU-0"])]
    late = replace(job(2, 8 * G), gives_up_at=NOON)
    decided = decide([running(1, "GPU-0", G), late, job(3)], gpus(1))
    assert decided.gives_up == (2,)
    assert granted(decided) == [(3, ["GPU-0"])], "who gave up keeps nothing reserved"


def test_without_gpus_everyone_waits() -> None:
    decided = decide([job(1)], [])
    assert (decided.grants, decided.gives_up) == ((), ())
    assert why_waiting(decided, job(1)).refusal.obstacles == ()


halves = st.integers(min_value=1, max_value=20).map(lambda count: count * G // 2)


@st.composite
def moments(draw: st.DrawFn) -> Snapshot:
    """Jobs that came in the same millisecond, beside others that run and use all or nothing."""
    count = draw(st.integers(1, 4))
    there, owned, pid = [], {}, 0
    live = [
        running(number, f"GPU-{draw(st.integers(0, count - 1))}", draw(halves))
        for number in range(1, draw(st.integers(1, 5)))
    ]
    for index in range(count):
        processes = []
        for held in [each for each in live if each.leases[0].gpu == f"GPU-{index}"]:
            pid += 1
            owned[pid] = held.id
            processes.append(ProcessReading(pid, draw(st.sampled_from([None, 0, G // 2, 4 * G]))))
        if draw(st.booleans()):
            processes.append(ProcessReading(1000 + index, draw(st.none() | halves)))
        used = min(8 * G, sum(each.memory or 0 for each in processes) + draw(st.just(0) | halves))
        listed = draw(st.sampled_from([tuple(processes), None]))
        there.append(reading(f"GPU-{index}", index, used=used, processes=listed))
    wanted = [
        job(100 + number, draw(halves), gpus=draw(st.integers(1, 2)), exclusive=draw(st.booleans()))
        for number in range(draw(st.integers(1, 6)))
    ]
    servers = frozenset(draw(st.sets(st.sampled_from([1000, 1001, 1002]))))
    return Snapshot([*live, *wanted], there, NOON, owned, mps_servers=servers)


@given(moments())
def test_who_comes_in_the_same_millisecond_never_shares_a_byte_with_anybody(now: Snapshot) -> None:
    decided = plan(now)
    before = {gpu.uuid: gpu for gpu in ledgers(now)}
    given_now: dict[str, int] = {}
    for _, placement in decided.grants:
        for uuid, memory in placement.allocations:
            given_now[uuid] = given_now.get(uuid, 0) + memory
    for uuid, memory in given_now.items():
        gpu = before[uuid]  # type: ignore[index]
        # What runs counts with its whole lease, whether or not it has allocated anything.
        leased = sum(holding.memory for holding in gpu.entries)
        assert memory + leased + (gpu.unmanaged or 0) <= (gpu.allocatable or 0)
    for gpu in decided.gpus:
        alone = [holding for holding in gpu.entries if holding.exclusive]
        assert not alone or len(gpu.entries) == 1


def test_jobs_share_a_reason_unless_what_is_known_of_their_commands_differs() -> None:
    commands = [CommandFingerprint(f"script {n}", f"command {n}") for n in range(4)]
    history = RunTimes()
    for known, seconds in ((commands[2], 60.0), (commands[3], 7200.0), (commands[3], 7200.0)):
        history.record(command_keys("alice", known), seconds, 0.5)
    waiting = [
        replace(job(n, 7 * G), usage=JobUsage(fingerprint=each))
        for n, each in enumerate(commands, 3)
    ]
    decided = decide(
        [running(1, "GPU-0", 6 * G), running(2, "GPU-1", 6 * G), *waiting], None, history
    )
    unknown, also_unknown, of_usual_length, long = map(decided.reason, waiting)
    assert unknown is also_unknown
    assert len({id(unknown), id(of_usual_length), id(long)}) == 3, "one is known by its load alone"


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 7), st.booleans()), min_size=1, max_size=3
    ),
    st.lists(
        st.tuples(
            st.integers(1, 8), st.integers(1, 2), st.sampled_from([None, 1, 30]), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_the_gpus_that_waiting_jobs_want_are_those_that_one_of_their_reasons_names(
    held: list[tuple[int, int, bool]], asked: list[tuple[int, int, int | None, bool]]
) -> None:
    """On each GPU is a job with its use, and perhaps a range; some of the others are old."""
    there, live, owned = [], [], {}
    for index, (memory, used, has_range) in enumerate(held):
        first = running(index + 1, f"GPU-{index}", memory * G, limit=9 * HOUR)
        if has_range:
            (lease,) = first.leases
            first = replace(first, leases=(replace(lease, memory_bound=8 * G),))
        process = ProcessReading(index + 1, used * G)
        there.append(reading(f"GPU-{index}", index, used=used * G, processes=(process,)))
        live.append(first)
        owned[index + 1] = first.id
    for number, (memory, count, hours, is_old) in enumerate(asked, 100):
        limit = None if hours is None else hours * HOUR
        made = job(number, memory * G, gpus=count, time_limit=limit)
        live.append(aging(made, NOON - 40 * HOUR) if is_old else made)
    decided = plan(Snapshot(live, there, NOON, owned, policy=QueuePolicy(most_sharing=9)))
    started = dict(decided.grants)
    waiting = [each for each in live if not each.holds_memory and each.id not in started]
    obstacles = [each for job in waiting for each in decided.reason(job).refusal.obstacles]
    for why in (HELD_BY_OTHERS, IN_USE, {ObstacleKind.RESERVED}):
        assert decided.wanted(why) == {each.gpu for each in obstacles if each.kind in why}
