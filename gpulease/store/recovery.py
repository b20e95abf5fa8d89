"""Recovers a damaged database: reads all readable rows and writes them to a new one.

Rows missing in the damaged file come from its backups. SQLite stops at the first page that it
cannot read. Rows beyond it are read from the other end of the table, and by their keys, which lead
to them through other pages.
"""

import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, delete, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from gpulease.domain.lease import State
from gpulease.store.database_file import SKIPPED_IDS
from gpulease.store.engine import WRITES, open_engine, startup_error
from gpulease.store.rows import job_of, unpack
from gpulease.store.schema import bring_up_to_date, known_revisions, migrate
from gpulease.store.tables import EventRow, HolderRow, InvocationRow, JobRow, LeaseRow

_FIRST, _LAST = -(2**63), 2**63 - 1
_DEEPEST = 10
"""How often a gap is halved to find rows inside it."""
_HEADER_SIZE = 28
"""The offset of the size in pages in the file header; see sqlite.org/fileformat.html."""
_FREE_LIST = 32
_PAGE_SIZE = 16


@dataclass(slots=True)
class Table:
    """The rows read from one table; the columns are those of the source file."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    whole: bool = True
    """Whether all rows could be read."""


@dataclass(slots=True)
class Salvage:
    """The tables read from one file."""

    revision: str | None = None
    tables: dict[str, Table] = field(default_factory=dict)


def salvage(path: Path, scratch: Path, model: Path | None) -> Salvage:
    """Read a file that may be damaged, with its write-ahead log; neither is changed.

    Args:
        path: the file; its log is beside it.
        scratch: an empty directory to work in.
        model: an intact backup of the database, whose first page may replace a damaged one.
    """
    work = scratch / "work.db"
    _copy(path, work)
    found = _read(work)
    if not found.tables and model is not None and _replace_first_page(path, model, work):
        found = _read(work)
    return found


def _copy(path: Path, to: Path) -> None:
    for end in ("", "-wal"):
        source = path.with_name(path.name + end)
        if source.exists():
            shutil.copyfile(source, to.with_name(to.name + end))


def _replace_first_page(path: Path, model: Path, to: Path) -> bool:
    """Replace a damaged first page by that of `model`, as tables keep their root pages."""
    head = model.read_bytes()[:65536]
    size = int.from_bytes(head[_PAGE_SIZE : _PAGE_SIZE + 2], "big")
    size = 65536 if size == 1 else size
    content = path.read_bytes()
    if size < 512 or len(head) < size or len(content) < 2 * size:
        return False
    page = bytearray(head[:size])
    page[_HEADER_SIZE : _HEADER_SIZE + 4] = (len(content) // size).to_bytes(4, "big")
    page[_FREE_LIST : _FREE_LIST + 8] = bytes(8)
    # If the log has the first page, SQLite uses that one.
    _copy(path, to)
    to.write_bytes(bytes(page) + content[size:])
    return True


def _read(work: Path) -> Salvage:
    found = Salvage()
    try:
        with closing(sqlite3.connect(work)) as connection:
            connection.text_factory = lambda text: text.decode(errors="replace")
            connection.execute("PRAGMA cell_size_check=ON")
            for name, columns, keys in _schema(connection):
                found.tables[name] = _table(connection, name, columns, keys)
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        # SQLite's message may quote a damaged name, which need not be UTF-8.
        found.tables.clear()
    versions = found.tables.pop("alembic_version", None)
    if versions is not None and versions.rows:
        found.revision = str(versions.rows[0][0])
    return found


def _schema(connection: sqlite3.Connection) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return the tables with their columns and, for those without rowid, the primary key."""
    found = []
    masters = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
    for name, sql in masters.fetchall():
        # Columns 1 and 5: the name, and the position in the primary key.
        lines = connection.execute(f"PRAGMA table_info({_quoted(name)})").fetchall()
        keys = tuple(line[1] for line in sorted(lines, key=lambda line: line[5]) if line[5])
        without_rowid = "WITHOUT ROWID" in str(sql).upper()
        found.append((name, tuple(line[1] for line in lines), keys if without_rowid else ()))
    return found


def _table(
    connection: sqlite3.Connection, name: str, columns: tuple[str, ...], keys: tuple[str, ...]
) -> Table:
    table = Table(columns)
    seen: dict[Any, tuple[Any, ...]] = {}
    reader = _Reader(connection, name, keys)
    if keys and keys[0] != "job":
        table.whole = reader.walk(seen, None, None, down=False)[1]
        if not table.whole:
            reader.walk(seen, None, None, down=True)
    else:
        table.whole = reader.between(seen, _FIRST, _LAST, 0)
    table.rows = list(seen.values())
    return table


