"""The store of jobs and leases: domain objects in and out, one writer at a time.

Every job that waits or holds memory is also kept in memory as last committed, so that planning
10,000 of them reads no rows. Changes of a transaction become visible there when it is committed.

`count_jobs` reads the file of a daemon that may be running, without migrating it.
"""

import secrets
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.orm import Session

from gpulease.domain.calendar import Window
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.health import GpuAvailability, GpuEvent
from gpulease.domain.hook_reports import Reports
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import State
from gpulease.domain.queue_options import QueuePause
from gpulease.errors import NoSuchJob, RecordUnwritable, state_fault
from gpulease.service.dependencies import settle_dependents
from gpulease.service.ports import Event, PastJob
from gpulease.store import gpus, statements, windows
from gpulease.store.database_file import DiskReserve, FilePresence
from gpulease.store.engine import (
    WRITES,
    may_lack_space,
    open_engine,
    set_busy_timeout,
    startup_error,
    translate_errors,
)
from gpulease.store.hook_reports import reports_of
from gpulease.store.past_jobs import ended_since
from gpulease.store.rows import invocation_key, unpack
from gpulease.store.schema import bring_up_to_date
from gpulease.store.statements import UserCounts, drained_gpus, invocation_sizes, jobs_where
from gpulease.store.tables import EventRow, GpuRow, InvocationRow, JobRow, PropertyRow
from gpulease.store.transaction import SqlTransaction


