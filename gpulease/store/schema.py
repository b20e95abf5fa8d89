"""Creates and migrates the schema of the database file, after a backup.

Alembic is imported only for a migration, so that a daemon with a current schema does not keep it in
memory.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine

from gpulease.errors import StateUnusable
from gpulease.store.engine import damaged, startup_error
from gpulease.store.tables import Row

HEAD = "0015"
"""The newest revision in migrations/versions, which this code needs."""

_REVISION_TABLE = """
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
)"""
"""As Alembic makes it."""

_INSTALLED = Path(__file__).parent / "migrations"
_IN_A_CHECKOUT = Path(__file__).parents[2] / "migrations"
MIGRATIONS = _INSTALLED if _INSTALLED.is_dir() else _IN_A_CHECKOUT


def is_current(path: Path) -> bool:
    """Tell whether the file at `path` has the schema that this code needs. Checks nothing else."""
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(path)) as connection:
            return read_revision(path, connection) == HEAD
    except (sqlite3.DatabaseError, StateUnusable):
        return False


def bring_up_to_date(path: Path, engine: Engine) -> None:
    """Create or migrate the schema of the file at `path`; a backup of the old file is kept.

    Raises:
        StateUnusable: the file is damaged, not of gpulease, or of a newer gpulease.
        StateUnwritable: the file cannot be used or copied now.
    """
    found = _revision(path)
    if found == HEAD:
        return
    if found is None:
        create(engine)
        return
    if found not in known_revisions():
        raise StateUnusable(
            f"cannot use the database {path}: its schema {found} is newer than this gpulease, "
            f"which knows {HEAD}",
            "install the gpulease that wrote it, or a newer one; the file is unchanged",
        )
    try:
        copy_database(path, path.with_name(f"{path.name}.{found}.backup"))
    except sqlite3.DatabaseError as error:
        raise startup_error(path, error) from error
    migrate(engine)


def _revision(path: Path) -> str | None:
    """Return the revision of the file, or None for a new one."""
    if not path.exists():  # it was removed on purpose, to start with an empty database
        return None
    if path.stat().st_size == 0:
        if any(path.parent.glob(f"{path.name}.*.backup")):
            # A new one has none: it was truncated.
            raise damaged(path, "it is empty, but has backups")
        return None
    try:
        with closing(sqlite3.connect(path)) as connection:
            _check(path, connection)
            return read_revision(path, connection)
    except sqlite3.DatabaseError as error:
        raise startup_error(path, error) from error


_DECISIVE = (
    "properties", "gpus", "jobs", "leases", "holders", "submissions", "invocations", "windows",
)  # fmt: skip
"""What decides who gets memory. The history is larger; each backup checks the whole file."""
_INDEXED = {"jobs": "state <> 'ended'", "leases": "released_at IS NULL"}
"""The rows that hold memory, by table, as an index finds them."""


def _check(path: Path, connection: sqlite3.Connection) -> None:
    """Refuse a file that is damaged where it matters.

    A row missing in an index would be a lease that is not found. The quick check leaves indexes
    out, and a full one takes seconds for a year of history.
    """
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    for table in _DECISIVE:
        if table not in names:
            continue
        found = connection.execute(f"PRAGMA quick_check({table})").fetchone()
        if found != ("ok",):
            raise damaged(path, f"it is damaged: {' '.join(str(found[0]).split())}")
    for table, which in _INDEXED.items():
        if table in names and not _agrees_with_index(connection, table, which):
            raise damaged(path, f"it is damaged: an index of {table} lacks rows")


def _agrees_with_index(connection: sqlite3.Connection, table: str, which: str) -> bool:
    # SQLite does not use an index for a column with a sign. The names are those of our schema.
    counted = f"SELECT count(*) FROM {table} WHERE {which}"  # noqa: S608
    query = f"SELECT ({counted}) = count(*) FROM {table} WHERE +{which}"  # noqa: S608
    return bool(connection.execute(query).fetchone()[0])


def read_revision(path: Path, connection: sqlite3.Connection) -> str | None:
    """Return the revision of the schema, or None for an empty file.

    Raises:
        StateUnusable: it is a database of another program.
    """
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not tables:
        return None
    if "alembic_version" not in tables:
        raise StateUnusable(
            f"cannot use the database {path}: it is not a database of gpulease",
            "give gpuleased another state directory with --state",
        )
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(row[0]) if row else None


def known_revisions() -> set[str]:
    """Return the revisions of the schema that this gpulease can migrate."""
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}


def copy_database(path: Path, to: Path) -> None:
    """Copy all committed data of a database; `to` is complete or not created.

    Raises:
        sqlite3.DatabaseError: the source cannot be read or the copy not written.
    """
    with closing(sqlite3.connect(path)) as source:
        copy_open_database(source, to)


def copy_open_database(source: sqlite3.Connection, to: Path) -> None:
    """Copy the database of an open connection, whose file may have been removed.

    Raises:
        sqlite3.DatabaseError: the source cannot be read or the copy not written.
    """
    fresh = to.with_name(f"{to.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        fresh.touch(mode=0o600)
        with closing(sqlite3.connect(fresh)) as target:
            source.backup(target)
            # The copy is a single file: reading it creates no others.
            target.execute("PRAGMA journal_mode=DELETE")
            if target.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError(f"{to.name} would be a copy of a damaged database")
        fresh.replace(to)
    finally:
        for left in (fresh, fresh.with_name(f"{fresh.name}-journal")):
            left.unlink(missing_ok=True)


def create(engine: Engine) -> None:
    """Create all tables in an empty file, in one transaction: a tenth of the work of migrations."""
    with engine.connect().execution_options(gpulease_writes=True) as connection:
        Row.metadata.create_all(connection, checkfirst=False)
        connection.exec_driver_sql(_REVISION_TABLE)
        connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (HEAD,))
        connection.commit()


def migrate(engine: Engine, to: str = "head") -> None:
    """Migrate an engine's file to a revision, in one transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with engine.connect().execution_options(gpulease_writes=True) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, to)
        connection.commit()
