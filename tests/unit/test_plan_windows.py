"""Windows in the plan: what starts beside them, what waits, and why."""

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    ALICE,
    BOB,
    NOON,
    G,
    reading,
    running_job,
    waits,
)
from gpulease.domain.calendar import Occurrence, Window, WindowId
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.placement import ObstacleKind
from gpulease.domain.plan import Plan, plan
from gpulease.domain.queue_options import PolicyName, QueueOptions, QueuePolicy
from gpulease.domain.snapshot import Snapshot

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def job(number: int, *, of: object = BOB, limit: timedelta | None = None, gpus: int = 1) -> Job:
    claim = Claim(2 * G, gpus, time_limit=limit)
    return Job(JobId(number), of, "job", "true", claim, NOON)  # type: ignore[arg-type]


def running(number: int, gpu: int, limit: timedelta | None = None) -> Job:
    return running_job(job(number, limit=limit), f"GPU-{gpu}")


def window(begins_in: timedelta, *gpus: int, count: int = 1, number: int = 1) -> Occurrence:
    """Return a window of alice that lasts for an hour, on particular GPUs or on any."""
    uuids = tuple(GpuUuid(f"GPU-{each}") for each in gpus)
    made = Window(
        WindowId(number), "exam", len(uuids) or count, uuids, NOON + begins_in, HOUR, None,
        ("alice",), (), "root", NOON,
    )  # fmt: skip
    return Occurrence(
        made, made.begins_at, made.begins_at + HOUR, frozenset({"alice"}), "18:00", "19:00"
    )


def decide(jobs: list[Job], *windows: Occurrence, gpus: int = 1, **fields: object) -> Plan:
    readings = [reading(f"GPU-{index}", index) for index in range(gpus)]
    return plan(Snapshot(jobs, readings, NOON, windows=windows, **fields))  # type: ignore[arg-type]


def starts(decided: Plan) -> dict[int, list[str]]:
    return {number: [uuid for uuid, _ in at.allocations] for number, at in decided.grants}


def test_while_a_window_is_on_only_jobs_of_its_users_start_on_its_gpus() -> None:
    jobs = [job(1, limit=timedelta(minutes=1)), job(2, of=ALICE)]
    decided = decide(jobs, window(-HOUR / 2, 0))
    assert starts(decided) == {2: ["GPU-0"]}
    obstacle = waits(decided, 1).refusal.obstacles[0]
    assert obstacle.kind is ObstacleKind.WINDOW
    assert obstacle.waits_for == ()


def test_a_window_that_has_ended_is_of_no_effect() -> None:
    assert starts(decide([job(1)], window(-HOUR, 0))) == {1: ["GPU-0"]}


def test_a_job_with_a_time_limit_starts_only_if_it_ends_before_a_window() -> None:
    jobs = [job(1, limit=2 * HOUR), job(2, limit=2 * HOUR + timedelta(seconds=1))]
    assert starts(decide(jobs, window(2 * HOUR, 0))) == {1: ["GPU-0"]}


def test_a_job_without_a_limit_starts_if_twice_its_prediction_is_over_before_a_window() -> None:
    assert starts(decide([job(1)], window(8 * HOUR, 0))) == {1: ["GPU-0"]}, "4 hours by default"
    decided = decide([job(1)], window(7 * HOUR, 0))
    assert starts(decided) == {}
    assert "--time 7h" in waits(decided, 1).refusal.obstacles[0].why


def test_a_job_on_several_gpus_is_promised_no_start_with_a_shorter_limit() -> None:
    jobs = [running(1, 1), job(2, gpus=2)]
    jobs[0] = replace(jobs[0], claim=replace(jobs[0].claim, exclusive=True))
    decided = decide(jobs, window(HOUR, 0), gpus=2)
    window_ahead = waits(decided, 2).refusal.obstacles
    assert not [each.why for each in window_ahead if "--time" in each.why]


