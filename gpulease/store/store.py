"""The store of jobs and leases: domain objects in and out, one writer at a time.

Every job that waits or holds memory is also kept in memory as last committed, so that planning
10,000 of them reads no rows. Changes of a transaction become visible there when it is committed.

`count_jobs` reads the file of a daemon that may be running, without migrating it.
"""

import json
import secrets
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, exists, func, select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.exc import DatabaseError

from gpulease.domain.calendar import Window
from gpulease.domain.enforcement import Reports
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.health import GpuAvailability, GpuEvent
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import State
from gpulease.domain.queue_options import QueuePause
from gpulease.errors import NoSuchJob, RecordUnwritable, state_fault
from gpulease.service.job_list import EndedPage, JobPage, JobQuery
from gpulease.service.metrics import JobMetrics
from gpulease.service.ports import Event, PastJob
from gpulease.store import machine, statements
from gpulease.store.database_file import DiskReserve
from gpulease.store.engine import open_engine, startup_error, translate_errors
from gpulease.store.job_list import ended_page, job_page
from gpulease.store.live_state import LiveState, Machine
from gpulease.store.rows import PAST, invocation_key, unpack
from gpulease.store.schema import bring_up_to_date
from gpulease.store.statements import jobs_ended_since, jobs_with, reports_of
from gpulease.store.tables import EventRow, GpuRow, JobRow, PropertyRow
from gpulease.store.transaction import SqlTransaction
from gpulease.store.writer import CommitMetrics, Writer