class _Reader:
    """Reads the rows of one table by key, ascending or descending, from any key."""

    def __init__(self, connection: sqlite3.Connection, name: str, keys: tuple[str, ...]) -> None:
        self._connection = connection
        self._name = _quoted(name)
        self._keys = tuple(map(_quoted, keys)) or ("rowid",)

    def between(self, seen: dict[Any, Any], low: int, high: int, depth: int) -> bool:
        """Read rows with a first key from `low` to `high`; return whether all could be read."""
        reached, whole = self.walk(seen, low, high, down=False)
        if whole:
            return True
        back, _ = self.walk(seen, low, high, down=True)
        low, high = (low if reached is None else reached) + 1, (high if back is None else back) - 1
        # Ids start at 1, so there are no rows below 0.
        low = max(low, 0)
        if depth < _DEEPEST and low < high:
            middle = (low + high) // 2
            self.between(seen, low, middle, depth + 1)
            self.between(seen, middle + 1, high, depth + 1)
        return False

    def walk(
        self, seen: dict[Any, Any], low: int | None, high: int | None, *, down: bool
    ) -> tuple[int | None, bool]:
        """Read to the end or the first error; return the last first key, and whether it ended."""
        last: int | None = None
        before: tuple[Any, ...] | None = None
        try:
            for row in self._rows(low, high, down):
                key = row[: len(self._keys)]
                # A damaged tree with a cycle would never end.
                if before is not None and not _follows(before, key, down):
                    return last, False
                before, last = key, key[0]
                seen.setdefault(key, row[len(self._keys) :])
        except sqlite3.DatabaseError:
            return last, False
        return last, True

    def _rows(self, low: int | None, high: int | None, down: bool) -> Iterator[tuple[Any, ...]]:
        order = ", ".join(f"{key} {'DESC' if down else 'ASC'}" for key in self._keys)
        where, bounds = "", tuple[int | None, ...]()
        if low is not None:
            where, bounds = f"WHERE {self._keys[0]} BETWEEN ? AND ?", (low, high)
        wanted = f"{', '.join(self._keys)}, *"
        # All names come from the file and are quoted.
        query = f"SELECT {wanted} FROM {self._name} NOT INDEXED {where} ORDER BY {order}"  # noqa: S608
        yield from self._connection.execute(query, bounds)


def _follows(before: tuple[Any, ...], key: tuple[Any, ...], down: bool) -> bool:
    with suppress(TypeError):
        return before > key if down else before < key
    return False


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


_IN_ORDER = (
    "properties", "gpus", "jobs", "holders", "invocations", "leases", "pools", "hooks", "events",
    "notifications",
)  # fmt: skip
_HISTORY = ("gpu_memory", "job_memory")
_ORPHANS = ("events", "invocations", "holders", "hooks", "notifications", "pools", "leases")


@dataclass(slots=True)
class SalvageCounts:
    """Rows by table: saved from the damaged file, copied from backups, and dropped."""

    saved: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Tables in which rows may be missing."""


def is_sound(path: Path) -> bool:
    """Tell whether the file is a database without damage or dangling references."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            return (
                connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
                and connection.execute("PRAGMA foreign_key_check").fetchone() is None
                and connection.execute("SELECT 1 FROM alembic_version").fetchone() is not None
            )
    except sqlite3.DatabaseError:
        return False


def rebuild(
    target: Path, damaged: Salvage, copies: Sequence[Salvage], taken: int = 0
) -> SalvageCounts:
    """Write a new database at `target`; rows of `copies` replace those that `damaged` lost.

    Ids up to `taken` are not given again, even if no file has them.

    Raises:
        StateUnusable, StateUnwritable: it cannot be written.
    """
    try:
        return _rebuild(target, damaged, copies, taken)
    except DatabaseError as error:
        raise startup_error(target, error.orig) from error
    except sqlite3.DatabaseError as error:
        raise startup_error(target, error) from error


def _rebuild(
    target: Path, damaged: Salvage, copies: Sequence[Salvage], taken: int
) -> SalvageCounts:
    counts = SalvageCounts()
    revision = next((it.revision for it in (damaged, *copies) if it.revision), None)
    target.touch(mode=0o600)
    engine = open_engine(target)
    migrate(engine, revision if revision in known_revisions() else "head")
    engine.dispose()
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")  # The checkpoint at the end syncs it.
        connection.execute("BEGIN")
        present = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        for name in (each for each in (*_IN_ORDER, *_HISTORY) if each in present):
            _fill(connection, name, damaged, copies, counts)
        _repair_references(connection, counts)
        _skip_ids(connection, damaged, copies, taken)
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    engine = open_engine(target)
    bring_up_to_date(target, engine)
    _drop_unreadable(engine, counts)
    engine.dispose()
    return counts


def _fill(
    connection: sqlite3.Connection,
    name: str,
    damaged: Salvage,
    copies: Sequence[Salvage],
    counts: SalvageCounts,
) -> None:
    table = damaged.tables.get(name)
    if table is not None:
        written = _insert(connection, name, table.columns, table.rows)
        _count(counts.saved, name, written)
        _count(counts.dropped, name, len(table.rows) - written)
        # All rows of the table could be read: none are missing.
        if table.whole and written == len(table.rows):
            return
    counts.broken.append(name)
    for copy in copies:
        if (other := copy.tables.get(name)) is not None:
            written = _insert(connection, name, other.columns, other.rows)
            _count(counts.copied, name, written)


