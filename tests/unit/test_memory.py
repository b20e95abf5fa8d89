"""The ledger of one GPU."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from fakes import G, reading
from gpulease.domain.gpu import (
    Fault,
    GpuMemory,
    JobId,
    LedgerEntry,
    ProcessReading,
    UnmanagedBefore,
    build_ledger,
    unmanaged_since,
)

ONE, TWO = JobId(1), JobId(2)


def test_a_lease_counts_in_full_before_its_job_has_allocated_anything() -> None:
    gpu = build_ledger(reading(), [LedgerEntry(ONE, 5 * G)], {})
    assert (gpu.committed, gpu.unmanaged, gpu.headroom) == (5 * G, 0, 3 * G)


def test_what_a_job_uses_is_not_counted_twice() -> None:
    seen = reading(used=4 * G, processes=(ProcessReading(7, 4 * G),))
    gpu = build_ledger(seen, [LedgerEntry(ONE, 5 * G, running=True)], {7: ONE})
    assert (gpu.committed, gpu.unmanaged, gpu.headroom) == (5 * G, 0, 3 * G)


def test_a_job_over_its_lease_is_counted_with_what_it_uses() -> None:
    seen = reading(used=6 * G, processes=(ProcessReading(7, 6 * G),))
    gpu = build_ledger(seen, [LedgerEntry(ONE, 5 * G, running=True)], {7: ONE})
    assert (gpu.leased, gpu.committed, gpu.headroom) == (5 * G, 6 * G, 2 * G)


def test_a_stranger_is_subtracted_from_what_can_be_leased() -> None:
    seen = reading(used=6 * G, processes=(ProcessReading(9, 6 * G),))
    gpu = build_ledger(seen, [], {})
    assert (gpu.unmanaged, gpu.headroom) == (6 * G, 2 * G)
    assert [each.pid for each in gpu.unmanaged_processes] == [9]


def test_a_job_on_a_gpu_that_it_did_not_lease_counts_as_unmanaged_there() -> None:
    seen = reading(used=6 * G, processes=(ProcessReading(7, 6 * G), ProcessReading(8, 0)))
    gpu = build_ledger(seen, [LedgerEntry(TWO, G)], {7: ONE, 8: TWO})
    assert (gpu.unmanaged, gpu.headroom) == (6 * G, G)
    assert [each.pid for each in gpu.unmanaged_processes] == [7]
    assert gpu.jobs_without_lease == (ONE,)


def test_the_drivers_share_and_the_margin_are_never_leased() -> None:
    gpu = build_ledger(reading(reserved=G), [], {}, margin=G)
    assert (gpu.allocatable, gpu.headroom) == (6 * G, 6 * G)


def test_without_the_drivers_share_apart_it_counts_as_used() -> None:
    gpu = build_ledger(reading(used=G, reserved=None), [], {})
    assert (gpu.allocatable, gpu.unmanaged, gpu.headroom) == (8 * G, G, 7 * G)


def test_without_figures_for_processes_running_leases_are_taken_to_be_used() -> None:
    held = [LedgerEntry(ONE, 3 * G, running=True), LedgerEntry(TWO, 2 * G, running=False)]
    gpu = build_ledger(reading(used=4 * G, processes=None), held, {})
    assert (gpu.unmanaged, gpu.headroom) == (G, 2 * G)


def test_a_missing_figure_does_not_hide_a_stranger_behind_a_job_that_has_used_nothing() -> None:
    seen = reading(used=4 * G, processes=(ProcessReading(9, None),))
    gpu = build_ledger(seen, [LedgerEntry(ONE, 4 * G, running=True)], {})
    assert (gpu.unmanaged, gpu.headroom) == (4 * G, 0)


def test_a_stranger_whose_figure_is_missing_leaves_the_figures_of_the_jobs_known() -> None:
    # 45 GiB are leased and 2 used; a process outside any lease holds 30 that nobody tells.
    processes = (ProcessReading(7, 2 * G), ProcessReading(9, None))
    seen = reading(total=80 * G, used=32 * G, processes=processes)
    gpu = build_ledger(seen, [LedgerEntry(ONE, 45 * G, running=True)], {7: ONE})
    assert gpu.entries[0].used == 2 * G
    assert (gpu.committed, gpu.unmanaged, gpu.headroom) == (45 * G, 30 * G, 5 * G)


def test_a_job_whose_figure_is_missing_uses_its_lease_and_another_what_is_known() -> None:
    held = [LedgerEntry(ONE, 3 * G, running=True), LedgerEntry(TWO, 2 * G, running=True)]
    processes = (ProcessReading(7, None), ProcessReading(8, G), ProcessReading(9, None))
    gpu = build_ledger(reading(used=7 * G, processes=processes), held, {7: ONE, 8: TWO})
    assert [holding.used for holding in gpu.entries] == [None, G]
    assert gpu.unmanaged == 3 * G


def test_a_process_that_came_after_the_memory_was_read_is_not_forgotten() -> None:
    stranger = ProcessReading(9, 60 * G)
    gpu = build_ledger(reading(total=80 * G, used=0, processes=(stranger,)), [], {})
    assert (gpu.unmanaged, gpu.headroom) == (60 * G, 20 * G)
    processes = (ProcessReading(7, 10 * G), stranger)
    seen = reading(total=80 * G, used=10 * G, processes=processes)
    gpu = build_ledger(seen, [LedgerEntry(ONE, 15 * G, running=True)], {7: ONE})
    assert (gpu.unmanaged, gpu.headroom) == (60 * G, 5 * G)


def test_a_gpu_that_cannot_be_read_offers_nothing() -> None:
    for fault in Fault:
        gpu = build_ledger(reading(fault=fault), [], {})
        assert (gpu.allocatable, gpu.headroom) == (None, None)


def test_unknown_use_is_not_no_use() -> None:
    assert build_ledger(reading(used=None), [], {}).headroom is None


def test_what_an_mps_server_holds_for_jobs_is_not_unmanaged_beside_their_leases() -> None:
    held = [LedgerEntry(ONE, 5 * G, running=True), LedgerEntry(TWO, 2 * G, running=False)]
    seen = reading(used=4 * G, processes=(ProcessReading(50, 4 * G),))
    gpu = build_ledger(seen, held, {}, mps_servers={50})
    assert (gpu.committed, gpu.unmanaged, gpu.headroom) == (7 * G, 0, G)
    assert [holding.used for holding in gpu.entries] == [None, None], "not told apart"
    assert gpu.unmanaged_processes == ()


def test_what_an_mps_server_holds_beyond_the_running_leases_is_unmanaged() -> None:
    held = [LedgerEntry(ONE, 2 * G, running=True), LedgerEntry(TWO, 2 * G, running=False)]
    seen = reading(used=5 * G, processes=(ProcessReading(50, 5 * G),))
    gpu = build_ledger(seen, held, {}, mps_servers={50})
    assert (gpu.committed, gpu.unmanaged, gpu.headroom) == (4 * G, 3 * G, G)


def test_a_stranger_beside_an_mps_server_is_not_taken_for_a_job() -> None:
    seen = reading(used=6 * G, processes=(ProcessReading(9, 4 * G), ProcessReading(50, 2 * G)))
    gpu = build_ledger(seen, [LedgerEntry(ONE, 4 * G, running=True)], {}, mps_servers={50})
    assert (gpu.unmanaged, gpu.headroom) == (4 * G, 0)
    assert [each.pid for each in gpu.unmanaged_processes] == [9]


def test_a_stranger_whose_figure_is_known_is_not_taken_for_a_job_whose_figure_is_not() -> None:
    seen = reading(used=7 * G, processes=(ProcessReading(7, None), ProcessReading(9, 4 * G)))
    gpu = build_ledger(seen, [LedgerEntry(ONE, 4 * G, running=True)], {7: ONE})
    assert (gpu.unmanaged, gpu.headroom) == (4 * G, 0)


def test_clients_that_the_driver_lists_beside_their_mps_server_have_figures_of_their_own() -> None:
    seen = reading(used=4 * G, processes=(ProcessReading(7, 3 * G), ProcessReading(50, G)))
    gpu = build_ledger(seen, [LedgerEntry(ONE, 5 * G, running=True)], {7: ONE}, mps_servers={50})
    assert gpu.entries[0].used == 3 * G
    assert (gpu.unmanaged, gpu.headroom) == (G, 2 * G)


def test_an_mps_server_without_a_lease_beside_it_is_a_stranger() -> None:
    seen = reading(used=G, processes=(ProcessReading(50, G),))
    gpu = build_ledger(seen, [], {}, mps_servers={50})
    assert (gpu.unmanaged, len(gpu.unmanaged_processes)) == (G, 1)


sizes = st.integers(min_value=0, max_value=16).map(lambda halves: halves * G // 2)


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[GpuMemory, int]:
    held = [LedgerEntry(JobId(n), draw(sizes), running=draw(st.booleans())) for n in range(3)]
    figures = [draw(st.none() | sizes) for _ in range(5)]
    processes = tuple(ProcessReading(pid, figure) for pid, figure in enumerate(figures))
    used = draw(sizes)
    seen = reading(
        used=used,
        reserved=draw(st.none() | sizes),
        processes=draw(st.none() | st.just(processes)),
    )
    whose = draw(st.dictionaries(st.integers(0, 4), st.integers(0, 4).map(JobId)))
    mps_servers = draw(st.sets(st.integers(0, 4)))
    return build_ledger(seen, held, whose, margin=draw(sizes), mps_servers=mps_servers), used


@given(ledgers())
def test_what_is_offered_and_what_is_taken_never_exceed_the_card(
    drawn: tuple[GpuMemory, int],
) -> None:
    gpu, used = drawn
    assert gpu.allocatable is not None
    assert gpu.unmanaged is not None
    assert gpu.headroom is not None
    assert 0 <= gpu.headroom <= gpu.allocatable
    listed = sum(each.memory or 0 for each in gpu.reading.processes or ())
    assert 0 <= gpu.unmanaged <= max(used, listed)
    assert gpu.committed >= gpu.leased
    if gpu.headroom:
        assert gpu.headroom + gpu.committed + gpu.unmanaged == gpu.allocatable


class Card:
    """A GPU that tells no processes: a stranger's memory, and leases that are used."""

    def __init__(self, stranger: int, total: int = 24 * G) -> None:
        self.stranger, self.total = stranger, total
        self.leases: dict[JobId, list[int]] = {}
        """By job: leased, used."""
        self.running: set[JobId] = set()
        self.before: UnmanagedBefore | None = None
        self.look()

    def ledger(self, before: UnmanagedBefore | None) -> GpuMemory:
        seen = reading(total=self.total, used=self.used, processes=None)
        held = [
            LedgerEntry(job, lease, running=job in self.running)
            for job, (lease, _) in self.leases.items()
        ]
        return build_ledger(seen, held, {}, before=before)

    def look(self) -> None:
        self.used = self.stranger + sum(used for _, used in self.leases.values())
        self.before = unmanaged_since(self.ledger(None), self.before)

    def grant(self, size: int) -> bool:
        if size > (self.ledger(self.before).headroom or 0):
            return False
        self.leases[JobId(len(self.leases) + 1)] = [size, 0]
        return True

    def start(self, _: int, job: JobId) -> None:
        self.running |= self.leases.keys() & {job}

    def use(self, size: int, job: JobId) -> None:
        if job in self.running:
            self.leases[job][1] = min(size, self.leases[job][0])

    def end(self, _: int, job: JobId) -> None:
        self.leases |= {each: [0, 0] for each in self.leases.keys() & {job}}
        self.running.discard(job)

    def leave(self, size: int, _: JobId) -> None:
        self.stranger = min(self.stranger, size)

    def restart(self, size: int, _: JobId) -> None:
        """Another daemon knows the last sample, or nothing after a long time."""
        sample = UnmanagedBefore(self.ledger(self.before).unmanaged or 0)
        self.before = sample if size > G else None
        self.look()


STEPS = [Card.start, Card.use, Card.end, Card.leave, Card.restart]


@given(sizes, st.lists(st.tuples(st.sampled_from(STEPS), sizes, st.booleans()), max_size=30))
def test_no_byte_is_promised_twice_where_no_list_of_processes_can_be_read(
    stranger: int, steps: list[tuple[Callable[[Card, int, JobId], object], int, bool]]
) -> None:
    card = Card(stranger, 8 * G)
    for number, (step, size, looks) in enumerate(steps):
        step(card, size, JobId(1 + number % max(1, len(card.leases))))
        if looks:
            card.look()
        card.grant(size)
        assert card.stranger + sum(lease for lease, _ in card.leases.values()) <= 8 * G


def test_what_was_used_before_is_still_there_when_a_job_starts() -> None:
    card = Card(8 * G)
    assert card.grant(10 * G)
    card.running.add(ONE)
    for used in (0, 10 * G):
        card.leases[ONE][1] = used
        card.look()
        assert card.ledger(card.before).unmanaged == 8 * G
        assert not card.grant(10 * G)
    card.stranger = 2 * G
    card.leases[ONE][1] = 0
    card.look()
    assert card.grant(10 * G), "it has gone"
