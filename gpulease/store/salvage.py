"""Reads what can be read of a damaged database.

SQLite stops at the first page that it cannot read. Rows beyond it are read from the other end of
the table, and by their keys, which lead to them through other pages. Rows are read as they are
needed: a database may be larger than the memory.
"""

import shutil
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FIRST, _LAST = -(2**63), 2**63 - 1
_DEEPEST = 10
"""How often a gap is halved to find rows inside it."""
_HEADER_SIZE = 28
"""The offset of the size in pages in the file header; see sqlite.org/fileformat.html."""
_FREE_LIST = 32
_PAGE_SIZE = 16
# SQLite's message may quote a damaged name, which need not be UTF-8.
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)

_Row = tuple[Any, ...]
_Walk = Generator[_Row, None, tuple[_Row | None, bool]]
"""Yields rows; returns the last key that was read, and whether the walk reached the end."""


@dataclass(slots=True)
class Table:
    """One table of a file."""

    file: Path
    name: str
    columns: tuple[str, ...]
    """Those of the file."""
    keys: tuple[str, ...]
    """The primary key, if the table has no rowid."""
    whole: bool = False
    """Whether the last reading reached all rows."""

    def rows(self) -> Iterator[_Row]:
        """Read the rows, each once."""
        self.whole = False
        with suppress(*_UNREADABLE), closing(_open(self.file)) as connection:
            self.whole = yield from _Reader(connection, self.name, self.keys).rows()


@dataclass(slots=True)
class Salvage:
    """The tables of one file; empty if it cannot be read."""

    revision: str | None = None
    tables: dict[str, Table] = field(default_factory=dict)


def salvage(path: Path, scratch: Path, model: Path | None) -> Salvage:
    """Open a file that may be damaged, with its write-ahead log; neither is changed.

    Args:
        path: the file; its log is beside it.
        scratch: an empty directory to work in; it is needed until the rows have been read.
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
    with model.open("rb") as file:
        head = file.read(65536)
    size = int.from_bytes(head[_PAGE_SIZE : _PAGE_SIZE + 2], "big")
    size = 65536 if size == 1 else size
    pages = path.stat().st_size // max(size, 1)
    if size < 512 or len(head) < size or pages < 2:
        return False
    page = bytearray(head[:size])
    page[_HEADER_SIZE : _HEADER_SIZE + 4] = pages.to_bytes(4, "big")
    page[_FREE_LIST : _FREE_LIST + 8] = bytes(8)
    # If the log has the first page, SQLite uses that one.
    _copy(path, to)
    with to.open("r+b") as file:
        file.write(page)
    return True


def _read(work: Path) -> Salvage:
    found = Salvage()
    with suppress(*_UNREADABLE), closing(_open(work)) as connection:
        tables = _schema(connection)
        found.tables = {name: Table(work, name, columns, keys) for name, columns, keys in tables}
    versions = found.tables.pop("alembic_version", None)
    for row in versions.rows() if versions is not None else ():
        found.revision = str(row[0])
    return found


def _open(work: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(work)
    connection.text_factory = lambda text: text.decode(errors="replace")
    connection.execute("PRAGMA cell_size_check=ON")
    return connection


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


class _Reader:
    """Reads the rows of one table by key, ascending or descending, from any key."""

    def __init__(self, connection: sqlite3.Connection, name: str, keys: tuple[str, ...]) -> None:
        self._connection = connection
        self._name = _quoted(name)
        self._keys = tuple(map(_quoted, keys)) or ("rowid",)
        self._has_numbers = not keys or keys[0] == "job"

    def rows(self) -> Generator[_Row, None, bool]:
        """Yield each row once; return whether all could be read."""
        if self._has_numbers:
            return (yield from self._between(_FIRST, _LAST, 0))
        reached, whole = yield from self._walk("", (), down=False)
        if not whole:
            yield from self._walk_back("", (), reached)
        return whole

    def _between(self, low: int, high: int, depth: int) -> Generator[_Row, None, bool]:
        """Yield rows with a first key from `low` to `high`; return whether all could be read."""
        where, bounds = f"WHERE {self._keys[0]} BETWEEN ? AND ?", (low, high)
        reached, whole = yield from self._walk(where, bounds, down=False)
        if whole:
            return True
        back, _ = yield from self._walk_back(where, bounds, reached)
        # Ids start at 1, so there are no rows below 0.
        low = max((low if reached is None else reached[0]) + 1, 0)
        high = (high if back is None else back[0]) - 1
        if depth < _DEEPEST and low < high:
            middle = (low + high) // 2
            yield from self._between(low, middle, depth + 1)
            yield from self._between(middle + 1, high, depth + 1)
        return False

    def _walk_back(self, where: str, bounds: _Row, reached: _Row | None) -> _Walk:
        """Read descending, down to a key that was read before."""
        if reached is not None:
            beyond = f"({', '.join(self._keys)}) > ({', '.join('?' * len(reached))})"
            where, bounds = (
                f"{where} AND {beyond}" if where else f"WHERE {beyond}",
                bounds + reached,
            )
        return (yield from self._walk(where, bounds, down=True))

    def _walk(self, where: str, bounds: _Row, *, down: bool) -> _Walk:
        """Read to the end or the first error."""
        before: _Row | None = None
        with suppress(*_UNREADABLE):
            for row in self._select(where, bounds, down):
                key = row[: len(self._keys)]
                # A damaged tree with a cycle would never end.
                if before is not None and not _follows(before, key, down):
                    return before, False
                before = key
                yield row[len(self._keys) :]
            return before, True
        return before, False

    def _select(self, where: str, bounds: _Row, down: bool) -> sqlite3.Cursor:
        order = ", ".join(f"{key} {'DESC' if down else 'ASC'}" for key in self._keys)
        wanted = f"{', '.join(self._keys)}, *"
        # All names come from the file and are quoted.
        query = f"SELECT {wanted} FROM {self._name} NOT INDEXED {where} ORDER BY {order}"  # noqa: S608
        return self._connection.execute(query, bounds)


def _follows(before: tuple[Any, ...], key: tuple[Any, ...], down: bool) -> bool:
    try:
        return before > key if down else before < key
    except TypeError:
        return False


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