def _insert(
    connection: sqlite3.Connection,
    name: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> int:
    """Insert rows with a new key that meet the constraints; return how many."""
    known = {line[1] for line in connection.execute(f"PRAGMA table_info({name})")}
    places = [place for place, column in enumerate(columns) if column in known]
    names = ", ".join(f'"{columns[place]}"' for place in places)
    marks = ", ".join("?" * len(places))
    # The names are those of our schema.
    statement = f"INSERT INTO {name} ({names}) VALUES ({marks})"  # noqa: S608
    written = 0
    for row in rows:
        try:
            connection.execute(statement, [row[place] for place in places])
            written += 1
        except (sqlite3.IntegrityError, sqlite3.InterfaceError, OverflowError):
            continue
    return written


def _repair_references(connection: sqlite3.Connection, counts: SalvageCounts) -> None:
    """Remove dangling references; restore GPUs that leases refer to."""
    connection.execute(
        "INSERT INTO gpus (uuid, gpu_index, name, first_seen_at, last_seen_at) "
        "SELECT gpu, 0, 'unknown GPU', min(granted_at), max(granted_at) FROM leases "
        "WHERE gpu NOT IN (SELECT uuid FROM gpus) GROUP BY gpu"
    )
    present = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    for name in _ORPHANS:
        if name in present:
            gone = connection.execute(
                f"DELETE FROM {name} WHERE job NOT IN (SELECT id FROM jobs)"  # noqa: S608
            )
            _count(counts.dropped, name, gone.rowcount)
    gone = connection.execute("DELETE FROM gpu_memory WHERE uuid NOT IN (SELECT uuid FROM gpus)")
    _count(counts.dropped, "gpu_memory", gone.rowcount)
    if "job_memory" in present:
        gone = connection.execute(
            "DELETE FROM job_memory WHERE job NOT IN (SELECT id FROM jobs) "
            "OR gpu NOT IN (SELECT number FROM gpus WHERE number IS NOT NULL)"
        )
        _count(counts.dropped, "job_memory", gone.rowcount)


def _skip_ids(
    connection: sqlite3.Connection, damaged: Salvage, copies: Sequence[Salvage], taken: int
) -> None:
    """Ensure that no id that may have been given is given again."""
    sequences = [_sequence(it) for it in (damaged, *copies)]
    last = max([taken, *(number for number in sequences if number is not None)])
    for query in ("SELECT max(id) FROM jobs", "SELECT max(job) FROM events"):
        last = max(last, connection.execute(query).fetchone()[0] or 0)
    if sequences[0] is None:
        last += SKIPPED_IDS
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
    connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('jobs', ?)", (last,))


def _sequence(source: Salvage) -> int | None:
    table = source.tables.get("sqlite_sequence")
    for row in table.rows if table is not None else ():
        if row[0] == "jobs" and isinstance(row[1], int):
            return row[1]
    return None


def _drop_unreadable(engine: Engine, counts: SalvageCounts) -> None:
    """Remove rows that meet the constraints but cannot be read as jobs, and unused invocations."""
    writing = engine.connect().execution_options(**WRITES)
    with writing as connection, connection.begin(), Session(connection) as session:
        ended = select(JobRow.id).where(JobRow.state == State.ENDED)
        arrays = select(JobRow.array).where(JobRow.state != State.ENDED, JobRow.array.is_not(None))
        unused = InvocationRow.job.in_(ended) & InvocationRow.job.not_in(arrays)
        session.execute(delete(InvocationRow).where(unused))
        for job in session.scalars(select(JobRow.id)).all():
            if not _is_readable(session, job):
                for of_job in (EventRow, InvocationRow, HolderRow, LeaseRow):
                    session.execute(delete(of_job).where(of_job.job == job))
                session.execute(delete(JobRow).where(JobRow.id == job))
                _count(counts.dropped, "jobs", 1)
        for job in session.scalars(select(InvocationRow.job)).all():
            if not _is_launchable(session, job):
                session.execute(delete(InvocationRow).where(InvocationRow.job == job))
                _count(counts.dropped, "invocations", 1)


def _is_readable(session: Session, job: int) -> bool:
    try:
        row = session.get_one(JobRow, job)
        leases = session.scalars(select(LeaseRow).where(LeaseRow.job == job)).all()
        job_of(row, leases, session.get(HolderRow, job))
        session.scalars(select(EventRow).where(EventRow.job == job)).all()
        return True
    except Exception:  # noqa: BLE001  whatever it is, it is no job
        return False


def _is_launchable(session: Session, job: int) -> bool:
    try:
        unpack(session.get_one(InvocationRow, job).content)
        return True
    except Exception:  # noqa: BLE001  whatever it is, it is no invocation
        return False


def _count(counts: dict[str, int], name: str, number: int) -> None:
    if number > 0:
        counts[name] = counts.get(name, 0) + number