class SqlStore:
    """The jobs and leases in one SQLite file."""

    def __init__(self, path: Path) -> None:
        """Open the file at `path`; create or migrate it if necessary.

        Raises:
            StateUnusable: the file cannot be used.
            StateUnwritable: the file cannot be used now.
        """
        self.path = path
        self.reserve = DiskReserve(path)
        self.reserve.release_if_needed()
        try:
            # SQLite gives its other files the same mode. They contain the environments of jobs.
            path.touch(mode=0o600)
            self.engine = open_engine(path)
            bring_up_to_date(path, self.engine)
            self._presence = FilePresence(path, self.engine)
            with Session(self.engine) as session:
                self._live = {
                    job.id: job for job in jobs_where(session, JobRow.state != State.ENDED)
                }
                self._known_gpus = frozenset(map(GpuUuid, session.scalars(select(GpuRow.uuid))))
                self._tallies = UserCounts(self._live.values(), invocation_sizes(session))
        except DatabaseError as error:
            raise startup_error(path, error.orig) from error
        except OSError as error:
            raise state_fault(f"cannot use the database {path}", error) from error
        self._released: list[PastJob] = []
        self._drained: Mapping[GpuUuid, str] = {}
        self._pause: QueuePause | None = None
        self._was_locked = False
        self._live_in_order = tuple(self._live.values())
        self._writing = threading.Lock()

    def close(self) -> None:
        """Close the file."""
        self._presence.close()
        self.engine.dispose()

    def has_file(self) -> bool:
        """Tell whether the file is at its path, with its log; does not wait for a writer."""
        return self._presence.is_there()

    def ensure_file(self) -> None:
        """Ensure that commits go to the file at its path. Raises like `write_connection`."""
        with self._writing:
            self._presence.ensure()

    @contextmanager
    def write(self) -> Iterator[SqlTransaction]:
        """Open the one write transaction; its changes are on disk when the context ends."""
        with self.write_connection() as connection:
            with connection.begin():
                transaction = SqlTransaction(
                    connection, self._live, self._known_gpus, self._tallies
                )
                yield transaction
                settle_dependents(transaction, transaction.ended())
            # Replaced, not changed, so that a reader's snapshot stays consistent.
            self._live, self._known_gpus = transaction.outcome()
            for change in transaction.changes:
                self._tallies.note(*change)
            self._released += transaction.released
            self._live_in_order = tuple(self._live.values())

    @contextmanager
    def write_connection(self) -> Iterator[Connection]:
        """Return a connection for writing; nothing else in this process writes meanwhile.

        Raises:
            RecordUnwritable: the file cannot be written now, or is damaged.
        """
        with self._writing, translate_errors(self.path):
            self.reserve.release_if_needed()
            self._presence.ensure()
            try:
                with self.engine.connect() as connection:
                    set_busy_timeout(connection, not self._was_locked)
                    yield connection.execution_options(**WRITES)
            except OperationalError as error:
                if may_lack_space(error):
                    self.reserve.release()
                # The next writer waits less: writers wait for each other.
                self._was_locked = True
                raise
            self._was_locked = False
            # A commit is acknowledged only if the file at the path has it.
            self._presence.ensure()

    def live(self) -> Sequence[Job]:
        """Return every job that waits or holds memory, by id, as last committed."""
        return self._live_in_order

    def job(self, job: JobId) -> Job | None:
        """Return one job in any state; None if there is none."""
        held = self._live.get(job)
        if held is not None:
            return held
        with self._reading() as session:
            return next(iter(jobs_where(session, JobRow.id == job)), None)

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with translate_errors(self.path), Session(self.engine) as session:
            yield session

    def elements(self, array: JobId, index: int | None = None) -> Sequence[Job]:
        """Return the elements of an array, in any state, oldest first; all or those of an index."""
        with self._reading() as session:
            which = JobRow.array == array
            return jobs_where(
                session, which if index is None else which & (JobRow.array_index == index)
            )

    def jobs(
        self,
        user: str | None,
        state: str | None,
        limit: int,
        *,
        before: int | None = None,
        since: datetime | None = None,
    ) -> Sequence[Job]:
        """Return the latest `limit` jobs in any or one state, oldest first.

        With `before` those with a lower id, with `since` those that ended from then on.
        """
        with self._reading() as session:
            wanted = select(JobRow.id).order_by(JobRow.id.desc()).limit(limit)
            if user is not None:
                wanted = wanted.where(JobRow.user == user)
            if state is not None:
                wanted = wanted.where(JobRow.state == state)
            if before is not None:
                wanted = wanted.where(JobRow.id < before)
            if since is not None:
                wanted = wanted.where(JobRow.ended_at >= since)
            return jobs_where(session, JobRow.id.in_(wanted))

    def invocation(self, job: JobId) -> Invocation:
        """Return the invocation of a job.

        Raises:
            NoSuchJob: there is no such job, or it has ended.
        """
        held = self._live.get(job)
        with self._reading() as session:
            row = session.get(InvocationRow, job if held is None else invocation_key(held))
            if row is None:
                raise NoSuchJob(f"cannot start job {job}: it has ended")
            return unpack(row)

    def events(self, job: JobId) -> Sequence[Event]:
        """Return the history of a job, oldest first."""
        with self._reading() as session:
            rows = session.scalars(
                select(EventRow).where(EventRow.job == job).order_by(EventRow.id)
            )
            return [Event(row.at, row.kind, row.detail) for row in rows]

    def hook_reports(self, job: JobId) -> Reports:
        """Return what the hooks of a job reported, oldest first."""
        with self._reading() as session:
            return reports_of(session, job)

    def past_jobs(self, since: datetime) -> Sequence[PastJob]:
        """Return the latest jobs that ended since then after they held memory, in that order.

        If the file cannot be read, return none: the queue learns from those that end from now on.
        """
        with (
            suppress(RecordUnwritable),
            translate_errors(self.path),
            self.engine.connect() as connection,
        ):
            return ended_since(connection, since)
        return ()

    def take_released(self) -> Sequence[PastJob]:
        """Return the jobs that let go of their memory since the last call, in that order."""
        released, self._released = self._released, []
        return released

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return why each drained GPU takes no new leases.

        If the file cannot be read, return the last known answer, so that status still works.
        """
        with (
            suppress(RecordUnwritable),
            translate_errors(self.path),
            self.engine.connect() as connection,
        ):
            self._drained = drained_gpus(connection)
        return self._drained

    def pause(self) -> QueuePause | None:
        """Return the pause of the queue; if the file cannot be read, the last known answer."""
        with (
            suppress(RecordUnwritable),
            translate_errors(self.path),
            self.engine.connect() as connection,
        ):
            self._pause = statements.pause_of(connection)
        return self._pause

    def availabilities(self) -> Mapping[GpuUuid, GpuAvailability]:
        """Return the availability of each GPU with a drain, a fault or an accepted fault."""
        with translate_errors(self.path), self.engine.connect() as connection:
            return gpus.availabilities(connection)

    def windows(self) -> Sequence[Window]:
        """Return the windows, in the order in which they were made."""
        with translate_errors(self.path), self.engine.connect() as connection:
            return windows.all_windows(connection)

    def gpu_events(self, since: datetime, most: int) -> Sequence[GpuEvent]:
        """Return the latest health events of all GPUs, oldest first."""
        with translate_errors(self.path), self.engine.connect() as connection:
            return gpus.events_since(connection, since, most)

    def gpu(self, uuid: GpuUuid) -> GpuReading:
        """Return a reading with the identity of a GPU that was seen before."""
        with suppress(RecordUnwritable), self._reading() as session:
            if (row := session.get(GpuRow, uuid)) is not None:
                return GpuReading(uuid, row.gpu_index, row.name)
        return GpuReading(uuid, 0, "unknown GPU")

    def skip_ids_up_to(self, last: int) -> None:
        """Give new jobs ids above `last`."""
        with self.write_connection() as connection, connection.begin():
            connection.execute(statements.START_SEQUENCE, {"last": last})
            connection.execute(statements.RAISE_SEQUENCE, {"last": last})

    def boot(self) -> str | None:
        """Return the boot id under which a daemon last used this file, if stored."""
        with self._reading() as session:
            row = session.get(PropertyRow, "boot")
            return None if row is None else row.value

    def note_boot(self, boot: str) -> None:
        """Store the boot id under which a daemon uses this file."""
        row = upsert(PropertyRow).values(key="boot", value=boot)
        row = row.on_conflict_do_update(index_elements=["key"], set_={"value": boot})
        with self.write_connection() as connection, connection.begin():
            connection.execute(row)

    def installation(self, known: str | None = None) -> str:
        """Return the id of this installation, which distinguishes its jobs from other daemons'.

        Created once; `known` is the former id, if the database lost it.
        """
        return self._constant("installation", known or uuid.uuid4().hex)

    def secret(self) -> str:
        """Return what the markers of jobs are made with; created once."""
        return self._constant("secret", secrets.token_hex(32))

    def _constant(self, key: str, new: str) -> str:
        """Return a property that never changes; `new` is its value if it has none."""
        name = {"key": key, "value": new}
        with self.write_connection() as connection, connection.begin():
            connection.execute(upsert(PropertyRow).on_conflict_do_nothing(), name)
            wanted = select(PropertyRow.value).where(PropertyRow.key == key)
            return connection.execute(wanted).scalar_one()


_COUNT = (
    "SELECT jobs.state, holders.job IS NOT NULL, count(*) FROM jobs "
    "LEFT JOIN holders ON holders.job = jobs.id GROUP BY 1, 2"
)


@dataclass(frozen=True, slots=True)
class JobCounts:
    """The numbers of jobs in a database."""

    waiting: int = 0
    """Includes leases without a command that wait."""
    running: int = 0
    holds: int = 0
    """Held leases without a command."""
    ended: int = 0


def count_jobs(database: Path) -> JobCounts | None:
    """Count the jobs in a database; None if it cannot be read. A missing file counts as empty."""
    if not database.exists():
        return JobCounts()
    counts = dict.fromkeys(("waiting", "running", "holds", "ended"), 0)
    try:
        connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)
        try:
            for state, is_held, number in connection.execute(_COUNT):
                counts[_kind(State(state), held=bool(is_held))] += number
        finally:
            connection.close()
    except (sqlite3.Error, ValueError):
        return None
    return JobCounts(**counts)


def _kind(state: State, *, held: bool) -> str:
    if state is State.QUEUED:
        return "waiting"
    if state is State.ENDED:
        return "ended"
    return "holds" if held else "running"
