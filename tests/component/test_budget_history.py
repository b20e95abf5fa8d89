"""What the history of memory costs the database: statements, commits, and rows that are read."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from component.test_budget_store import plans, statements, verbs
from fakes import NOON, order, reading
from gpulease.domain.gpu import GpuUuid, JobId, build_ledger
from gpulease.domain.memory_series import JobSpan, grid_over, held
from gpulease.store.memory_history import MemoryHistory, MemorySeries, Sample
from gpulease.store.retention import Retention
from gpulease.store.store import SqlStore

GPUS = [reading(f"GPU-{index}", index) for index in range(16)]
JOBS = range(1, 65)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(tmp_path / "gpulease.db")
    with opened.write() as tx:
        tx.add_gpus(GPUS, NOON)
        for _ in JOBS:
            tx.add(order(), NOON)
    yield opened
    opened.close()


def batch(store: SqlStore) -> None:
    """Write 15 s of 16 GPUs with 64 jobs."""
    ledgers = tuple(build_ledger(gpu, [], {}) for gpu in GPUS)
    samples = [Sample(NOON + timedelta(seconds=each), ledgers) for each in range(15)]
    uuids = [GpuUuid(gpu.uuid) for gpu in GPUS]
    at_s = int(NOON.timestamp())
    spans = [
        JobSpan(uuids[n % 16], JobId(n), "alice", at_s, held((1, None, None), 10)) for n in JOBS
    ]
    peaks = {(JobId(n), uuids[n % 16]): 1 for n in JOBS}
    MemoryHistory(store).record(samples, peaks, spans)


def test_a_batch_is_one_commit_and_finds_its_rows_by_their_keys(store: SqlStore) -> None:
    with plans(store) as steps, statements(store) as sent:
        batch(store)
    assert verbs(sent).count("COMMIT") == 1
    assert len(set(verbs(sent))) == 6, "however many GPUs and jobs there are"
    # Planned for a GPU that is stored with another key, which no statement does.
    assert scanned(steps) in ([], ["SCAN leases"]), steps


def test_old_rows_are_merged_in_one_commit_and_found_by_their_keys(store: SqlStore) -> None:
    batch(store)
    with statements(store) as sent, plans(store) as steps:
        MemoryHistory(store).thin(NOON + timedelta(days=1))
    assert verbs(sent).count("COMMIT") == 1
    assert not scanned(steps), steps


def test_series_read_the_rows_of_their_range_and_gpu(store: SqlStore) -> None:
    batch(store)
    grid, series = grid_over(NOON - timedelta(days=7), NOON, 300), MemorySeries(store)
    with statements(store) as sent, plans(store) as steps:
        series.gpu(GPUS[0].uuid, grid)
        series.job(JobId(1), GPUS[1].uuid, grid)
    assert verbs(sent).count("SELECT min") == 9, "a statement for each resolution"
    assert not scanned(steps), steps


def test_a_job_is_deleted_without_reading_the_memory_of_others(store: SqlStore) -> None:
    batch(store)
    with plans(store) as steps:
        Retention(store).delete([JobId(1)])
    assert not scanned(steps), steps


def scanned(steps: list[str]) -> list[str]:
    tables = ("gpu_memory", "job_memory", "jobs", "leases")
    return [each for each in steps if each in [f"SCAN {table}" for table in tables]]
