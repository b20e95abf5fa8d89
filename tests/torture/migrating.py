"""A kill at each moment in which the database is created, or migrated from every released schema.

A child of the daemon migrates. It is killed with the daemon, and alone: then the daemon goes on.
"""

import signal
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path

from daemon_rig import Zygote
from gpulease.store.schema import HEAD
from torture import points
from torture.machine import TESTS, Machine
from torture.points import HERE, WITH_DAEMON
from torture.verdict import LOST, WRONG, Tally

MIGRATION_POINTS = (
    "migration: before the copy",
    "migration: after the copy",
    "migration: in its middle",
    "migration: before its commit",
    "migration: after its commit",
)


def kill_while_it_migrates(folder: Path, zygote: Zygote, *, oldest_alone: bool = False) -> Tally:
    """Kill who makes the database new in the middle of it, from every released schema."""
    tally = Tally("migrations")
    released = [it for it in sorted((TESTS / "data").glob("*.sql")) if it.stem != HEAD]
    chosen = (None, *(released[:1] if oldest_alone else released))
    for schema, action in product(chosen, (WITH_DAEMON, HERE)):
        if schema is None and action == WITH_DAEMON:
            continue  # the daemon itself creates a new file
        for point in MIGRATION_POINTS if schema is not None else MIGRATION_POINTS[2:]:
            place = folder / f"{schema.stem if schema else 'new'}-{len(list(folder.iterdir()))}"
            place.mkdir()
            try:
                _migrate(tally, Machine(place, zygote), schema, point, action)
            except AssertionError as error:
                tally.fault(LOST, f"{schema}, {point}, {action}: {error}")
            tally.kills += 1
    return tally


def _migrate(tally: Tally, machine: Machine, schema: Path | None, point: str, action: str) -> None:
    machine.state.mkdir()
    database = machine.state / "gpulease.db"
    if schema is not None:
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript(schema.read_text())
    before = _ended(database)
    points.arm(machine.folder, point, action)
    machine.start()
    if action == WITH_DAEMON or schema is None:
        machine.gone()
        machine.start()
    machine.ready()
    if points.struck(machine.folder) is None:
        raise AssertionError(f"nothing was killed:\n{machine.said()}")
    machine.kill(signal.SIGTERM)
    after = _ended(database)
    for number, ending in before.items():
        if number not in after:
            tally.fault(LOST, f"{schema}, {point}: job {number} is gone")
        elif ending is not None and ending != after[number]:
            tally.fault(WRONG, f"{schema}, {point}: job {number}: {ending}, then {after[number]}")


def _ended(database: Path) -> dict[int, tuple[object, ...] | None]:
    """Return every job, and how it ended if it has."""
    if not database.exists():
        return {}
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT id, state, outcome, exit_code, exit_signal FROM jobs")
        return {number: tuple(rest) if rest[0] == "ended" else None for number, *rest in rows}
