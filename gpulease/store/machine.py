"""What is stored of the machine: drains, faults and events of GPUs, windows, and the pause."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, delete, insert, or_, select, update

from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.gpu import GpuUuid
from gpulease.domain.health import Drain, GpuAvailability, GpuEvent, HardwareFault
from gpulease.domain.queue_options import QueuePause
from gpulease.store.tables import GpuEventRow, GpuRow, PropertyRow, WindowRow

MOST_EVENTS = 200
"""Events kept of one GPU and kind; the oldest are deleted first."""
KEEP_EVENTS_FOR = timedelta(days=365)
_MERGE_WITHIN = timedelta(minutes=10)
"""The same event again within this time increases the count of the former entry."""

_COLUMNS = (
    GpuRow.drained,
    GpuRow.drained_by,
    GpuRow.drained_at,
    GpuRow.ailment,
    GpuRow.ailment_kind,
    GpuRow.ailment_at,
    GpuRow.excused,
)


def availabilities(connection: Connection) -> Mapping[GpuUuid, GpuAvailability]:
    """Return the availability of each GPU with a drain, a fault or an accepted fault."""
    something = or_(*(column.is_not(None) for column in _COLUMNS))
    rows = connection.execute(select(GpuRow.uuid, *_COLUMNS).where(something))
    return {GpuUuid(row.uuid): _availability(row) for row in rows}


def _availability(row: Any) -> GpuAvailability:
    fault = None
    if row.ailment and row.ailment_at:
        fault = HardwareFault(row.ailment_kind or "fault", row.ailment, row.ailment_at)
    is_drained = row.drained is not None
    drain = Drain(row.drained_by, row.drained, row.drained_at) if is_drained else None
    return GpuAvailability(drain, fault, row.excused)


def set_availability(connection: Connection, gpu: GpuUuid, availability: GpuAvailability) -> None:
    """Store the availability of a known GPU."""
    drain, ailment = availability.drain, availability.hardware_fault
    connection.execute(
        update(GpuRow)
        .where(GpuRow.uuid == gpu)
        .values(
            drained=drain and drain.why,
            drained_by=drain and drain.by,
            drained_at=drain and drain.at,
            ailment=ailment and ailment.why,
            ailment_kind=ailment and ailment.kind,
            ailment_at=ailment and ailment.at,
            excused=availability.accepted_fault,
        )
    )


def note_event(connection: Connection, event: GpuEvent) -> None:
    """Store one event, or increase the count of the same recent one.

    Only the oldest events of its kind are deleted, so that XIDs caused by a user's program do not
    displace the history of the hardware.
    """
    of_it = GpuEventRow.gpu == event.gpu
    of_kind = and_(of_it, GpuEventRow.kind == event.kind)
    last = connection.execute(
        select(GpuEventRow.id, GpuEventRow.at)
        .where(of_kind, GpuEventRow.detail == event.detail)
        .order_by(GpuEventRow.id.desc())
        .limit(1)
    ).first()
    if last is not None and event.at - last.at <= _MERGE_WITHIN:
        again = {"at": event.at, "count": GpuEventRow.count + event.count}
        connection.execute(update(GpuEventRow).where(GpuEventRow.id == last.id).values(**again))
        return
    connection.execute(
        insert(GpuEventRow).values(
            gpu=event.gpu, at=event.at, kind=event.kind, detail=event.detail, count=event.count
        )
    )
    newest = select(GpuEventRow.id).where(of_kind).order_by(GpuEventRow.id.desc())
    too_many = and_(of_kind, GpuEventRow.id.not_in(newest.limit(MOST_EVENTS)))
    old = and_(of_it, GpuEventRow.at < event.at - KEEP_EVENTS_FOR)
    connection.execute(delete(GpuEventRow).where(or_(too_many, old)))


def events_since(connection: Connection, since: datetime, most: int) -> Sequence[GpuEvent]:
    """Return up to `most` of the latest events of all GPUs since `since`, oldest first."""
    rows = connection.execute(
        select(
            GpuEventRow.gpu,
            GpuEventRow.at,
            GpuEventRow.kind,
            GpuEventRow.detail,
            GpuEventRow.count,
        )
        .where(GpuEventRow.at >= since)
        .order_by(GpuEventRow.id.desc())
        .limit(most)
    ).all()
    return [GpuEvent(GpuUuid(row[0]), *row[1:]) for row in reversed(rows)]


_MICROSECOND = timedelta(microseconds=1)


def all_windows(connection: Connection) -> Sequence[Window]:
    """Return the windows, in the order in which they were made."""
    return [_window_of(row) for row in connection.execute(select(WindowRow).order_by(WindowRow.id))]


def add_window(connection: Connection, window: Window) -> Window:
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


def remove_window(connection: Connection, window: WindowId) -> None:
    """Remove a window."""
    connection.execute(delete(WindowRow).where(WindowRow.id == window))


def _window_of(row: Any) -> Window:
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


_PAUSE = "pause"


def pause_of(connection: Connection) -> QueuePause | None:
    """Return the pause of the queue; None if it is not paused."""
    wanted = select(PropertyRow.value).where(PropertyRow.key == _PAUSE)
    stored = connection.execute(wanted).scalar_one_or_none()
    return None if stored is None else msgspec.json.decode(stored, type=QueuePause)


def set_pause(connection: Connection, pause: QueuePause | None) -> None:
    """Store the pause of the queue, or its end."""
    connection.execute(delete(PropertyRow).where(PropertyRow.key == _PAUSE))
    if pause is not None:
        stored = msgspec.json.encode(pause).decode()
        connection.execute(insert(PropertyRow).values(key=_PAUSE, value=stored))
