"""What hooks report decides whether a lease is shown as limited by its framework."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    NOON,
    FakeClock,
    FakeGpus,
    MemoryStore,
    kept,
    order,
    running_job,
)
from gpulease.domain.enforcement import (
    MOST_REPORTS,
    HookReport,
    HookState,
    Reports,
    UncoveredProcess,
    as_reported,
    is_limited,
    summary,
    with_report,
)
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job
from gpulease.errors import RecordUnwritable
from gpulease.service.hook_reports import HookReports, Steps
from gpulease.service.observation import Observation
from gpulease.units import GIB

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
LEVELS = ("framework", "watch")


def limited(pid: int = 1, framework: str = "torch", **limits: int) -> HookReport:
    gpus = limits or {A: GIB}
    return HookReport(
        pid, framework, "2.9", HookState.LIMITED, NOON,
        tuple((GpuUuid(gpu), limit) for gpu, limit in gpus.items()),
    )  # fmt: skip


def failed(pid: int = 1, framework: str = "torch") -> HookReport:
    return HookReport(pid, framework, "2.9", HookState.FAILED, NOON, why="no _lazy_call")


def after(*reports: HookReport) -> Reports:
    known: Reports = ()
    for each in reports:
        known = with_report(known, each, [A, B])
    return known


def test_nothing_is_limited_before_a_hook_says_so() -> None:
    assert as_reported(LEVELS, (), A) == ("watch",)
    assert summary(()) == "none"


def test_a_report_counts_for_the_gpus_that_it_names() -> None:
    known = after(limited())

    assert as_reported(LEVELS, known, A) == LEVELS
    assert as_reported(LEVELS, known, B) == ("watch",)


def test_a_level_that_was_not_set_up_is_not_shown_whatever_is_reported() -> None:
    assert as_reported(("watch",), after(limited()), A) == ("watch",)


@pytest.mark.parametrize("state", [HookState.FAILED, HookState.ABSENT])
def test_one_process_that_is_not_limited_outweighs_all_that_are(state: HookState) -> None:
    known = after(limited(1), limited(2), replace(failed(3), state=state))

    assert not is_limited(known, A)
    assert summary(known) == state


def test_a_process_on_the_gpu_that_reported_nothing_outweighs_those_that_did() -> None:
    known = after(limited(1))

    assert as_reported(LEVELS, known, A, [1]) == LEVELS
    assert as_reported(LEVELS, known, A, [1, 2]) == ("watch",)


def test_a_failure_stays() -> None:
    known = after(failed(), limited())

    assert known == (failed(),)


def test_a_gpu_that_the_job_did_not_lease_is_dropped() -> None:
    known = with_report((), limited(1, "torch", **{A: 1, "GPU-other": 2}), [A])

    assert [each.limits for each in known] == [((A, 1),)]


def test_the_first_limit_of_a_pool_is_kept() -> None:
    known = after(limited(1, "torch", **{A: 1}), limited(1, "torch", **{A: 9, B: 2}))

    assert [each.limits for each in known] == [((A, 1), (B, 2))]


REPORTS = st.builds(
    lambda pid, framework, state, gpu: replace(limited(pid, framework, **{gpu: 1}), state=state),
    st.integers(1, 500),
    st.sampled_from(["torch", "jax"]),
    st.sampled_from([HookState.LIMITED, HookState.LIMITED, HookState.FAILED, HookState.ABSENT]),
    st.sampled_from([A, B]),
)


@given(st.lists(REPORTS, max_size=300))
def test_however_many_reports_a_user_sends_they_are_bounded_and_a_failure_lowers(
    sent: list[HookReport],
) -> None:
    known = after(*sent)

    assert len(known) <= MOST_REPORTS
    if any(each.state is not HookState.LIMITED for each in sent):
        assert not is_limited(known, A)
        assert not is_limited(known, B)


class World:
    """One running job with a lease of one GPU, and a store that may refuse."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        with self.store.write() as tx:
            started = running_job(tx.add(order(), NOON), memory=4 * GIB)
            leases = tuple(replace(lease, enforced_by=LEVELS) for lease in started.leases)
            tx.save(replace(started, leases=leases), None)
        self.full = False
        self.hooks = self.restarted()

    def restarted(self, by_driver: bool = True) -> HookReports:
        return HookReports(self.store, FakeClock(), self._in_writer, by_driver=by_driver)

    async def _in_writer(self, call: Callable[[], Any]) -> Any:
        if self.full:
            raise RecordUnwritable("cannot write: the disk is full")
        return call()

    @property
    def job(self) -> Job:
        return kept(self.store, JobId(1))

    def hear(self, report: HookReport) -> None:
        asyncio.run(self.hooks.hear(self.job, report))

    def levels(self) -> list[tuple[str, ...] | None]:
        return [lease.enforced_by for lease in self.hooks.settled(self.job).leases]


