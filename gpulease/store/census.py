"""How many jobs a record holds, for who is about to delete it.

It opens the file for reading alone, beside a daemon that may use it, and migrates nothing.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from gpulease.domain.lease import State

_COUNT = (
    "SELECT jobs.state, holders.job IS NOT NULL, count(*) FROM jobs "
    "LEFT JOIN holders ON holders.job = jobs.id GROUP BY 1, 2"
)


@dataclass(frozen=True, slots=True)
class Census:
    """The numbers of jobs in a record."""

    waiting: int = 0
    """Leases without a job that wait are among them."""
    running: int = 0
    holds: int = 0
    """Leases without a job that are held."""
    ended: int = 0


def census(database: Path) -> Census | None:
    """Count the jobs of a record; None where it cannot be read. No file is an empty record."""
    if not database.exists():
        return Census()
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
    return Census(**counts)


def _kind(state: State, *, held: bool) -> str:
    if state is State.QUEUED:
        return "waiting"
    if state is State.ENDED:
        return "ended"
    return "holds" if held else "running"
