"""Preemptible jobs in the plan: they use what is idle, and make way."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import (
    ALICE,
    BOB,
    NOON,
    G,
    order,
    reading,
    running_job,
)
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Job, Outcome, Owner, asked_to_end, grant, worker_gone
from gpulease.domain.lease import State, Trigger
from gpulease.domain.plan import Plan, plan
from gpulease.domain.queue_options import (
    NO_OPTIONS,
    PolicyName,
    Priority,
    QueueOptions,
    QueuePolicy,
)
from gpulease.domain.snapshot import Snapshot

SPARE = QueueOptions(preemptible=True)
A, B = GpuUuid("GPU-0"), GpuUuid("GPU-1")
THIRD = {JobId(3): frozenset({A})}
NONE: Mapping[JobId, frozenset[GpuUuid]] = {}
MANY = QueuePolicy(most_sharing=100)


def waiting(
    number: int,
    size: int,
    options: QueueOptions = NO_OPTIONS,
    owner: Owner = ALICE,
    **more: Any,
) -> Job:
    """Return a queued job that claims so many GiB."""
    job = order(size * G, owner=owner, **more).queued(JobId(number), NOON)
    return replace(job, queue=options)


def active(job: Job, *gpus: GpuUuid) -> Job:
    return running_job(job, *gpus)


def going(job: Job) -> Job:
    stopping = asked_to_end(job, Trigger.REVOKE, Outcome.PREEMPTED, "it makes way", NOON)
    assert stopping is not None
    return stopping


def planned(
    *jobs: Job,
    gpus: int = 1,
    promised: Mapping[JobId, frozenset[GpuUuid]] = NONE,
    policy: QueuePolicy = MANY,
) -> Plan:
    readings = tuple(reading(f"GPU-{index}", index) for index in range(gpus))
    snapshot = Snapshot(
        jobs, readings, NOON + timedelta(minutes=1), promised=promised,
        policy=policy,
    )  # fmt: skip
    return plan(snapshot)


def granted(plan_: Plan) -> set[int]:
    return {job for job, _ in plan_.grants}


def test_a_job_that_others_have_made_way_for_starts_once_although_it_is_old() -> None:
    old = replace(NO_OPTIONS, aging_since_at=NOON - timedelta(days=2))
    decided = planned(waiting(3, 8, old), promised=THIRD, gpus=2)
    ((_, placement),) = decided.grants
    assert placement.allocations == ((A, 8 * G),)
    assert (decided.planned_gpus[B].jobs, decided.reservations) == (0, ())
    assert planned(waiting(3, 8, old), promised=THIRD).reservations == ()


def test_others_start_before_it_whatever_its_class_and_age() -> None:
    old = replace(SPARE, aging_since_at=NOON - timedelta(days=30))
    low = QueueOptions(priority=Priority.LOW)
    assert granted(planned(waiting(1, 8, old), waiting(2, 8, low))) == {2}


def test_it_makes_way_for_a_job_that_does_not_fit_otherwise() -> None:
    decided = planned(active(waiting(1, 6, SPARE), A), waiting(2, 4))
    assert decided.preempts == ((1, 2),)
    assert decided.promised == {2: {A}}
    assert decided.grants == ()


def test_none_makes_way_while_the_job_fits_elsewhere() -> None:
    decided = planned(active(waiting(1, 6, SPARE), A), waiting(2, 4), gpus=2)
    assert (granted(decided), decided.preempts) == ({2}, ())


def test_no_second_job_makes_way_while_the_first_is_going() -> None:
    first = going(active(waiting(1, 4, SPARE), A))
    decided = planned(first, active(waiting(2, 4, SPARE), A), waiting(3, 4), promised=THIRD)
    assert (decided.preempts, decided.promised) == ((), {3: {A}})


def test_the_memory_that_a_job_frees_is_kept_for_the_job_that_it_makes_way_for() -> None:
    """The first of two jobs has ended; a smaller job with a better score would fit there now."""
    second = going(active(waiting(2, 4, SPARE), A))
    small = waiting(4, 1, owner=BOB)
    decided = planned(second, waiting(3, 8), small, waiting(5, 1, SPARE), promised=THIRD)
    assert (granted(decided), decided.promised) == (set(), {3: {A}})
    assert decided.reserved == {A: 3}
    started = planned(waiting(3, 8), small, promised=THIRD)
    assert granted(started) == {3}


def test_a_promise_ends_with_its_job() -> None:
    decided = planned(going(active(waiting(1, 8, SPARE), A)), waiting(4, 8, SPARE), promised=THIRD)
    assert (granted(decided), decided.promised) == (set(), {})


def test_a_forgotten_promise_is_made_again_without_another_victim() -> None:
    """The daemon was killed since."""
    first = going(active(waiting(1, 8, SPARE), A))
    decided = planned(first, active(waiting(2, 8, SPARE), B), waiting(3, 8), gpus=2)
    assert (decided.preempts, decided.promised) == ((), {3: {A}})


def test_a_job_that_gave_up_has_none_make_way() -> None:
    late = replace(waiting(2, 8), gives_up_at=NOON)
    assert planned(active(waiting(1, 8, SPARE), A), late).preempts == ()


def test_several_jobs_have_others_make_way_in_their_order() -> None:
    spare = [active(waiting(number, 8, SPARE), gpu) for number, gpu in ((1, A), (2, B))]
    decided = planned(*spare, waiting(3, 8), waiting(4, 8), waiting(5, 8), gpus=2)
    assert dict(decided.preempts).keys() == {1, 2}
    assert decided.promised.keys() == {3, 4}


def test_preemptible_jobs_use_what_is_reserved_and_make_way_when_the_job_fits() -> None:
    wide = waiting(2, 8, QueueOptions(aging_since_at=NOON - timedelta(days=3)), gpus=2)
    held = planned(active(waiting(1, 8), A), wide, waiting(3, 8, SPARE), gpus=2)
    assert held.reservations
    assert granted(held) == {3}
    fits_now = planned(wide, active(waiting(3, 8, SPARE), B), gpus=2)
    assert (fits_now.preempts, fits_now.promised.keys()) == (((3, 2),), {2})


def test_a_reservation_counts_with_a_grace_of_at_most_five_minutes() -> None:
    """Job 2 needs both GPUs, and the job on the first ends in 3 minutes."""
    wide = waiting(2, 8, QueueOptions(aging_since_at=NOON - timedelta(days=3)), gpus=2)
    fixed = active(waiting(1, 8, time_limit=timedelta(minutes=3)), A)
    for asked, reserved_min in ((None, 3), (timedelta(minutes=4), 5), (timedelta(hours=1), 6)):
        spare = replace(active(waiting(3, 8, SPARE), B), grace=asked)
        held = planned(fixed, wide, spare, gpus=2)
        assert held.reservations
        assert held.reservations[0].at_s == (NOON + timedelta(minutes=reserved_min)).timestamp()


def test_under_strict_order_the_first_has_others_make_way_and_the_rest_wait() -> None:
    fifo = QueuePolicy(name=PolicyName.FIFO, most_sharing=100)
    decided = planned(active(waiting(1, 6, SPARE), A), waiting(2, 4), waiting(3, 1), policy=fifo)
    assert decided.preempts == ((1, 2),)
    blocked = planned(active(waiting(1, 8), A), waiting(2, 4), waiting(3, 1), policy=fifo)
    assert (blocked.preempts, blocked.grants) == ((), ())


class _Machine:
    """Carries plans out, one pass after the other."""

    def __init__(self, jobs: list[Job], gpus: int) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.gpus = gpus
        self.promised: Mapping[JobId, frozenset[GpuUuid]] = {}
        self.preempted: list[int] = []

    def one_pass(self) -> Plan:
        decided = planned(*self.jobs.values(), gpus=self.gpus, promised=self.promised)
        for number, placement in decided.grants:
            job = grant(self.jobs[number], placement, NOON)
            self.jobs[number] = replace(job, state=State.ACTIVE, started_at=NOON)
        for number, _ in decided.preempts:
            self.jobs[number] = going(self.jobs[number])
            self.preempted.append(number)
        self.promised = decided.promised
        return decided

    def ends(self, number: JobId) -> None:
        job = self.jobs.pop(number)
        assert job.outcome is not None
        assert worker_gone(job, Trigger.WORKER_EXITED, job.outcome, None, None, NOON)

    def held(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for job in self.jobs.values():
            for lease in job.leases if job.holds_memory else ():
                sums[lease.gpu] = sums.get(lease.gpu, 0) + lease.memory
        return sums


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.booleans(), st.integers(1, 2), st.booleans()), max_size=8
    )
)
def test_every_job_for_which_others_made_way_starts_when_they_have_ended(
    drawn: list[tuple[int, bool, int, bool]],
) -> None:
    """And no GPU is over its memory meanwhile, and nobody makes way who need not."""
    jobs = [
        waiting(n, size, SPARE if spare else QueueOptions(), ALICE if mine else BOB, gpus=gpus)
        for n, (size, spare, gpus, mine) in enumerate(drawn, 1)
    ]
    machine = _Machine([job for job in jobs if job.queue.preemptible], 2)
    machine.one_pass()
    machine.jobs |= {job.id: job for job in jobs if not job.queue.preemptible}

    decided = machine.one_pass()

    claimants = set(decided.promised)
    assert {to for _, to in decided.preempts} <= claimants
    while leaving := [job for job in machine.jobs.values() if job.state is State.RELEASING]:
        machine.ends(leaving[0].id)
        later = machine.one_pass()
        assert not {to for _, to in later.preempts} & claimants
        assert all(memory <= 8 * G for memory in machine.held().values())
    assert all(machine.jobs[number].holds_memory for number in claimants)
