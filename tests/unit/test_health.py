"""Whose fault a fault is, what is done about it, and when a GPU is used again."""

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import (
    NOON,
    FakeClock,
    FakeFinder,
    FakeGpus,
    G,
    MemoryStore,
    granted_job,
    order,
    reading,
)
from goldens import mentions, sentence
from gpulease.domain import health
from gpulease.domain.gpu import Fault, GpuUuid, JobId
from gpulease.domain.health import (
    Drain,
    Finding,
    GpuAvailability,
    HardwareFault,
    HealthAction,
    HealthFigures,
    HealthReport,
    findings,
    is_over,
    lasting,
    notice,
    quiet_after,
)
from gpulease.domain.xid import _ROWS, SOURCES, XIDS, Blame
from gpulease.errors import RecordUnwritable
from gpulease.service.health import HealthPolicy, HealthWatch
from gpulease.service.observation import Observation, observe
from gpulease.service.ports import Event
from gpulease.service.scheduler import follow_clock

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
WELL = HealthFigures(0, False, False, False)
MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("blame", "numbers"),
    [
        (Blame.APPLICATION, (8, 13, 31, 32, 43, 45, 68, 69, 72, 104, 109, 135)),
        (Blame.CONTAINED, (94,)),
        (Blame.HARDWARE, (46, 48, 62, 64, 74, 79, 92, 95, 110, 119, 120, 140, 143, 158)),
        (Blame.AVOIDED, (63,)),
        (Blame.ADMIN, (1, 44, 61, 121, 144, 150, 155, 173, 999)),
        (Blame.UNKNOWN, (106, 154)),
    ],
)
def test_each_xid_is_the_fault_of_whom_the_table_says(
    blame: Blame, numbers: tuple[int, ...]
) -> None:
    assert {health.xid(number).blame for number in numbers} == {blame}


def test_each_xid_stands_once_and_names_a_source_that_is_listed() -> None:
    numbers = [number for _, _, rows in _ROWS for number in rows]
    assert sorted(numbers) == sorted(set(numbers))
    for row in XIDS.values():
        words = {part.strip().partition(":")[0] for part in row.source.split(";")}
        assert words & SOURCES.keys(), row


@pytest.mark.parametrize(
    ("figures", "kind"),
    [
        (WELL, None),
        (HealthFigures(), None),
        (replace(WELL, remap_pending=True), "remap_pending"),
        (replace(WELL, remap_pending=True, remap_failed=True), "remap_failed"),
        (replace(WELL, remap_pending=True, pages_pending=True), "pages_pending"),
        *((replace(WELL, recovery=each), "recovery") for each in (1, 2, 4, 6, 7)),
        (replace(WELL, remap_pending=True, recovery=1), "recovery"),
        *((replace(WELL, recovery=each), None) for each in (0, 3, 5, 99)),
    ],
)
def test_what_lasts_is_said_once_and_unknown_is_not_bad(
    figures: HealthFigures, kind: str | None
) -> None:
    now = lasting(figures)
    assert (now and now.kind) == kind
    said = [each.kind for each in findings(HealthReport(A, (), figures), WELL)]
    assert said == ([kind] if kind else [])
    assert findings(HealthReport(A, (), figures), figures) == ()


def test_memory_errors_count_when_they_grow_and_no_xid_explains_them() -> None:
    def kinds(before: int | None, after: int | None, *xids: int) -> list[str]:
        figures = None if before is None else replace(WELL, uncorrectable=before)
        heard = HealthReport(A, xids, replace(WELL, uncorrectable=after))
        return [each.kind for each in findings(heard, figures)]

    assert kinds(0, 2) == ["ecc"]
    assert kinds(2, 2) == kinds(None, 2) == kinds(None, None) == kinds(2, None) == []
    assert kinds(5, 0) == [], "a reset begins the count anew"
    assert kinds(0, 2, 94) == ["xid 94"], "contained, and explained"
    assert kinds(0, 2, 31) == ["xid 31", "ecc"], "a program's fault explains none"
    assert kinds(0, 2, 63) == ["xid 63", "ecc"], "nor does what became of the row"


