"""Reads what is readable of a damaged database: row by row, from both ends and between the gaps.

SQLite stops at the first page that it cannot make sense of. Rows beyond it are reached by their
keys, which lead to them by other pages.
"""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FIRST, _LAST = -(2**63), 2**63 - 1
_DEEPEST = 10
"""How often a gap is halved to find rows in the middle of it."""
_HEADER_SIZE = 28
"""Where in the first page the file's size in pages is, see sqlite.org/fileformat.html."""
_FREE_LIST = 32
_PAGE_SIZE = 16


@dataclass(slots=True)
class Table:
    """What could be read of one table; the columns are those of the file it came from."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    whole: bool = True
    """Whether nothing was in the way; then what is not here was not there."""


@dataclass(slots=True)
class Salvage:
    """What could be read of one file."""

    revision: str | None = None
    tables: dict[str, Table] = field(default_factory=dict)


def salvage(path: Path, scratch: Path, model: Path | None) -> Salvage:
    """Read a file that may be damaged, with its log; neither is touched.

    Args:
        path: the file; its log is looked for beside it.
        scratch: an empty directory to work in.
        model: a sound copy of the same database, whose first page may stand in for a broken one.
    """
    work = scratch / "work.db"
    _copy(path, work)
    found = _read(work)
    if not found.tables and model is not None and _lend_first_page(path, model, work):
        found = _read(work)
    return found


def _copy(path: Path, to: Path) -> None:
    for end in ("", "-wal"):
        source = path.with_name(path.name + end)
        if source.exists():
            shutil.copyfile(source, to.with_name(to.name + end))


def _lend_first_page(path: Path, model: Path, to: Path) -> bool:
    """Put the first page of `model` in the place of a broken one; tables lie where they lay."""
    head = model.read_bytes()[:65536]
    size = int.from_bytes(head[_PAGE_SIZE : _PAGE_SIZE + 2], "big")
    size = 65536 if size == 1 else size
    content = path.read_bytes()
    if size < 512 or len(head) < size or len(content) < 2 * size:
        return False
    page = bytearray(head[:size])
    page[_HEADER_SIZE : _HEADER_SIZE + 4] = (len(content) // size).to_bytes(4, "big")
    page[_FREE_LIST : _FREE_LIST + 8] = bytes(8)
    # The log may have the true first page: it is read after this one, and wins.
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
        # SQLite quotes a broken name in its complaint, and that need not be UTF-8.
        found.tables.clear()
    versions = found.tables.pop("alembic_version", None)
    if versions is not None and versions.rows:
        found.revision = str(versions.rows[0][0])
    return found


def _schema(connection: sqlite3.Connection) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return the tables, their columns, and the columns by which their rows are ordered."""
    found = []
    masters = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
    for name, sql in masters.fetchall():
        # The third and the fifth: name and place in the primary key.
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
    """Reads the rows of one table in the order of its keys, up or down, from any place."""

    def __init__(self, connection: sqlite3.Connection, name: str, keys: tuple[str, ...]) -> None:
        self._connection = connection
        self._name = _quoted(name)
        self._keys = tuple(map(_quoted, keys)) or ("rowid",)

    def between(self, seen: dict[Any, Any], low: int, high: int, depth: int) -> bool:
        """Read the rows whose first key is from `low` to `high`; False if any may be missing."""
        reached, whole = self.walk(seen, low, high, down=False)
        if whole:
            return True
        back, _ = self.walk(seen, low, high, down=True)
        low, high = (low if reached is None else reached) + 1, (high if back is None else back) - 1
        # Ids are counted from 1: nothing is looked for where there never was anything.
        low = max(low, 0)
        if depth < _DEEPEST and low < high:
            middle = (low + high) // 2
            self.between(seen, low, middle, depth + 1)
            self.between(seen, middle + 1, high, depth + 1)
        return False

    def walk(
        self, seen: dict[Any, Any], low: int | None, high: int | None, *, down: bool
    ) -> tuple[int | None, bool]:
        """Read on until the end or the first fault; return the last first key, and if it ended."""
        last: int | None = None
        before: tuple[Any, ...] | None = None
        try:
            for row in self._rows(low, high, down):
                key = row[: len(self._keys)]
                # A tree that leads back to itself would never end.
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
        # Every name is one of the file's own, quoted.
        query = f"SELECT {wanted} FROM {self._name} NOT INDEXED {where} ORDER BY {order}"  # noqa: S608
        yield from self._connection.execute(query, bounds)


def _follows(before: tuple[Any, ...], key: tuple[Any, ...], down: bool) -> bool:
    with suppress(TypeError):
        return before > key if down else before < key
    return False


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