class SqlStore:
    """The jobs and leases in one SQLite file."""

    def __init__(self, path: Path, steady_s: Callable[[], float] = time.monotonic) -> None:
        """Open the file at `path`; create or migrate it if necessary.

        Raises:
            StateUnusable: the file cannot be used.
            StateUnwritable: the file cannot be used now.
        """
        self.path = path
        self.announced: Callable[[], None] = lambda: None
        """Called in the thread that writes when a notification is stored, before the commit."""
        self.reserve = DiskReserve(path)
        self.reserve.release_if_needed()
        try:
            # SQLite gives its other files the same mode. They contain the environments of jobs.
            path.touch(mode=0o600)
            self.engine = open_engine(path)
            with ExitStack() as opened:
                opened.callback(self.engine.dispose)
                bring_up_to_date(path, self.engine)
                with self.engine.connect() as connection:
                    ids = connection.scalars(select(JobRow.id).where(statements.LIVE)).all()
                    live = jobs_with(connection, ids)
                    last = connection.scalar(select(func.max(JobRow.id)))
                    users = connection.scalars(statements.LATEST_USERS).all()
                    self.metrics = JobMetrics(steady_s, live, last, users)
                    present = Machine(
                        frozenset(map(GpuUuid, connection.scalars(select(GpuRow.uuid)))),
                        machine.availabilities(connection),
                        machine.pause_of(connection),
                        tuple(machine.all_windows(connection)),
                    )
                    sizes = statements.invocation_sizes(connection)
                    self._state = LiveState(live, sizes, present, self.metrics)
                self.commits = CommitMetrics(steady_s)
                self._writer = Writer(path, self.engine, self.reserve, self._state, self.commits)
                opened.pop_all()
        except DatabaseError as error:
            raise startup_error(path, error.orig) from error
        except OSError as error:
            raise state_fault(f"cannot use the database {path}", error) from error

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
        self.engine.dispose()

    def has_file(self) -> bool:
        """Tell whether the file is at its path, with its log; does not wait for a writer."""
        return self._writer.has_file()

    def ensure_file(self) -> None:
        """Ensure that commits go to the file at its path. Raises like `batch`."""
        self._writer.ensure_file()

    def batch(self) -> AbstractContextManager[None]:
        """Commit the writes within together, when the context ends; each may fail alone.

        Raises:
            RecordUnwritable: the file cannot be written now, or is damaged. Nothing is stored.
        """
        return self._writer.batch()

    def flush(self) -> None:
        """Commit what the present batch has written so far. Raises like `batch`."""
        self._writer.commit()

    @contextmanager
    def write(self) -> Iterator[SqlTransaction]:
        """Open the one write transaction; its changes are on disk when the context ends.

        Within a batch, they are on disk when that ends. Raises like `batch`.
        """
        with self._writer.write():
            yield SqlTransaction(self._writer, self._state, self.announced)

    @contextmanager
    def write_connection(self) -> Iterator[Connection]:
        """Return a connection in a write transaction, which is like that of `write`."""
        with self._writer.write():
            yield self._writer.connection

    def forget(self, jobs: Sequence[JobId]) -> None:
        """Forget ended jobs, which are deleted."""
        self._state.forget(jobs)

    def trouble(self) -> str | None:
        """Return why the latest write failed; None: it was stored."""
        return self._writer.trouble

    def live(self) -> Sequence[Job]:
        """Return every job that waits or holds memory, by id, as last committed."""
        return self._state.committed_jobs()

    def holding(self) -> Sequence[Job]:
        """Return every job that holds memory, by id, as last committed."""
        return self._state.committed_holding()

    def live_job(self, job: JobId) -> Job | None:
        """Return one job that is queued or holds memory; nothing is read."""
        return self._state.committed_live(job)

    def job(self, job: JobId) -> Job | None:
        """Return one job in any state; None if there is none."""
        known = self._state.committed_job(job)
        if known is not None:
            return known
        with self.reading() as connection:
            return next(iter(jobs_with(connection, [job])), None)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Return a connection for statements that only read.

        Raises:
            RecordUnwritable: the file cannot be read now, or is damaged.
        """
        with translate_errors(self.path), self.engine.connect() as connection:
            yield connection

    def jobs(self, query: JobQuery) -> JobPage:
        """Return a page of a listing: live jobs as last committed, the others as stored."""
        if query == JobQuery():  # the usual one: all of its jobs are in memory
            return JobPage(self.live(), len(self.live()), None)
        with self.reading() as connection:
            return job_page(connection, query, self.live_job)

    def ended_jobs(self, query: JobQuery) -> EndedPage:
        """Return a page of a listing of ended jobs, in brief."""
        with self.reading() as connection:
            return ended_page(connection, query)

    def ended(self, jobs: Iterable[JobId]) -> Sequence[tuple[JobId, int, datetime]]:
        """Return those of `jobs` that have ended, each with the uid of its owner and its end."""
        ended = select(JobRow.id, JobRow.uid, JobRow.ended_at)
        ended = ended.where(JobRow.id.in_(select(_numbers(jobs))), JobRow.ended_at.is_not(None))
        with self.reading() as connection:
            rows = connection.execute(ended)
            return [(JobId(job), uid, at) for job, uid, at in rows if at is not None]

    def never_started(self, jobs: Iterable[JobId]) -> Sequence[JobId]:
        """Return those of `jobs` that are queued or unknown here."""
        number = _numbers(jobs)
        started = exists().where(JobRow.id == number, JobRow.state != State.QUEUED)
        with self.reading() as connection:
            return [JobId(job) for job in connection.scalars(select(number).where(~started))]

    def invocation(self, job: JobId) -> Invocation:
        """Return the invocation of a job.

        Raises:
            NoSuchJob: there is no such job, or it has ended.
        """
        held = self._state.committed_job(job)
        key = job if held is None else invocation_key(held)
        known = self._state.committed_invocation(key)
        if known is not None:
            return known
        # Each launch reads one; a connection of SQLAlchemy takes five times as long.
        with translate_errors(self.path), closing(self.engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute(statements.INVOCATION_OF, (key,))
            found = cursor.fetchone()
        if found is None or found[0].startswith(PAST):
            raise NoSuchJob(f"cannot start job {job}: it has ended")
        return unpack(*found)

    def past_invocation(self, job: Job) -> Invocation:
        """Return the invocation of a job that has ended, without its environment.

        Raises:
            NoSuchJob: it is not known any more, as it ended under an earlier version.
        """
        with self.reading() as connection:
            key = (invocation_key(job),)
            found = connection.exec_driver_sql(statements.INVOCATION_OF, key).scalar()
        if found is None:
            raise NoSuchJob(f"cannot repeat job {job.label}: its command is not known any more")
        return unpack(found)

    def events(self, job: JobId) -> Sequence[Event]:
        """Return the history of a job, oldest first."""
        with self.reading() as connection:
            of_job = select(EventRow.at, EventRow.kind, EventRow.detail).where(EventRow.job == job)
            return [Event(*row) for row in connection.execute(of_job.order_by(EventRow.id))]

    def hook_reports(self, job: JobId) -> Reports:
        """Return what the hooks of a job reported, oldest first."""
        with self.reading() as connection:
            return reports_of(connection, job)

    def past_jobs(self, since: datetime) -> Sequence[PastJob]:
        """Return the latest jobs that ended since then after they held memory, in that order.

        If the file cannot be read, return none: the queue learns from those that end from now on.
        """
        with suppress(RecordUnwritable), self.reading() as connection:
            return jobs_ended_since(connection, since)
        return ()

    def take_released(self) -> Sequence[PastJob]:
        """Return the jobs that let go of their memory since the last call, in that order."""
        return self._state.take_released()

    def drained(self) -> Mapping[GpuUuid, str]:
        """Return why each drained GPU takes no new leases."""
        return self._state.committed_machine.drained()

    def pause(self) -> QueuePause | None:
        """Return the pause of the queue; None if it is not paused."""
        return self._state.committed_machine.pause

    def availabilities(self) -> Mapping[GpuUuid, GpuAvailability]:
        """Return the availability of each GPU with a drain, a fault or an accepted fault."""
        return self._state.committed_machine.availabilities

    def windows(self) -> Sequence[Window]:
        """Return the windows, in the order in which they were made."""
        return self._state.committed_machine.windows

    def gpu_events(self, since: datetime, most: int) -> Sequence[GpuEvent]:
        """Return the latest health events of all GPUs, oldest first."""
        with self.reading() as connection:
            return machine.events_since(connection, since, most)

    def gpu(self, uuid: GpuUuid) -> GpuReading:
        """Return a reading with the identity of a GPU that was seen before."""
        wanted = select(GpuRow.gpu_index, GpuRow.name).where(GpuRow.uuid == uuid)
        with suppress(RecordUnwritable), self.reading() as connection:
            if (row := connection.execute(wanted).first()) is not None:
                return GpuReading(uuid, row.gpu_index, row.name)
        return GpuReading(uuid, 0, "unknown GPU")

    def skip_ids_up_to(self, last: int) -> None:
        """Give new jobs ids above `last`."""
        with self.write_connection() as connection:
            connection.execute(statements.START_SEQUENCE, {"last": last})
            connection.execute(statements.RAISE_SEQUENCE, {"last": last})

    def boot(self) -> str | None:
        """Return the boot id under which a daemon last used this file, if stored."""
        with self.reading() as connection:
            wanted = select(PropertyRow.value).where(PropertyRow.key == "boot")
            return connection.execute(wanted).scalar_one_or_none()

    def note_boot(self, boot: str) -> None:
        """Store the boot id under which a daemon uses this file."""
        row = upsert(PropertyRow).values(key="boot", value=boot)
        row = row.on_conflict_do_update(index_elements=["key"], set_={"value": boot})
        with self.write_connection() as connection:
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
        with self.write_connection() as connection:
            connection.execute(upsert(PropertyRow).on_conflict_do_nothing(), name)
            wanted = select(PropertyRow.value).where(PropertyRow.key == key)
            return connection.execute(wanted).scalar_one()


def _numbers(jobs: Iterable[JobId]) -> ColumnElement[int]:
    """Return ids as a column: a statement may have only some thousand parameters."""
    numbers = func.json_each(json.dumps(list(jobs))).table_valued("value")
    return numbers.c.value


@dataclass(frozen=True, slots=True)
class JobCounts:
    """The numbers of jobs in a database."""

    waiting: int = 0
    """Includes leases without a command that wait."""
    running: int = 0
    holds: int = 0
    """Held leases without a command."""
    ended: int = 0


_COUNT = """
    SELECT
        count(*) FILTER (WHERE state = 'queued'),
        count(*) FILTER (WHERE state NOT IN ('queued', 'ended') AND holders.job IS NULL),
        count(*) FILTER (WHERE state NOT IN ('queued', 'ended') AND holders.job IS NOT NULL),
        count(*) FILTER (WHERE state = 'ended')
    FROM jobs LEFT JOIN holders ON holders.job = jobs.id
"""


def count_jobs(database: Path) -> JobCounts | None:
    """Count the jobs in a database; None if it cannot be read. A missing file counts as empty."""
    if not database.exists():
        return JobCounts()
    try:
        uri = f"{database.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return JobCounts(*connection.execute(_COUNT).fetchone())
    except sqlite3.Error:
        return None
