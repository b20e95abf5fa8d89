"""The database file: opened as SQLite should be for a record that must not be lost.

Write-ahead log, so that readers never wait for the writer; full synchronisation, so that what was
committed survives a power cut; foreign keys on. A write transaction begins IMMEDIATE: the database
is the one lock between writers.
"""

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event

_BUSY_TIMEOUT_S = 10.0
_IMPATIENT_S = 0.1
_LOG = f"journal_size_limit={64 << 20}"
"""What is left of the write-ahead log's file after a time in which it had to grow."""
WRITES = {"gpulease_writes": True}
"""Execution option of a connection that is going to write."""


def open_engine(path: Path) -> Engine:
    """Return an engine on the database file at `path`, which may be empty."""

    def connect() -> sqlite3.Connection:
        # An empty file in the place of one that was removed would hide that it was.
        uri = f"file:{quote(str(path))}?mode=rw"
        return sqlite3.connect(uri, timeout=_BUSY_TIMEOUT_S, check_same_thread=False, uri=True)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: object) -> None:
    assert isinstance(connection, sqlite3.Connection)
    # SQLAlchemy says BEGIN, see _begin; sqlite3 by itself would say it late, and DEFERRED.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", _LOG):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("gpulease_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def be_patient(connection: Connection, patient: bool) -> None:
    """Have `connection` wait for another process's lock on the file: some seconds, or hardly."""
    wait_s = _BUSY_TIMEOUT_S if patient else _IMPATIENT_S
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.execute(f"PRAGMA busy_timeout={round(wait_s * 1000)}")
