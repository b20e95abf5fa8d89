"""Whatever happens in whatever order: no byte is promised twice, exactly the holders have a GPU."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fakes import (
    ALICE,
    BOB,
    NOON,
    FakeClock,
    FakeFinder,
    FakeGpus,
    G,
    MemoryStore,
    hold_order,
    order,
)
from gpulease.domain.gpu import JobId
from gpulease.domain.job import QUEUED_AGAIN, Exit, Outcome
from gpulease.domain.lease import State
from gpulease.domain.plan import Plan, plan
from gpulease.domain.queue_options import Priority, QueueOptions, QueuePolicy
from gpulease.errors import BadValue, CannotLease, GpuleaseError, NoRoomNow, WrongState
from gpulease.service import jobs, submission
from gpulease.service.job_list import JobQuery
from gpulease.service.jobs import extend
from gpulease.service.observation import observe
from gpulease.service.ports import MainExited, Policy, Store, WorkerExited, WorkerStarted
from gpulease.service.queue_state import QueueState
from gpulease.service.scheduler import reconcile

SIZES = {"GPU-a": 8 * G, "GPU-b": 8 * G, "GPU-c": 4 * G}
POLICY = Policy(
    margin=0,
    smallest_lease=0,
    queue=QueuePolicy(soft_reservation_after=timedelta(hours=1)),
)
gpu_names = st.sampled_from(sorted(SIZES))
halves = st.integers(min_value=1, max_value=20).map(lambda count: count * G // 2)


class Machine(RuleBasedStateMachine):
    """A queue, its GPUs and its jobs, under any sequence of events."""

    make_store: Callable[[], Store] = staticmethod(MemoryStore)

    @initialize()
    def start(self) -> None:
        self.store = self.make_store()
        self.gpus = FakeGpus(dict(SIZES))
        self.finder = FakeFinder()
        self.clock = FakeClock()
        self.state = QueueState(self.store)
        self.ended: dict[JobId, object] = {}

    def seen(self):  # type: ignore[no-untyped-def]
        return observe(self.store, self.gpus, self.finder, self.clock)

    def some_job(self, pick: int, *states: State) -> JobId | None:
        found = [job.id for job in self.store.live() if job.state in states]
        return found[pick % len(found)] if found else None

    @rule(
        memory=halves,
        gpus=st.integers(1, 3),
        exclusive=st.booleans(),
        patient=st.booleans(),
        owner=st.sampled_from([ALICE, BOB]),
        hours=st.none() | st.integers(1, 5),
        options=st.builds(
            QueueOptions,
            priority=st.sampled_from(Priority),
            requeue=st.booleans(),
            retries=st.integers(0, 2),
            preemptible=st.booleans(),
            begin_at=st.sampled_from([None, None, NOON + timedelta(hours=4)]),
        ),
    )
    def submit(self, memory, gpus, exclusive, patient, owner, hours, options) -> None:  # type: ignore[no-untyped-def]
        wanted = order(
            memory,
            gpus=gpus,
            exclusive=exclusive,
            owner=owner,
            wait_for=None if patient else timedelta(0),
            time_limit=hours and timedelta(hours=hours),
        )
        wanted = replace(wanted, queue=options)
        before = self.store.live()
        try:
            job = submission.submit(self.store, wanted, self.seen(), POLICY, self.clock)
        except (CannotLease, NoRoomNow):
            assert self.store.live() == before, "a refusal leaves nothing behind"
        else:
            assert job.state is State.QUEUED

    @rule(memory=halves, hours=st.none() | st.integers(1, 5))
    def somebody_wants_to_hold(self, memory: int, hours: int | None) -> None:
        wanted = hold_order(memory, time_limit=hours and timedelta(hours=hours))
        try:
            held = submission.submit(self.store, wanted, self.seen(), POLICY, self.clock)
        except CannotLease:
            return
        assert held.holder == wanted.holder

    @rule(pick=st.integers(0, 99))
    def who_waits_is_withdrawn(self, pick: int) -> None:
        job = self.some_job(pick, *State)
        if job is not None:
            before = self.store.job(job)
            after = jobs.withdraw(self.store, job, "gone", self.clock)
            assert before is not None
            assert (after.state is State.ENDED) == (before.state is State.QUEUED)

    @rule(pick=st.integers(0, 99), hours=st.integers(-5, 5))
    def somebody_extends(self, pick: int, hours: int) -> None:
        job = self.some_job(pick, *State)
        if job is None:
            return
        try:
            changed = extend(self.store, job, timedelta(hours=hours), "alice", self.clock)
        except (WrongState, BadValue):
            return
        assert changed.expires_at is None or changed.expires_at >= self.clock.now()

    @rule(pick=st.integers(0, 99), code=st.integers(0, 255))
    def main_process_exits(self, pick: int, code: int) -> None:
        job = self.some_job(pick, State.ACTIVE, State.RELEASING)
        if job is not None:
            news = MainExited(Exit(code), self.clock.now())
            assert jobs.note_main_exited(self.store, job, news).holds_memory

    @rule()
    def reconcile(self) -> None:
        decided = reconcile(self.store, self.seen(), POLICY, self.clock, state=self.state)
        for victim, winner in decided.preempts:
            making_way, first = self.store.job(victim), self.store.job(winner)
            assert making_way is not None
            assert first is not None
            assert making_way.queue.preemptible
            assert not first.queue.preemptible
            jobs.revoke(self.store, victim, Outcome.PREEMPTED, "it made way", self.clock)
        for ledger in decided.gpus:
            if any(ledger.uuid in dict(placed.allocations) for _, placed in decided.grants):
                assert ledger.allocatable is not None
                assert ledger.unmanaged is not None
                assert ledger.committed + ledger.unmanaged <= ledger.allocatable
        self.what_is_kept_between_passes_changes_nothing(decided)

    def what_is_kept_between_passes_changes_nothing(self, decided: Plan) -> None:
        anew = plan(replace(decided.snapshot, queue=None, gpus=None, blocked=None))
        assert anew.grants == decided.grants
        assert anew.blocked == decided.blocked
        assert anew.preempts == decided.preempts
        assert [each.job for each in anew.reservations] == [
            each.job for each in decided.reservations
        ]

    @rule(gpu=gpu_names, memory=st.integers(0, 8))
    def a_stranger_comes_or_goes(self, gpu: str, memory: int) -> None:
        self.gpus.unmanaged[gpu] = min(memory * G, SIZES[gpu])

    @rule(pick=st.integers(0, 99))
    def worker_starts(self, pick: int) -> None:
        job = self.some_job(pick, State.GRANTED, State.ACTIVE, State.RELEASING)
        if job is not None:
            jobs.note_started(self.store, job, WorkerStarted(job, job, self.clock.now()))

    @rule(pick=st.integers(0, 99), sixteenths=st.integers(0, 20))
    def worker_uses_memory(self, pick: int, sixteenths: int) -> None:
        job_id = self.some_job(pick, State.ACTIVE, State.RELEASING)
        job = self.store.job(job_id) if job_id is not None else None
        for lease in job.leases if job is not None else ():
            self.finder.jobs[job.id] = job.id  # type: ignore[union-attr]
            held = self.gpus.processes.setdefault(lease.gpu, {})
            held[job.id] = lease.memory * sixteenths // 16  # type: ignore[union-attr]

    @rule(pick=st.integers(0, 99))
    def somebody_requeues(self, pick: int) -> None:
        job = self.some_job(pick, *State)
        if job is not None:
            try:
                jobs.requeue(self.store, job, "alice", self.clock)
            except WrongState:
                return
            assert job in [each.id for each in self.store.live()], "its memory is not free yet"

    @rule(
        pick=st.integers(0, 99),
        code=st.integers(0, 255),
        outcome=st.sampled_from([Outcome.EXITED, Outcome.LOST, *QUEUED_AGAIN]),
        by_shutdown=st.booleans(),
        with_start=st.booleans(),
    )
    def worker_exits(
        self, pick: int, code: int, outcome: Outcome, by_shutdown: bool, with_start: bool
    ) -> None:
        job = self.some_job(pick, State.GRANTED, State.ACTIVE, State.RELEASING)
        if job is None:
            return
        for held in self.gpus.processes.values():
            held.pop(job, None)
        exit_ = None if outcome is Outcome.LOST else Exit(code)
        at = self.clock.now()
        start = WorkerStarted(job, job, at) if with_start else None
        news = WorkerExited(outcome, exit_, at, "why", by_shutdown, start)
        ended = jobs.note_exited(self.store, job, news)
        assert ended.state is State.ENDED
        assert not with_start or ended.started_at is not None
        self.ended[job] = ended
        assert jobs.note_exited(self.store, job, news).state is State.ENDED, "twice is once"

    @rule(pick=st.integers(0, 99))
    def launch_fails(self, pick: int) -> None:
        job = self.some_job(pick, State.GRANTED)
        if job is not None:
            why = GpuleaseError("cannot start: no")
            jobs.note_launch_failed(self.store, job, why, self.clock)

    @rule(pick=st.integers(0, 99))
    def somebody_cancels(self, pick: int) -> None:
        job = self.some_job(pick, *State)
        if job is not None:
            jobs.cancel(self.store, job, "alice", self.clock)

    @rule(pick=st.integers(0, 99))
    def somebody_cancels_what_has_ended(self, pick: int) -> None:
        if self.ended:
            job = sorted(self.ended)[pick % len(self.ended)]
            try:
                jobs.cancel(self.store, job, "alice", self.clock)
            except WrongState:
                return
            raise AssertionError("what has ended cannot be cancelled")

    @rule(pick=st.integers(0, 99))
    def time_runs_out(self, pick: int) -> None:
        job = self.some_job(pick, State.ACTIVE, State.RELEASING)
        if job is not None:
            jobs.note_expired(self.store, job, self.clock)

    @rule(hours=st.integers(1, 5))
    def time_passes(self, hours: int) -> None:
        self.clock.forward(hours=hours)

    @invariant()
    def no_byte_is_promised_twice(self) -> None:
        if not hasattr(self, "store"):
            return
        for gpu, size in SIZES.items():
            leased = sum(
                lease.memory
                for job in self.store.live()
                if job.holds_memory
                for lease in job.leases
                if lease.gpu == gpu
            )
            assert leased <= size, gpu

    @invariant()
    def the_index_of_the_holders_leaves_none_out(self) -> None:
        if hasattr(self, "store"):
            holding = [job for job in self.store.live() if job.holds_memory]
            assert list(self.store.holding()) == holding

    @invariant()
    def exactly_the_holders_have_a_gpu(self) -> None:
        if not hasattr(self, "store"):
            return
        for job in self.store.live():
            held = [lease for lease in job.leases if lease.released_at is None]
            assert bool(held) == job.holds_memory, job
            if held:
                assert len({lease.gpu for lease in held}) == job.claim.gpus

    @invariant()
    def what_is_queued_again_is_queued_once(self) -> None:
        if not hasattr(self, "store"):
            return
        known = self.store.jobs(JobQuery(ended=True)).jobs
        continue_ = [job.usage.retry_of for job in known if job.usage.retry_of is not None]
        assert len(continue_) == len(set(continue_))
        by_outcome = {job.id for job in known if job.state is State.ENDED}
        by_outcome &= {job.id for job in known if job.outcome in QUEUED_AGAIN}
        assert by_outcome <= set(continue_)

    @invariant()
    def nobody_shares_a_gpu_with_one_who_is_alone(self) -> None:
        if not hasattr(self, "store"):
            return
        for gpu in SIZES:
            holders = [
                job
                for job in self.store.live()
                if job.holds_memory and gpu in {lease.gpu for lease in job.leases}
            ]
            if any(job.claim.exclusive for job in holders):
                assert len(holders) == 1


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
