"""Several reservations: jobs that wait for different GPUs do not wait for each other."""

from dataclasses import replace
from datetime import datetime, timedelta

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
from gpulease.domain.explain import Explanations, suggestions, with_job
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job, Owner, aging
from gpulease.domain.lease import Claim
from gpulease.domain.limits import UserLimits
from gpulease.domain.placement import ObstacleKind
from gpulease.domain.plan import Plan, plan, started, why_waiting
from gpulease.domain.queue_options import ArrayElement, PolicyName, Priority, QueuePolicy
from gpulease.domain.snapshot import Snapshot
from gpulease.server.reasons import explanation

CAROL = Owner(1002, 1002, "carol")
HOUR = timedelta(hours=1)
CARDS = (
    reading("GPU-0", 0, name="NVIDIA T4", total=24 * G),
    reading("GPU-1", 1, name="NVIDIA T4", total=24 * G),
    reading("GPU-2", 2, name="NVIDIA A100", total=80 * G),
)
FIRST = (GpuUuid("GPU-0"),)


def job(number: int, memory: int, owner: Owner = ALICE, age: float = 0, **claim: object) -> Job:
    made = Job(JobId(number), owner, "job", "true", Claim(memory * G, **claim), NOON)  # type: ignore[arg-type]
    return aging(made, NOON - age * HOUR) if age else made


def running(waiting: Job, gpu: int) -> Job:
    return running_job(waiting, CARDS[gpu].uuid, at=NOON - HOUR)


TEST_GPU = running(job(1, 22, time_limit=11 * HOUR), 0)
FOR_TEST_GPU = job(2, 20, age=40, named=FIRST)
SMALL_ONE = running(job(3, 12, model="A100", time_limit=2 * HOUR), 2)
LARGE = job(4, 70, BOB, age=39, model="A100")


def decide(*jobs: Job, at: datetime = NOON, policy: PolicyName = PolicyName.FAIR) -> Plan:
    sharing = QueuePolicy(policy, most_sharing=9, soft_reservation_after=24 * HOUR)
    return plan(Snapshot(jobs, CARDS, at, policy=sharing))


def kept(decided: Plan) -> dict[int, set[str]]:
    return {each.job: set(each.memory) for each in decided.reservations}


def test_a_job_for_other_gpus_than_the_oldest_gets_a_reservation_too() -> None:
    decided = decide(TEST_GPU, FOR_TEST_GPU, SMALL_ONE, LARGE, job(5, 12, CAROL, model="A100"))
    assert kept(decided) == {2: {"GPU-0"}, 4: {"GPU-2"}}
    assert decided.reserved == {"GPU-0": 2, "GPU-2": 4}
    assert not decided.grants


def test_a_reservation_for_an_element_of_an_array_is_named_as_people_see_it() -> None:
    options = replace(FOR_TEST_GPU.queue, array=ArrayElement(JobId(2), 7))
    later = job(5, 2, CAROL, named=FIRST)
    element = replace(FOR_TEST_GPU, queue=options, claim=Claim(23 * G, named=FIRST))
    decided = decide(TEST_GPU, element, later)
    waiting = explanation(later.claim, why_waiting(decided, later), len(CARDS))
    assert (waiting.behind, waiting.behind_label) == (2, "2_7")
    assert "job 2_7" in (waiting.why or "")
    assert any("job 2_7" in each.why for each in waiting.refusals)


def test_a_gpu_that_is_kept_for_the_oldest_is_wanted_by_those_who_would_fit_beside_its_jobs() -> (
    None
):
    pair = Claim(20 * G, 2, model="T4")
    oldest = replace(job(2, 20, age=40), claim=pair)
    beside = running(job(6, 2, time_limit=30 * HOUR), 1)
    short, long = (job(n, 20, CAROL, named=(CARDS[1].uuid,), time_limit=n * HOUR) for n in (9, 20))
    decided = decide(TEST_GPU, beside, oldest, short)
    assert dict(decided.grants).keys() == {short.id}, "it ends before the oldest can start"
    decided = decide(TEST_GPU, beside, oldest, long)
    assert not decided.grants
    assert decided.wanted({ObstacleKind.LEASED}) == {"GPU-0"}
    assert decided.wanted({ObstacleKind.LEASED, ObstacleKind.RESERVED}) == {"GPU-0", "GPU-1"}


def test_small_jobs_do_not_overtake_a_large_one_for_as_long_as_they_come() -> None:
    """Another job waits for a test GPU meanwhile, and has waited for longer."""
    live, at = {each.id: each for each in (TEST_GPU, FOR_TEST_GPU, SMALL_ONE, LARGE)}, NOON
    for number in range(10, 16):
        at += HOUR / 2
        live[JobId(number)] = job(number, 12, CAROL, model="A100", time_limit=2 * HOUR)
        if at >= NOON + HOUR:
            live.pop(SMALL_ONE.id, None)
        for granted, placed in decide(*live.values(), at=at).grants:
            live[granted] = started(live[granted], placed, at)
        if live[LARGE.id].holds_memory:
            break
    assert at == NOON + HOUR
    assert not live[JobId(10)].holds_memory


