"""The routes about the machine: its status, its checks, draining GPUs, a test message."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from gpulease.domain.job import Owner
from gpulease.errors import BadValue
from gpulease.server.context import Request, RequestContext
from gpulease.server.machine_views import pause_view
from gpulease.server.messages import JSON, Response, json_response
from gpulease.service.drains import DrainResult, Drains, Pauses
from gpulease.wire.machine import (
    FIRST_IN_QUEUE,
    DoctorView,
    GpuAvailabilityView,
    OveruseView,
    PauseChangeView,
)
from gpulease.wire.metrics import MetricsView
from gpulease.wire.notifications import NotifyTestView
from gpulease.wire.requests import DrainRequest, PauseRequest

_LONGEST_REASON = 200
_Rows = Annotated[int, Meta(ge=0, le=10**9)] | Literal["all"]


@dataclass(frozen=True, slots=True)
class MachineParts:
    """What these routes alone work with."""

    doctor: Callable[[], DoctorView]
    metrics: Callable[[], MetricsView]
    """Reads files: for a thread."""
    overuse_of: Callable[[Owner], OveruseView]
    """What happens to a user's jobs that exceed their lease."""
    drains: Drains
    pauses: Pauses
    test_notification: Callable[[int], Awaitable[NotifyTestView]]
    """Sends a message, and tells what happened at each receiver."""


class MachineHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext, parts: MachineParts) -> None:
        self._context = context
        self._parts = parts

    async def status(self, request: Request, queue: _Rows = FIRST_IN_QUEUE) -> Response:
        """Show GPUs, leases, unmanaged processes, and the first `queue` waiting jobs, or "all"."""
        first = None if queue == "all" else queue
        viewer = self._context.redacted_for(request.caller)
        await self._context.look()
        content = await self._context.listings.status(first, viewer)
        return Response(content, media_type=JSON)

    async def topology(self) -> Response:
        """Show the links between the GPUs, and the socket that each belongs to."""
        await self._context.look()
        return json_response(self._context.machine_views.topology())

    async def doctor(self, request: Request) -> Response:
        """Show the checks of this machine, and the policy for the caller's own jobs."""
        caller, rights = request.caller, self._context.rights
        overuse = self._parts.overuse_of(caller.owner)
        sees_hidden = rights.hide_commands and rights.is_admin(caller)
        await self._context.look()
        checked = replace(self._parts.doctor(), overuse=overuse, sees_hidden=sees_hidden)
        return json_response(checked)

    async def metrics(self) -> Response:
        """Show what the daemon has counted since its start, and its own health."""
        return json_response(await asyncio.to_thread(self._parts.metrics))

    async def drain(self, request: Request, gpu: str) -> Response:
        """Stop granting leases on a GPU; running jobs continue."""
        caller = request.caller
        why = _reason("drain", request.read(DrainRequest).why)
        return _reply(
            await self._parts.drains.drain(await self._context.gpu(gpu), caller.user, why)
        )

    async def resume(self, request: Request, gpu: str) -> Response:
        """Grant leases on a GPU again."""
        caller = request.caller
        return _reply(await self._parts.drains.resume(await self._context.gpu(gpu), caller.user))

    async def pause(self, request: Request) -> Response:
        """Start no more jobs; running jobs continue."""
        why = _reason("pause the queue", request.read(PauseRequest).why)
        pause, changed = await self._parts.pauses.pause(request.caller.user, why)
        return json_response(PauseChangeView(pause_view(pause), changed))

    async def unpause(self) -> Response:
        """Start jobs again."""
        return json_response(PauseChangeView(None, await self._parts.pauses.unpause()))

    async def test_notification(self, request: Request) -> Response:
        """Send a message as the caller, and show what happened at each of their receivers."""
        uid = request.caller.uid
        return json_response(await self._parts.test_notification(uid))


def _reason(verb: str, given: str | None) -> str:
    why = (given or "").strip()
    if not why.isprintable() or len(why) > _LONGEST_REASON:
        raise BadValue(
            f"cannot {verb} for the reason {why[:40]!r}: listings show it on one line",
            f"use at most {_LONGEST_REASON} printable characters: --why 'new fan'",
        )
    return why


def _reply(done: DrainResult) -> Response:
    closed = done.availability.reason
    view = GpuAvailabilityView(done.gpu.uuid, done.gpu.label, closed, done.changed, list(done.jobs))
    return json_response(view)
