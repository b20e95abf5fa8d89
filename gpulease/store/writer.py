"""The one connection that writes, and its transactions.

A batch commits the writes within together: one commit costs as much for ten writes as for one. A
write within a batch that fails is rolled back alone. Without a batch, each write is committed when
it ends. A transaction begins with the first statement: a write that changes nothing costs nothing.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError, OperationalError

from gpulease.errors import RecordUnwritable
from gpulease.service.metrics import DURATIONS, Histogram
from gpulease.store.database_file import DiskReserve, FilePresence
from gpulease.store.engine import may_lack_space, set_busy_timeout, translated
from gpulease.store.live_state import LiveState, Mark


class CommitMetrics:
    """Counts commits, for monitoring."""

    def __init__(self, steady_s: Callable[[], float]) -> None:
        self.steady_s = steady_s
        self.durations = Histogram(DURATIONS)
        self.failed = 0
        """Writes that failed because the file cannot be written, or is damaged."""


class Writer:
    """Begins, commits and rolls back; `LiveState` follows."""

    def __init__(
        self,
        path: Path,
        engine: Engine,
        reserve: DiskReserve,
        state: LiveState,
        metrics: CommitMetrics,
    ) -> None:
        self._metrics = metrics
        self._path = path
        self._state = state
        self._presence = FilePresence(path, engine)
        self._reserve = reserve
        self._lock = threading.RLock()
        self._in_batch = False
        self._has_begun = False
        """Whether the present write has executed a statement."""
        self._is_first = False
        """Whether it began the transaction."""
        self._lost: BaseException | None = None
        """Why the present batch was rolled back: all of it fails."""
        self._is_patient = True
        self.trouble: str | None = None
        """Why the latest write failed; None: it was stored."""

    def close(self) -> None:
        """Close the file."""
        self._presence.close()

    @property
    def driver(self) -> sqlite3.Connection:
        """The connection, in a transaction."""
        if not self._has_begun:
            self._begin()
        return self._presence.driver

    @property
    def connection(self) -> Connection:
        """The same, for statements of SQLAlchemy. It must not commit."""
        if not self._has_begun:
            self._begin()
        return self._presence.connection

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Commit the writes within together, when the context ends.

        Raises:
            RecordUnwritable: the file cannot be written now, or is damaged. Nothing is stored.
        """
        with self._lock:
            if self._in_batch:
                yield
                return
            self._in_batch = True
            try:
                yield
                self.commit()
            except BaseException:
                self._abandon()
                raise
            finally:
                self._in_batch = False
                self._lost = None

    @contextmanager
    def write(self) -> Iterator[None]:
        """Begin one write, which is stored as a whole or not at all. Raises like `batch`."""
        with self.batch():
            if self._lost is not None:
                raise self._lost
            self._has_begun = False
            before = self._state.mark()
            try:
                yield
            except BaseException as error:
                translated = self._translated(error)
                self._take_back(before, translated)
                if translated is error:
                    raise
                raise translated from error

    def commit(self) -> None:
        """Commit what the present batch has written so far; without a batch, do nothing."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if not (self._in_batch and self._presence.driver.in_transaction):
                return
            try:
                begun_s = self._metrics.steady_s()
                self._presence.driver.execute("COMMIT")
                self._metrics.durations.observe(self._metrics.steady_s() - begun_s)
                self._wait_for_locks(patient=True)
                self._state.publish()
                # A commit is acknowledged only if the file at the path has it.
                self._presence.ensure()
                self.trouble = None
            except BaseException as error:
                self._lost = self._translated(error)
                self._abandon()
                if self._lost is error:
                    raise
                raise self._lost from error

    def has_file(self) -> bool:
        """Tell whether the file is at its path, with its log; does not wait for a writer."""
        return self._presence.is_there()

    def ensure_file(self) -> None:
        """Ensure that commits go to the file at its path. Raises like `batch`."""
        with self._lock:
            # Within a transaction, the commit ensures it.
            if not self._presence.driver.in_transaction:
                self._presence.ensure()

    def _begin(self) -> None:
        self._is_first = not self._presence.driver.in_transaction
        if self._is_first:
            self._reserve.release_if_needed()
            self._presence.ensure()
            self._presence.driver.execute("BEGIN IMMEDIATE")
        else:
            # For all writes the same name: it means the latest, and a commit ends all.
            self._presence.driver.execute("SAVEPOINT write")
        self._has_begun = True

    def _take_back(self, before: Mark, error: BaseException) -> None:
        """Roll back the present write, which has failed."""
        if not self._has_begun:
            self._state.roll_back(before)
        elif self._is_first:
            self._abandon()
        elif self._presence.driver.in_transaction:
            self._presence.driver.execute("ROLLBACK TO write")
            self._state.roll_back(before)
        else:
            # After some errors, such as a full disk, SQLite rolls back the whole transaction.
            self._lost = error
            self._state.roll_back()

    def _abandon(self) -> None:
        """Roll back everything since the last commit."""
        with suppress(sqlite3.Error):
            self._presence.driver.rollback()
        self._state.roll_back()

    def _translated(self, error: BaseException) -> BaseException:
        """Return what an error of SQLite means, and prepare for the next attempt."""
        meaning = self._meaning(error)
        if isinstance(meaning, RecordUnwritable):
            self._metrics.failed += 1
            self.trouble = meaning.message
        return meaning

    def _meaning(self, error: BaseException) -> BaseException:
        if not isinstance(error, (DatabaseError, sqlite3.DatabaseError)):
            return error
        if isinstance(error, (OperationalError, sqlite3.OperationalError)):
            if may_lack_space(error):
                self._reserve.release()
            # The next writer waits less: writers wait for each other.
            self._wait_for_locks(patient=False)
        return translated(self._path, error)

    def _wait_for_locks(self, *, patient: bool) -> None:
        if self._is_patient is not patient:
            self._is_patient = patient
            set_busy_timeout(self._presence.driver, patient)