@given(st.timedeltas(timedelta(seconds=1), timedelta(days=9)), st.integers(0, 10**6))
def test_the_pause_after_a_relapse_grows_and_never_for_ever(
    first: timedelta, relapses: int
) -> None:
    assert quiet_after(first, 0) == first or first > health.LONGEST_QUIET
    assert first <= quiet_after(first, relapses) <= max(first, health.LONGEST_QUIET)
    assert quiet_after(first, relapses) <= quiet_after(first, relapses + 1)


def test_a_fault_is_over_when_nothing_lasts_and_it_was_quiet_or_a_person_excused_it() -> None:
    ill = GpuAvailability(None, HardwareFault("xid 79", "off", NOON))
    pending = replace(WELL, pages_pending=True)
    assert is_over(ill, WELL, 10 * MINUTE, 10 * MINUTE)
    assert is_over(ill, HealthFigures(), 10 * MINUTE, 10 * MINUTE), "unknown is not bad"
    assert not is_over(ill, WELL, 9 * MINUTE, 10 * MINUTE)
    assert not is_over(ill, None, 99 * MINUTE, MINUTE), "nothing was read yet"
    assert not is_over(ill, pending, 99 * MINUTE, MINUTE)
    assert is_over(replace(ill, accepted_fault="pages_pending"), pending, 99 * MINUTE, MINUTE)
    assert is_over(ill, replace(WELL, remap_pending=True), 99 * MINUTE, MINUTE)


def test_owners_are_told_whose_fault_it_is_and_nothing_that_nobody_knows() -> None:
    sentence("health-of-a-program", notice("0", health.xid(31)))
    sentence("health-of-the-hardware", notice("0:1", health.xid(79)))
    assert notice("0", health.xid(154)) is None
    assert notice("0", Finding("back", "it can be read again", Blame.UNKNOWN)) is None


class Machine:
    """A watch over two GPUs, a job on each, and what was told to whom."""

    def __init__(self, policy: HealthPolicy | None = None) -> None:
        self.store, self.clock = MemoryStore(), FakeClock()
        self.gpus = FakeGpus({A: 8 * G, B: 8 * G})
        self.told: list[tuple[JobId, str]] = []
        self.woken = 0
        self.seen: Observation | None = None
        for uuid in (A, B):
            job = self.store.add(order(), NOON)
            self.store.save(granted_job(job, uuid), Event(NOON, "grant"))
        self.watch = HealthWatch(
            self.store, self.gpus, self.clock, policy or HealthPolicy(), self._tell,
            wake=self._wake, in_writer=self._now, in_observer=self._now,
        )  # fmt: skip

    async def _tell(self, job: JobId, text: str) -> None:
        self.told.append((job, text))

    def _wake(self) -> None:
        self.woken += 1

    @staticmethod
    async def _now(call):  # type: ignore[no-untyped-def]
        return call()

    def look(self, *heard: HealthReport, minutes: float = 0) -> None:
        """Let some time go by, and look."""
        self.clock.forward(minutes=minutes)
        self.gpus.heard = list(heard)
        self.seen = observe(self.store, self.gpus, FakeFinder(), self.clock, self.seen)
        asyncio.run(self.watch.observe(self.seen))

    def closed(self, uuid: GpuUuid = A) -> str | None:
        return self.store.drained().get(uuid)

    def kinds(self) -> list[str]:
        return [each.kind for each in self.store.noted]


def test_a_fault_of_the_hardware_drains_its_gpu_alone_and_tells_its_owners_alone() -> None:
    machine = Machine()
    machine.look(HealthReport(A, (), WELL), HealthReport(B, (), WELL))
    assert (machine.kinds(), machine.woken) == ([], 0)
    machine.look(HealthReport(A, (79,)))
    assert mentions(machine.closed(), "gpulease", "XID 79")
    assert machine.closed(B) is None
    assert [job for job, _ in machine.told] == [1]
    assert machine.kinds() == ["xid 79", "faulty"]
    assert machine.woken == 1