def test_a_job_goes_to_a_gpu_without_a_window() -> None:
    jobs = [job(1, limit=DAY), job(2, limit=DAY, gpus=2)]
    decided = decide(jobs, window(HOUR, 0), gpus=2)
    assert starts(decided) == {1: ["GPU-1"]}


def test_a_window_of_any_gpus_leaves_the_other_gpus_to_jobs_that_run_into_it() -> None:
    jobs = [job(number, limit=DAY, gpus=1) for number in range(1, 9)]
    decided = decide(jobs, window(HOUR, count=2), gpus=4, policy=QueuePolicy(most_sharing=1))
    assert sorted(gpu for at in starts(decided).values() for gpu in at) == ["GPU-2", "GPU-3"]
    assert decided.calendar.gpus[WindowId(1)] == ("GPU-0", "GPU-1")


def test_a_window_of_any_gpus_takes_those_without_a_job_that_runs_into_it() -> None:
    jobs = [running(1, 0, DAY), running(2, 1), running(3, 2, HOUR), job(4, limit=DAY)]
    decided = decide(jobs, window(2 * HOUR, count=2), gpus=4)
    assert set(decided.calendar.gpus[WindowId(1)]) == {"GPU-2", "GPU-3"}
    assert set(starts(decided)[4]) <= {"GPU-0", "GPU-1"}


def test_a_job_that_a_window_blocks_reserves_nothing() -> None:
    old = replace(job(1, limit=DAY), queue=QueueOptions(aging_since_at=NOON - 40 * DAY))
    jobs = [running(9, 0, HOUR), old, job(2, limit=HOUR, gpus=1)]
    for name in PolicyName:
        decided = decide(jobs, window(2 * HOUR, 0), policy=QueuePolicy(name=name, most_sharing=3))
        assert not decided.reservations
        assert starts(decided) == {2: ["GPU-0"]}


def test_no_gpu_is_reserved_from_an_instant_at_which_the_job_would_run_into_a_window() -> None:
    big = replace(
        job(1, limit=2 * HOUR), claim=Claim(8 * G, time_limit=2 * HOUR),
        queue=QueueOptions(aging_since_at=NOON - 40 * DAY),
    )  # fmt: skip
    jobs = [running(8, 0, HOUR), running(9, 1, 2 * HOUR), big]
    decided = decide(jobs, window(2 * HOUR + HOUR / 2, 0), gpus=2)
    assert decided.reservations
    assert set(decided.reservations[0].memory) == {"GPU-1"}, "on GPU-0 it would fit after an hour"


@given(
    st.lists(
        st.tuples(st.sampled_from([ALICE, BOB]), st.none() | st.integers(1, 12), st.integers(1, 2)),
        max_size=8,
    ),
    st.lists(
        st.tuples(st.integers(-1, 12), st.integers(0, 2), st.booleans()), min_size=1, max_size=3
    ),
)
def test_no_job_starts_where_it_would_run_into_a_window_of_others(
    asked: list[tuple[object, int | None, int]], windows: list[tuple[int, int, bool]]
) -> None:
    jobs = [
        job(number, of=of, limit=None if hours is None else hours * HOUR, gpus=gpus)
        for number, (of, hours, gpus) in enumerate(asked, 1)
    ]
    set_apart = [
        window(begin * HOUR - HOUR / 2, *([gpu] if named else []), number=number)
        for number, (begin, gpu, named) in enumerate(windows)
    ]
    decided = decide(jobs, *set_apart, gpus=3)
    for number, placement in decided.grants:
        started = jobs[number - 1]
        until = NOON + (started.claim.time_limit or 8 * HOUR)
        for each in set_apart:
            chosen = decided.calendar.gpus.get(each.window.id, ())
            if started.owner is BOB and any(uuid in chosen for uuid, _ in placement.allocations):
                assert until <= each.begins_at
    for waiting in decided.reasons():
        assert all(each.why for each in waiting.refusal.obstacles)
