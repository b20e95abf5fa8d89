"""What an idle daemon reads and keeps: budgets that do not depend on the machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from daemon_rig import wait_for
from gpulease.gpu.simulated import SimulatedGpus, parse_simulation
from gpulease.store.store import SqlStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    opened = SqlStore(tmp_path / "db")
    yield opened
    opened.close()


def test_processes_that_name_no_gpu_are_not_read_at_each_reading() -> None:
    gpus = SimulatedGpus(parse_simulation("8G"), "nobody uses it")

    def bytes_of_a_reading() -> int:
        before = _bytes_read()
        gpus.read()
        return _bytes_read() - before

    first = bytes_of_a_reading()
    # At first they are read each time: a process may be about to execute its program.
    wait_for("few are read", lambda: bytes_of_a_reading() < first / 3)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


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
