"""The routes about windows, and the checks of their fields."""

import grp
import pwd
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from gpulease.domain.calendar import Window, WindowId
from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.errors import BadValue
from gpulease.server.context import Request, RequestContext
from gpulease.server.messages import Response, json_response
from gpulease.server.validation import instant_of, span
from gpulease.service.refusals import named
from gpulease.service.windows import Windows
from gpulease.wire.machine import WindowList
from gpulease.wire.ranges import MOST_GPUS
from gpulease.wire.requests import LONGEST_NAME, ReserveRequest

_SHORTEST_S = 60.0
_MOST_NAMES = 100


class WindowHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext, windows: Windows) -> None:
        self._context = context
        self._windows = windows

    async def windows(self) -> Response:
        """Show the GPUs that are set apart for a time."""
        return json_response(WindowList(self._context.machine_views.windows(self._now())))

    async def reserve(self, request: Request) -> Response:
        """Set GPUs apart for a time."""
        asked = request.read(ReserveRequest)
        seen = await self._context.scheduler.observer.recent()
        usable = [reading for reading in seen.readings if not reading.mig_mode]
        window = window_of(asked, usable, request.caller.user, self._now())
        reserved = await self._windows.reserve(window, len(usable))
        self._context.scheduler.wake()
        return self._reply(reserved, 201)

    async def cancel(self, window: str) -> Response:
        """Remove a window; running jobs continue."""
        cancelled = await self._windows.cancel(window)
        self._context.scheduler.wake()
        return self._reply(cancelled)

    def _now(self) -> datetime:
        return self._context.clock.now()

    def _reply(self, window: Window, status: int = 200) -> Response:
        found = self._windows.occurrences([window], self._now())
        return json_response(self._context.machine_views.window(found[0], self._now()), status)


def window_of(asked: ReserveRequest, gpus: Sequence[GpuReading], by: str, now: datetime) -> Window:
    """Return what a request asks for on a machine with these GPUs.

    Raises:
        BadValue: a field cannot be used.
        NoSuchGpu: no GPU has one of the names, or several have.
    """
    count, uuids = _gpus_of(asked, gpus)
    return Window(
        id=WindowId(0),
        name="" if asked.name is None else _name_of(asked.name),
        gpus=count,
        uuids=uuids,
        begins_at=instant_of("begins_at", asked.begins_at) or now,
        lasts_for=span("lasts_for", asked.lasts_for, least=_SHORTEST_S) or timedelta(),
        cron=asked.cron,
        users=_known(asked.users, "user", pwd.getpwnam),
        groups=_known(asked.groups, "group", grp.getgrnam),
        created_by=by,
        created_at=now,
        lifts_limits=asked.lifts_limits,
    )


def _gpus_of(asked: ReserveRequest, gpus: Sequence[GpuReading]) -> tuple[int, tuple[GpuUuid, ...]]:
    if asked.gpus is not None and asked.named:
        raise BadValue("cannot reserve GPUs: both a number and names are given", "leave out one")
    if asked.gpus is None:
        found = [named(each, gpus) for each in asked.named[:MOST_GPUS]] or gpus
        uuids = tuple(dict.fromkeys(each.uuid for each in found))
        return len(uuids), uuids
    if not 1 <= asked.gpus <= len(gpus):
        raise BadValue(
            f"cannot reserve {asked.gpus} GPUs: this machine has {len(gpus)}",
            "gpulease status shows them",
        )
    return asked.gpus, ()


def _name_of(name: str) -> str:
    usable = name.isprintable() and name == name.strip() and not name.isdecimal()
    if not usable or not 1 <= len(name) <= LONGEST_NAME or "/" in name:
        raise BadValue(
            f"cannot use the name {name[:40]!r}: a name is 1 to {LONGEST_NAME} printable "
            "characters without a slash, and not a number",
            "leave out --name to name the window after its first user or group",
        )
    return name


def _known(names: Sequence[str], what: str, find: Callable[[str], object]) -> tuple[str, ...]:
    if len(names) > _MOST_NAMES:
        raise BadValue(
            f"cannot reserve GPUs for {len(names)} {what}s: the limit is {_MOST_NAMES}",
            "use a group",
        )
    for name in names:
        try:
            find(name)
        except (KeyError, ValueError):
            raise BadValue(
                f"cannot reserve GPUs for {what} {name[:40]!r}: no such {what}",
                f"use the name of a {what} of this machine",
            ) from None
    return tuple(dict.fromkeys(names))
