"""What is kept of the explanations of a plan."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fakes import ALICE, NOON, FakeClock, G, reading
from gpulease.domain.gpu import Fault, JobId
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim
from gpulease.domain.plan import Plan, plan, started
from gpulease.domain.snapshot import Snapshot
from gpulease.service.explaining import Explainer

HOUR = timedelta(hours=1)


def job(number: int) -> Job:
    return Job(JobId(number), ALICE, "job", "true", Claim(8 * G, time_limit=HOUR), NOON)


def decided(*waiting: int, at_hour: int = 0, **fields: Any) -> Plan:
    """Return the plan of a GPU on which job 1 has just started, for an hour."""
    at = NOON + at_hour * HOUR
    snapshot = Snapshot([job(1)], [reading()], at)
    running = started(job(1), dict(plan(snapshot).grants)[JobId(1)], at)
    taken = Snapshot([running, *map(job, waiting)], [reading()], at)
    return plan(replace(taken, **fields))


def test_a_plan_is_explained_once() -> None:
    plans = [decided(2)]
    explainer = Explainer(lambda: plans[-1], FakeClock())
    explainer.refresh_here()
    first = explainer.latest
    explainer.refresh_here()
    assert explainer.latest is first

    plans.append(decided(2, 3))
    explainer.refresh_here()
    assert explainer.latest is not None
    assert explainer.latest.positions == {2: 1, 3: 2}


def test_the_first_expected_start_is_kept_while_the_job_waits() -> None:
    plans = [decided(2)]
    explainer = Explainer(lambda: plans[-1], FakeClock())
    explainer.refresh_here()
    plans.append(decided(2, 3, at_hour=1))
    explainer.refresh_here()
    starts = {job: start.at for job, start in explainer.first_starts.items()}
    assert starts == {2: NOON + HOUR, 3: NOON + 3 * HOUR}
    plans.append(decided(at_hour=1))
    explainer.refresh_here()
    assert explainer.first_starts == {}


class SlowClock(FakeClock):
    """A clock by which each computation takes a second."""

    def thread_s(self) -> float:
        self.forward(seconds=1)
        return self.steady().total_seconds()


def test_in_a_long_queue_only_an_answer_about_a_new_job_waits() -> None:
    async def scenario() -> None:
        explainer = Explainer(lambda: plans[-1], clock)
        explainer.refresh_here()
        first = explainer.latest
        clock.forward(hours=1)
        plans.append(decided(2, 3))

        explainer.refresh_here()
        assert explainer.latest is first

        await explainer.refresh(JobId(3))
        assert explainer.latest is not None
        assert 3 in explainer.latest.positions

    clock, plans = SlowClock(), [decided(2)]
    asyncio.run(scenario())


def test_an_answer_waits_for_new_explanations_if_the_last_are_old() -> None:
    clock, plans = SlowClock(), [decided(2)]
    explainer = Explainer(lambda: plans[-1], clock)
    explainer.refresh_here()
    clock.forward(hours=1)
    plans.append(decided(3, at_hour=1))
    explainer.refresh_here()
    assert explainer.latest is not None
    assert explainer.latest.plan is plans[-1]


@pytest.mark.parametrize(
    "fields",
    [
        {"drained": {reading().uuid: "new fans"}},
        {"readings": [reading(fault=Fault.LOST)]},
    ],
)
def test_a_gpu_that_is_not_available_any_more_outdates_explanations(fields: Any) -> None:
    clock, plans = SlowClock(), [decided(2)]
    explainer = Explainer(lambda: plans[-1], clock)
    explainer.refresh_here()
    assert explainer.latest is not None
    assert explainer.latest.starts.keys() == {2}
    clock.forward(hours=1)
    plans.append(decided(2, at=NOON + timedelta(seconds=10), **fields))
    explainer.refresh_here()
    assert explainer.latest.plan is plans[-1]
    assert not explainer.latest.starts


def test_an_answer_that_does_not_wait_leaves_a_newer_one_for_the_next() -> None:
    clock, plans = SlowClock(), [decided(2)]
    explainer = Explainer(lambda: plans[-1], clock)
    explainer.refresh_here()
    clock.forward(hours=1)
    plans.append(decided(2, 3))
    computing = explainer.start()
    assert computing is not None
    computing.result(10)
    assert explainer.latest is not None
    assert explainer.latest.plan is plans[-1]


def test_many_that_ask_at_once_share_one_answer() -> None:
    async def scenario() -> None:
        explainer = Explainer(lambda: now, FakeClock())
        await asyncio.gather(*(explainer.refresh(JobId(2)) for _ in range(20)))
        assert explainer.latest is not None
        assert explainer.latest.plan is now

    now = decided(2)
    asyncio.run(scenario())
