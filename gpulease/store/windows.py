"""Windows in the database."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.gpu import GpuUuid
from gpulease.store.tables import WindowRow

_MICROSECOND = timedelta(microseconds=1)


def all_windows(connection: Connection) -> Sequence[Window]:
    """Return the windows, in the order in which they were made."""
    return [window_of(row) for row in connection.execute(select(WindowRow).order_by(WindowRow.id))]


def add(connection: Connection, window: Window) -> Window:
    """Store a new window, and return it with its id."""
    values = {
        "name": window.name,
        "gpus": window.gpus,
        "uuids": ",".join(window.uuids) or None,
        "begins_at": window.begins_at,
        "lasts_us": window.lasts_for // _MICROSECOND,
        "cron": window.cron,
        "users": ",".join(window.users) or None,
        "groups": ",".join(window.groups) or None,
        "created_by": window.created_by,
        "created_at": window.created_at,
        "lifts_limits": window.lifts_limits,
    }
    added = connection.execute(insert(WindowRow), values)
    assert added.inserted_primary_key is not None, "one row was inserted"
    return replace(window, id=WindowId(added.inserted_primary_key[0]))


def remove(connection: Connection, window: WindowId) -> None:
    """Remove a window."""
    connection.execute(delete(WindowRow).where(WindowRow.id == window))


def window_of(row: Any) -> Window:
    """Return the window that a row describes."""
    return Window(
        id=WindowId(row.id),
        name=row.name,
        gpus=row.gpus,
        uuids=tuple(map(GpuUuid, _listed(row.uuids))),
        begins_at=row.begins_at,
        lasts_for=row.lasts_us * _MICROSECOND,
        cron=row.cron,
        users=tuple(_listed(row.users)),
        groups=tuple(_listed(row.groups)),
        created_by=row.created_by,
        created_at=row.created_at,
        lifts_limits=row.lifts_limits,
    )


def _listed(text: str | None) -> list[str]:
    return text.split(",") if text else []