@pytest.fixture
def world() -> World:
    return World()


def test_what_was_reported_survives_a_restart(world: World) -> None:
    world.hear(limited(1))
    world.hear(failed(2))

    assert world.restarted().of(JobId(1)) == (limited(1), failed(2))
    assert world.levels() == [("watch",)]


def test_the_history_has_the_first_failure_only(world: World) -> None:
    for pid in range(5):
        world.hear(failed(pid))

    events = [(each.kind, each.detail) for each in world.store.events(JobId(1))]
    assert events.count(("hook_failed", "no _lazy_call")) == 1


def test_the_first_report_of_a_limit_is_the_first_use_of_a_gpu(world: World) -> None:
    world.hear(replace(limited(), at=NOON + timedelta(seconds=3)))
    world.hear(replace(limited(2), at=NOON + timedelta(seconds=9)))

    assert world.job.activity.first_use_at == NOON + timedelta(seconds=3)


@pytest.mark.parametrize("by_driver", [True, False])
def test_without_a_report_the_processes_on_a_gpu_show_the_first_use(
    by_driver: bool, world: World
) -> None:
    hooks = world.restarted(by_driver)

    asyncio.run(hooks.observe(Observation((), {99: JobId(1)}, NOON)))

    assert world.job.activity.first_use_at == NOON


def test_a_report_that_is_not_on_disk_is_not_acknowledged_and_counts_when_it_is_repeated(
    world: World,
) -> None:
    world.full = True
    with pytest.raises(RecordUnwritable):
        world.hear(failed())
    assert world.restarted().of(JobId(1)) == ()
    world.full = False

    world.hear(failed())

    assert world.restarted().of(JobId(1)) == (failed(),)


def test_a_repetition_writes_nothing(world: World) -> None:
    world.hear(limited())
    writes = world.store.writes

    world.hear(replace(limited(), at=NOON + timedelta(hours=1)))

    assert world.store.writes == writes


def test_a_process_without_the_hook_is_noted_even_if_the_disk_is_full(world: World) -> None:
    world.hear(limited(1))
    world.full = True

    asyncio.run(world.hooks.hear_absent(world.job, UncoveredProcess(5, "a.out", "not Python")))

    assert world.levels() == [("watch",)]


def test_a_process_that_stays_on_a_gpu_without_a_report_is_noted_for_the_rest_of_the_job(
    world: World,
) -> None:
    world.hear(limited(1))
    gpus = FakeGpus({A: 8 * GIB}, processes={A: {1: GIB, 2: GIB}})

    def look(seconds: int) -> None:
        at = NOON + timedelta(seconds=seconds)
        seen = Observation(gpus.read(), {1: JobId(1), 2: JobId(1)}, at)
        asyncio.run(world.hooks.observe(seen))

    look(0)
    look(29)
    assert world.levels() == [LEVELS]
    look(30)

    assert world.levels() == [("watch",)]
    assert [(each.pid, each.state) for each in world.restarted().of(JobId(1))][1:] == [
        (2, HookState.ABSENT)
    ]


def test_the_steps_of_an_ended_job_are_those_of_its_busiest_process(world: World) -> None:
    world.hooks.note_steps(world.job, 1, Steps(10, 5.0))
    world.hooks.note_steps(world.job, 2, Steps(500, 100.0))
    for pid in range(3, 1000):
        world.hooks.note_steps(world.job, pid, Steps(1, 0.0))

    activity = world.hooks.settled(world.job).activity

    assert (activity.steps, activity.steps_per_second) == (500, 5.0)