def test_the_fault_of_a_program_is_told_and_drains_nothing() -> None:
    machine = Machine()
    machine.look(HealthReport(B, (31, 31)))
    machine.look(HealthReport(B, (31,)), minutes=1)
    assert machine.closed(B) is None
    assert [job for job, _ in machine.told] == [2], "said again only after a while"
    machine.look(HealthReport(B, (31,)), minutes=11)
    assert len(machine.told) == 2


def test_a_storm_of_a_programs_faults_costs_few_transactions_and_is_counted_in_full() -> None:
    machine = Machine()
    for _ in range(60):
        machine.look(HealthReport(A, (13,) * 10_000 + (31,)), minutes=1 / 60)
    machine.look(minutes=1)
    assert machine.store.writes <= 8
    counts = Counter[str]()
    for each in machine.store.noted:
        counts[each.kind] += each.count
    assert counts == {"xid 13": 600_000, "xid 31": 60}
    assert machine.watch.faults == {
        (A, "xid 13", Blame.APPLICATION): 600_000,
        (A, "xid 31", Blame.APPLICATION): 60,
    }
    assert [job for job, _ in machine.told] == [1, 1], "once for each kind"


def test_a_fault_of_the_hardware_in_a_storm_is_acted_on_at_once() -> None:
    machine = Machine()
    machine.look(HealthReport(A, (13,) * 1000))
    machine.look(HealthReport(A, (13,) * 1000), minutes=1 / 60)
    machine.look(HealthReport(A, (13, 79, 13)), minutes=1 / 60)
    assert "XID 79" in (machine.closed() or "")
    assert Counter(machine.kinds()) == {"xid 13": 2, "xid 79": 1, "faulty": 1}


def test_a_storm_while_the_disk_is_full_takes_no_more_memory_than_one_fault() -> None:
    machine = Machine()
    machine.store.is_full = True
    for _ in range(100):
        with pytest.raises(RecordUnwritable):
            machine.look(HealthReport(A, (13, 79)), minutes=1 / 60)
    machine.store.is_full = False
    machine.look()
    assert machine.closed()
    assert [job for job, _ in machine.told] == [1, 1], "once for each kind"
    assert [(each.kind, each.count) for each in machine.store.noted][:2] == [
        ("xid 13", 100), ("xid 79", 100),
    ]  # fmt: skip
    assert machine.watch.faults == {
        (A, "xid 13", Blame.APPLICATION): 100,
        (A, "xid 79", Blame.HARDWARE): 100,
    }


def test_a_gpu_comes_back_after_a_quiet_time_that_doubles_with_each_relapse() -> None:
    machine = Machine()
    machine.look(HealthReport(A, (95,), WELL))
    machine.look(minutes=9)
    assert machine.closed()
    machine.look(minutes=2)
    assert machine.closed() is None
    assert machine.kinds()[-1] == "recovered"
    machine.look(HealthReport(A, (95,), WELL))
    machine.look(minutes=11)
    assert machine.closed(), "twice within a day: twice as long"
    machine.look(minutes=10)
    assert machine.closed() is None
    machine.look(HealthReport(A, (95,), WELL), minutes=60 * 25)
    machine.look(minutes=11)
    assert machine.closed() is None, "yesterday's are forgotten"


def test_a_new_fault_begins_the_quiet_time_anew_and_so_does_being_unreadable() -> None:
    machine = Machine()
    machine.look(HealthReport(A, (119,), WELL))
    machine.look(HealthReport(A, (119,)), minutes=8)
    machine.look(minutes=8)
    assert machine.closed()
    machine.gpus.broken[A] = reading(A, fault=Fault.UNREADABLE)
    machine.look(minutes=1)
    del machine.gpus.broken[A]
    machine.look(minutes=5)
    assert machine.closed()
    machine.look(minutes=11)
    assert machine.closed() is None