def test_a_job_for_any_gpu_gets_a_reservation_on_those_that_the_oldest_does_not_ask_for() -> None:
    decided = decide(TEST_GPU, FOR_TEST_GPU, SMALL_ONE, job(4, 70, BOB, age=39))
    assert kept(decided) == {2: {"GPU-0"}, 4: {"GPU-2"}}
    third = job(5, 71, CAROL, age=38, model="A100")
    assert kept(decide(*decided.snapshot.jobs, third)) == kept(decided), "one ahead on each GPU"


def test_a_job_for_any_gpu_that_is_the_oldest_has_the_only_reservation() -> None:
    decided = decide(TEST_GPU, job(2, 80, BOB, age=50), SMALL_ONE, FOR_TEST_GPU)
    assert len(decided.reservations) == 1


def test_a_lower_class_reserves_what_the_higher_one_does_not_ask_for() -> None:
    low = replace(LARGE, queue=replace(LARGE.queue, priority=Priority.LOW))
    assert kept(decide(TEST_GPU, FOR_TEST_GPU, SMALL_ONE, low)).keys() == {2, 4}
    same = replace(low, claim=Claim(21 * G, named=FIRST))
    assert kept(decide(TEST_GPU, FOR_TEST_GPU, SMALL_ONE, same)).keys() == {2}


def test_the_policies_in_order_of_submission_divide_gpus_as_well_unless_order_is_strict() -> None:
    jobs = [TEST_GPU, FOR_TEST_GPU, SMALL_ONE, LARGE]
    assert kept(decide(*jobs, policy=PolicyName.EASY)).keys() == {2, 4}
    assert kept(decide(*jobs, policy=PolicyName.FIFO)).keys() == {2}


def test_a_user_with_two_reservations_keeps_what_both_need_of_a_limit() -> None:
    mine = replace(LARGE, owner=ALICE)
    held = replace(SMALL_ONE, owner=BOB)
    jobs = [TEST_GPU, FOR_TEST_GPU, held, mine, job(5, 2, ALICE)]
    for most, starts, reserved in ((4, {5}, {2, 4}), (3, set(), {2, 4}), (2, set(), {2})):
        limits = {ALICE.uid: UserLimits(most_running=most)}
        decided = plan(replace(decide(*jobs).snapshot, limits=limits))
        assert (dict(decided.grants).keys(), kept(decided).keys()) == (starts, reserved)


def test_a_wait_names_the_job_that_is_ahead_on_these_gpus() -> None:
    late = job(5, 5, CAROL, model="A100")
    decided = decide(TEST_GPU, FOR_TEST_GPU, SMALL_ONE, replace(LARGE, claim=Claim(76 * G)), late)
    assert waits(decided, late.id).refusal.waits_for == (4,)
    assert waits(decided, 2).reserved == {"GPU-0"}
    assert waits(decided, 4).reserved == {"GPU-2"}
    shorter = suggestions(decided, late, G)[1]
    assert (shorter.options, shorter.before) == ("--time 1h", 4)


def test_positions_begin_with_the_reserved_jobs_and_the_forecast_keeps_their_turn() -> None:
    late = job(5, 12, CAROL, model="A100", time_limit=9 * HOUR)
    explained = Explanations(decide(TEST_GPU, FOR_TEST_GPU, SMALL_ONE, LARGE, late))
    assert [each.id for each in explained.order] == [2, 4, 5]
    starts = explained.starts
    assert starts[LARGE.id].at < starts[FOR_TEST_GPU.id].at
    assert starts[LARGE.id].at < starts[late.id].at
    assert kept(with_job(explained.plan, late)).keys() == {2, 4}


@given(
    st.lists(
        st.builds(
            job,
            st.just(0),
            st.integers(1, 80),
            st.sampled_from([ALICE, BOB, CAROL]),
            st.integers(0, 50),
            gpus=st.integers(1, 3),
            same_model=st.booleans(),
            exclusive=st.booleans(),
        ),
        max_size=8,
    ),
    st.sampled_from(PolicyName),
)
def test_jobs_that_ask_for_no_particular_gpus_have_one_reservation_at_most(
    jobs: list[Job], policy: PolicyName
) -> None:
    waiting = [replace(each, id=JobId(number)) for number, each in enumerate(jobs, 10)]
    decided = decide(TEST_GPU, SMALL_ONE, *waiting, policy=policy)
    assert len(decided.reservations) <= 1
