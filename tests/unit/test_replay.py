"""Replays: what holds at every event, whatever the trace; and the figures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import G, reading
from gpulease.domain.choice import PlannedGpu, best_fit
from gpulease.domain.gpu import build_ledger
from gpulease.domain.lease import Claim
from gpulease.domain.queue_options import PolicyName, QueuePolicy
from gpulease.replay.engine import (
    Contention,
    Moment,
    replay,
    spread,
)
from gpulease.replay.results import (
    StartErrors,
    StartPredictions,
    by_user,
    figures,
    jain,
)
from gpulease.replay.trace import Run, Server, TraceJob

HOUR = 3600.0
SERVERS = [Server(4, 8 * G), Server(4, 8 * G)]
QUICK = QueuePolicy(
    soft_reservation_after=timedelta(hours=1),
    hard_reservation_after=timedelta(hours=2),
    hard_reservation_waits=0.0,
)
POLICIES = [QUICK, *(replace(QUICK, name=name) for name in (PolicyName.EASY, PolicyName.FIFO))]


@st.composite
def traces(draw: st.DrawFn) -> list[TraceJob]:
    utilizations = draw(st.sampled_from([[None], [None, 0.3, 0.9]]))
    submitted = sorted(draw(st.lists(st.integers(0, 40), min_size=1, max_size=30)))
    return [
        TraceJob(
            id=number,
            submit_s=quarters * HOUR / 4,
            duration_s=draw(st.sampled_from([1.0, HOUR / 3, HOUR, 7 * HOUR, 30 * HOUR])),
            gpus=draw(st.sampled_from([1, 1, 1, 2, 4])),
            memory=draw(st.integers(1, 8)) * G,
            user=draw(st.sampled_from(["alice", "bob", "carol"])),
            time_limit_s=draw(st.sampled_from([None, HOUR, 8 * HOUR, 30 * HOUR])),
            utilization=draw(st.sampled_from(utilizations)),
        )
        for number, quarters in enumerate(submitted, 1)
    ]


@dataclass
class Watch:
    """Checks each event of a replay."""

    promises: dict[int, float] = field(default_factory=dict)
    """Until when each job starts that had a hard reservation, in seconds of the trace."""
    busy: dict[object, float | None] = field(default_factory=dict)
    """What was known then of how busy GPUs are, and of how busy jobs will make them."""

    def __call__(self, moment: Moment) -> None:
        for gpu in moment.plan.gpus:
            assert gpu.committed <= (gpu.allocatable or 0)
        assert len(moment.plan.reservations) <= 1, "no job of a trace asks for particular GPUs"
        busy = self._known(moment)
        if any(busy.get(each, value) != value for each, value in self.busy.items()):
            # Jobs turned out to be busier than predicted, and may share fewer GPUs.
            self.promises.clear()
        self.busy = busy
        for kept in moment.plan.reservations:
            if not kept.hard:
                continue
            at_s = moment.at_s + kept.at_s - moment.snapshot.at.timestamp()
            assert at_s <= self.promises.get(kept.job, at_s) + 1e-3, "a start has delayed it"
            self.promises[kept.job] = at_s

    def _known(self, moment: Moment) -> dict[object, float | None]:
        snapshot, queue = moment.snapshot, moment.snapshot.queue
        assert queue is not None
        known: dict[object, float | None] = {
            job.id: queue.need_of(job).utilization(snapshot.history) for job in snapshot.jobs
        }
        return known | {gpu.uuid: gpu.reading.utilization for gpu in moment.plan.gpus}


def check(runs: Sequence[Run], trace: Sequence[TraceJob], watch: Watch) -> None:
    assert [run.job for run in runs] == list(trace), "every job ends"
    for run in runs:
        assert run.start_s >= run.job.submit_s
        assert len(set(run.gpus)) == run.job.gpus
        limit = run.job.time_limit_s
        assert limit is None or run.end_s - run.start_s <= limit + 1e-6
        assert run.start_s <= watch.promises.get(run.job.id, run.start_s) + 1e-3


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@settings(max_examples=40, deadline=None)
@given(trace=traces(), contention=st.sampled_from(Contention), whole=st.booleans())
def test_no_gpu_is_overfull_and_no_start_delays_a_hard_reservation(
    policy: QueuePolicy, trace: list[TraceJob], contention: Contention, whole: bool
) -> None:
    if contention is not Contention.NONE:
        # Jobs that slow each other down may run for longer than the seven days that are assumed.
        trace = [replace(job, time_limit_s=job.time_limit_s or 30 * HOUR) for job in trace]
    watch = Watch()
    runs = replay(trace, SERVERS, policy, whole_gpus=whole, contention=contention, observe=watch)
    check(runs, trace, watch)


@settings(max_examples=30, deadline=None)
@given(trace=traces())
def test_the_same_trace_gives_the_same_runs(trace: list[TraceJob]) -> None:
    assert replay(trace, SERVERS, QUICK) == replay(list(reversed(trace)), SERVERS, QUICK)[::-1]


@settings(max_examples=30, deadline=None)
@given(trace=traces())
def test_whole_gpus_are_never_shared(trace: list[TraceJob]) -> None:
    runs = replay(trace, SERVERS, QUICK, whole_gpus=True)
    for run in runs:
        others = (each for each in runs if each is not run and each.server == run.server)
        together = (each for each in others if set(each.gpus) & set(run.gpus))
        assert not any(each.start_s < run.end_s and run.start_s < each.end_s for each in together)


def one(number: int, submit_s: float, **claim: object) -> TraceJob:
    job = TraceJob(number, submit_s, HOUR, 1, 8 * G, "alice")
    return replace(job, **claim)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [None, 2 * HOUR])
def test_a_stream_of_small_jobs_does_not_starve_a_job_that_wants_all(limit: float | None) -> None:
    """Every GPU has work for two weeks, from many users, and one user wants all GPUs at once."""
    wide = one(1, HOUR, gpus=4, user="wide", time_limit_s=limit)
    stream = [
        one(2 + number, number * HOUR / 5, user=f"user-{number % 7}", time_limit_s=limit)
        for number in range(14 * 24 * 5)
    ]
    runs = replay([wide, *stream], SERVERS[:1], QueuePolicy())
    assert runs[0].wait_s < 48 * HOUR


def test_a_mass_submission_delays_others_by_one_end() -> None:
    mass = [one(number, 0.0, user="mass") for number in range(1, 1001)]
    later = one(2000, 10.5 * HOUR, user="other")
    runs = replay([*mass, later], SERVERS[:1], QueuePolicy())
    assert runs[-1].wait_s <= HOUR / 2


def test_jobs_that_share_a_gpu_slow_each_other_down() -> None:
    pair = [one(1, 0.0, memory=G), one(2, 0.0, memory=G)]
    alone = [Server(1, 8 * G)]

    def ends(contention: Contention, utilization: float | None = None) -> list[float]:
        known = [replace(job, utilization=utilization) for job in pair]
        return [run.end_s for run in replay(known, alone, QUICK, contention=contention)]

    assert ends(Contention.NONE) == [HOUR, HOUR]
    assert ends(Contention.PAIRS) == pytest.approx([HOUR / 0.929] * 2)
    assert ends(Contention.SLICES) == [2 * HOUR, 2 * HOUR]
    assert ends(Contention.PAIRS, 0.3) == [HOUR, HOUR]
    assert ends(Contention.PAIRS, 0.6) == pytest.approx([HOUR * 1.2 / 0.97] * 2)


def test_a_limit_shorter_than_the_job_ends_it() -> None:
    (run,) = replay([one(1, 5.0, time_limit_s=60.0)], SERVERS, QUICK)
    assert (run.start_s, run.end_s) == (5.0, 65.0)


def test_jobs_of_several_gpus_leave_other_servers_whole() -> None:
    runs = replay([one(1, 0.0), one(2, 1.0, gpus=2)], SERVERS, QUICK)
    assert Counter(run.server for run in runs) == {0: 2}


def planned_gpu(free: int) -> PlannedGpu:
    """Return a GPU of 8 GiB with so much free."""
    made = PlannedGpu(build_ledger(reading(), (), {}, 0, None, frozenset()), 0)
    if free < 8 * G:
        made.take(Claim(8 * G - free), 0.0)
    return made


def test_spread_prefers_the_emptiest_gpu_and_best_fit_the_fullest() -> None:
    full, empty = planned_gpu(2 * G), planned_gpu(8 * G)

    assert spread(Claim(G), empty) > spread(Claim(G), full)
    assert best_fit(Claim(G), full) > best_fit(Claim(G), empty)


def test_the_first_prediction_for_a_job_is_compared_with_its_start() -> None:
    # Without a history, every job is predicted to run for four hours.
    jobs = [one(1, 0.0, duration_s=3 * HOUR), one(2, 0.0)]
    predictions = StartPredictions(every=1)

    runs = replay(jobs, [Server(1, 8 * G)], QueuePolicy(), observe=predictions)

    assert predictions.errors(runs) == StartErrors(1, 1 * HOUR, 3 * HOUR, in_range=1)


TWO_GPUS = [Server(2, 4 * G)]


def ran(
    number: int, submit: float, start: float, end: float, user: str = "a", gpus: int = 1
) -> Run:
    """Return a run of a job that asks for half of a GPU, on as many GPUs."""
    job = TraceJob(number, submit, end - start, gpus, 2 * G, user)
    return Run(job, start, end, 0, tuple(range(gpus)))


def test_waits_and_completions() -> None:
    found = figures([ran(1, 0, 0, 10), ran(2, 0, 10, 20), ran(3, 5, 35, 40)], TWO_GPUS)

    assert found.mean_wait_s == pytest.approx(40 / 3)
    assert (found.median_wait_s, found.p95_wait_s, found.longest_wait_s) == (10, 30, 30)
    assert found.mean_completion_s == pytest.approx((10 + 20 + 35) / 3)
    assert found.makespan_s == 40


def test_utilization_is_the_memory_asked_for_of_all_memory_over_the_makespan() -> None:
    # 2 of 8 GiB for 10 of 20 s, 4 of 8 GiB for 5 of 20 s.
    found = figures([ran(1, 0, 0, 10), ran(2, 10, 15, 20, gpus=2)], TWO_GPUS)

    assert found.memory_utilization == pytest.approx(0.25 * 0.5 + 0.5 * 0.25)


def test_fragmentation_is_the_free_memory_while_jobs_wait() -> None:
    # From 2 to 10 s one job waits, and 6 of 8 GiB are free.
    waited = figures([ran(1, 0, 0, 10), ran(2, 2, 10, 12)], TWO_GPUS)
    nobody = figures([ran(1, 0, 0, 10)], TWO_GPUS)

    assert waited.fragmentation == pytest.approx(0.75)
    assert nobody.fragmentation == 0


def test_the_speed_of_a_user_is_run_time_over_wait_and_run_time() -> None:
    users = by_user([ran(1, 0, 0, 10, "b"), ran(2, 0, 30, 40, "a"), ran(3, 0, 0, 10, "b")])

    assert [(user.user, user.jobs, user.speed) for user in users] == [("a", 1, 0.25), ("b", 2, 1)]
    assert users[0].longest_wait_s == 30


def test_jains_index_is_one_if_all_are_equal_and_one_nth_if_one_has_all() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([1, 0.5]) == pytest.approx(2.25 / 2.5)


def test_jobs_that_take_no_time_count() -> None:
    found = figures([ran(1, 5, 5, 5)], TWO_GPUS)

    assert (found.makespan_s, found.memory_utilization, found.jain_index) == (0, 0, 1)
