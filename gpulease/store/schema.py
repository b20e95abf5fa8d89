"""The version of the database file: brought up to date at the start, after a copy; never guessed.

Alembic is imported only when there is something to migrate: the daemon that finds its schema
current does not carry it in memory.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine

from gpulease.errors import StateUnusable

HEAD = "0003"
"""The newest revision in migrations/versions, which this code needs."""

_INSTALLED = Path(__file__).parent / "migrations"
_IN_A_CHECKOUT = Path(__file__).parents[2] / "migrations"
MIGRATIONS = _INSTALLED if _INSTALLED.is_dir() else _IN_A_CHECKOUT


def bring_up_to_date(path: Path, engine: Engine) -> None:
    """Create or migrate the schema of the file at `path`; the old file is kept beside it.

    Raises:
        StateUnusable: the file is not ours, is damaged, or was written by a newer gpulease.
    """
    found = _revision(path)
    if found == HEAD:
        return
    if found is not None:
        _refuse_newer(path, found)
        _copy(path, path.with_name(f"{path.name}.{found}.backup"))
    _migrate(engine)


def _revision(path: Path) -> str | None:
    """Return the revision of the file, or None for a new one."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    try:
        with closing(sqlite3.connect(path)) as connection:
            if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("it is damaged")
            return _read_revision(path, connection)
    except sqlite3.DatabaseError as error:
        raise StateUnusable(
            f"cannot use the database {path}: {error}",
            f"move it away to start anew, or put a copy back ({path.name}.*.backup beside it)",
        ) from error


def _read_revision(path: Path, connection: sqlite3.Connection) -> str | None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not tables:
        return None
    if "alembic_version" not in tables:
        raise StateUnusable(
            f"cannot use the database {path}: it is not a database of gpulease",
            "give gpuleased a state directory of its own with --state",
        )
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(row[0]) if row else None


def _refuse_newer(path: Path, found: str) -> None:
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if found not in known:
        raise StateUnusable(
            f"cannot use the database {path}: its schema {found} is newer than this gpulease, "
            f"which knows {HEAD}",
            "install the gpulease that wrote it, or a later one; the file is untouched",
        )


def _copy(path: Path, to: Path) -> None:
    """Copy a database with all that is committed, also what is still in its log."""
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)
    to.chmod(0o600)


def _migrate(engine: Engine) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with engine.connect().execution_options(gpulease_writes=True) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
