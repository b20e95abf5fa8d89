"""What an idle daemon reads and keeps: budgets that do not depend on the machine."""

import os
import subprocess
import sys
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


def test_a_process_that_names_no_gpu_is_read_once_a_second() -> None:
    now_s = 0.0
    memory = NotingMemory([GpuUuid("GPU-that-nobody-uses")], now_s=lambda: now_s)
    read = []
    for now_s in (0.0, 0.5, 1.5, 2.0, 2.4, 2.6):  # noqa: B007 - the clock reads it
        memory.read_pids = set()
        memory.read()
        read.append(str(os.getpid()) in memory.read_pids)
    # At first it is read each time: it may be about to execute its program.
    assert read == [True, True, True, False, False, True]


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


def test_a_daemon_keeps_no_package_for_its_start_or_for_another_program() -> None:
    program = "import sys, gpulease.daemon.main; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(ran.stdout.split()) & {"alembic", "mako", "pydantic", "rich", "typer"}
