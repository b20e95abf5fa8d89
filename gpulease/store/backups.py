"""Copies of the database beside it, made while the daemon runs: something to go back to.

Numbered and not dated, since the clock may be set: the highest is the newest. Migrations leave
copies of their own, which are never removed.
"""

import re
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from gpulease.errors import RecordUnwritable
from gpulease.store.faults import told_of
from gpulease.store.schema import copy_database

KEPT = 3
_NAME = re.compile(r"\.auto-(\d+)\.backup")


def back_up(path: Path) -> Path:
    """Copy the database at `path` to a file beside it, and remove all but the newest `KEPT`.

    Takes its time; the daemon may write meanwhile.

    Raises:
        RecordDamaged: the database is damaged; the copies there are stay.
        RecordUnwritable: there is no room, or the like.
    """
    _refuse_the_last_room(path)
    made = _made(path)
    target = path.with_name(f"{path.name}.auto-{made[-1][0] + 1 if made else 1}.backup")
    try:
        copy_database(path, target)
    except sqlite3.DatabaseError as error:
        raise told_of(path, error) from error
    except OSError as error:
        raise RecordUnwritable(f"cannot copy the record {path}: {error.strerror}") from error
    for _, old in _made(path)[:-KEPT]:
        old.unlink(missing_ok=True)
    return target


def newest(path: Path) -> Path | None:
    """Return the copy made last, by the daemon."""
    made = _made(path)
    return made[-1][1] if made else None


def all_copies(path: Path) -> list[Path]:
    """Return every copy of the database at `path`, the newest first; by migrations last."""
    own = [copy for _, copy in reversed(_made(path))]
    others = [each for each in path.parent.glob(f"{path.name}.*.backup") if each not in own]
    return own + sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)


def last_job(path: Path) -> int:
    """Return the highest id of a job that the copies of the database at `path` know of."""
    last = 0
    for copy in all_copies(path):
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(copy)) as connection:
            query = "SELECT seq FROM sqlite_sequence WHERE name = 'jobs'"
            last = max(last, *(int(seq) for (seq,) in connection.execute(query)))
    return last


def _made(path: Path) -> list[tuple[int, Path]]:
    found = []
    for each in path.parent.glob(f"{path.name}.auto-*.backup"):
        if number := _NAME.fullmatch(each.name.removeprefix(path.name)):
            found.append((int(number[1]), each))
    return sorted(found)


def _refuse_the_last_room(path: Path) -> None:
    """Leave room for the record itself: the copy is what can wait."""
    try:
        size, free = path.stat().st_size, shutil.disk_usage(path.parent).free
    except OSError as error:
        raise RecordUnwritable(f"cannot copy the record {path}: {error.strerror}") from error
    if free < 2 * size:
        raise RecordUnwritable(
            f"cannot copy the record {path}: it would take half of the room that is left",
            "an admin should make room on its disk",
        )