@pytest.mark.parametrize("ahead", [timedelta(days=1), timedelta(days=-1)])
def test_a_clock_that_is_set_makes_no_quiet_time_longer_or_shorter(ahead: timedelta) -> None:
    machine = Machine()
    machine.look(HealthReport(A, (95,), WELL))
    machine.look(minutes=5)
    machine.store.standing[B] = GpuAvailability(Drain("alice", "fan", machine.clock.now()))
    machine.clock.ahead = ahead
    follow_clock(machine.store, machine.clock)
    assert machine.store.standing[B].drain == Drain("alice", "fan", machine.clock.now())
    machine.look(minutes=4)
    assert machine.closed()
    machine.look(minutes=2)
    assert machine.closed() is None


def test_what_lasts_keeps_a_gpu_drained_until_it_is_over() -> None:
    machine = Machine()
    machine.look(HealthReport(A, (), replace(WELL, recovery=1)))
    assert "reset" in (machine.closed() or "")
    machine.look(minutes=60 * 24 * 7)
    assert machine.closed()
    machine.look(HealthReport(A, (), WELL), minutes=1)
    assert machine.closed() is None


def test_a_row_that_waits_for_a_reset_is_told_and_keeps_nobody_from_the_gpu() -> None:
    machine = Machine()
    pending = replace(WELL, remap_pending=True)
    machine.look(HealthReport(A, (63,), pending))
    assert machine.closed() is None
    assert [each.kind for each in machine.store.noted] == ["xid 63", "remap_pending"]
    sentence("health-row-remapped", notice("0", health.xid(63)))
    # As a daemon before this one left it.
    machine.store.standing[A] = GpuAvailability(
        None, HardwareFault("remap_pending", "a row", machine.clock.now())
    )
    machine.look(HealthReport(A, (), pending), minutes=11)
    assert machine.closed() is None


def test_a_person_may_use_a_gpu_with_a_lasting_fault_until_another_one_comes() -> None:
    machine = Machine()
    failed = replace(WELL, remap_failed=True)
    machine.look(HealthReport(A, (), failed))
    machine.store.set_availability(A, machine.store.standing[A].resumed())
    machine.look(HealthReport(A, (), failed), minutes=1)
    assert machine.closed() is None
    # As after a restart of the daemon, which has seen nothing before.
    machine.watch.figures.clear()
    machine.look(HealthReport(A, (), failed), minutes=1)
    assert machine.closed() is None
    machine.look(HealthReport(A, (48,), failed), minutes=1)
    assert "XID 48" in (machine.closed() or "")
    machine.look(HealthReport(A, (), failed), minutes=21)
    assert machine.closed() is None, "the excuse still holds"
    machine.look(HealthReport(A, (), WELL), minutes=1)
    assert machine.store.standing[A].accepted_fault is None
    machine.look(HealthReport(A, (), failed), minutes=1)
    assert machine.closed(), "a new one of the kind is not excused"


def test_what_a_person_has_drained_health_never_resumes() -> None:
    machine = Machine()
    by_hand = GpuAvailability(Drain("alice", "fan", NOON))
    machine.store.set_availability(A, by_hand)
    machine.look(HealthReport(A, (79,), WELL))
    assert mentions(machine.closed(), "alice", "fan")
    machine.look(minutes=11)
    assert machine.store.standing[A] == by_hand


def test_a_lost_gpu_is_told_of_once_and_once_when_it_is_back() -> None:
    machine = Machine()
    machine.gpus.broken[A] = reading(A, fault=Fault.LOST, detail="GPU is lost")
    for _ in range(3):
        machine.look()
    assert machine.kinds() == ["lost"]
    assert [job for job, _ in machine.told] == [1]
    del machine.gpus.broken[A]
    machine.look()
    assert machine.kinds() == ["lost", "back"]
    assert machine.closed() is None


@pytest.mark.parametrize("act", [HealthAction.TELL, HealthAction.OFF])
def test_with_tell_or_off_nothing_is_drained_and_what_was_comes_back(act: HealthAction) -> None:
    machine = Machine()
    machine.look(HealthReport(A, (79,), WELL))
    machine.watch.policy = HealthPolicy(act)
    machine.look()
    assert machine.closed() is None
    before = len(machine.told)
    machine.look(HealthReport(A, (79,)), minutes=20)
    assert machine.closed() is None
    assert len(machine.told) - before == (act is HealthAction.TELL)
