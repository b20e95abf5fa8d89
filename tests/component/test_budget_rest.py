"""What an idle daemon reads: budgets that do not depend on the machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from gpulease.domain.gpu import GpuUuid
from gpulease.gpu.simulated import ResidentMemory
from gpulease.store.store import SqlStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(tmp_path / "db")
    yield opened
    opened.close()


class NotingMemory(ResidentMemory):
    """Notes the processes whose files are read."""

    def _file(self, pid: str, name: str) -> bytes:
        self.read_pids.add(pid)
        return super()._file(pid, name)

    read_pids: set[str] = set()  # noqa: RUF012 - replaced in the instance


def test_a_reading_of_simulated_gpus_leaves_out_kernel_threads() -> None:
    memory = NotingMemory([GpuUuid("GPU-that-nobody-uses")])
    memory.read()
    before = memory.read_pids
    memory.read_pids = set()
    memory.read()
    assert str(os.getpid()) in memory.read_pids
    assert not {pid for pid in before & memory.read_pids if _is_kernel_thread(pid)}


def _is_kernel_thread(pid: str) -> bool:
    try:
        # The parent of all of them is kthreadd, which has the pid 2.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == "2"
    except OSError:
        return False


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM gpu_memory WHERE uuid IN (SELECT uuid FROM gpus) AND resolution = 0",
        "SELECT id, uid, ended_at FROM jobs WHERE id IN (SELECT value FROM json_each('[1]'))",
    ],
)
def test_periodic_statements_find_rows_by_their_keys(statement: str, store: SqlStore) -> None:
    with store.engine.connect() as connection:
        plan = connection.execute(text(f"EXPLAIN QUERY PLAN {statement}")).all()
    assert not any(row.detail.startswith(("SCAN gpu_memory", "SCAN jobs")) for row in plan), plan
