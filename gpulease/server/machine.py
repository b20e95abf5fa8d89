"""The routes about the machine: its status, its checks, draining GPUs, a test message."""

import asyncio
from dataclasses import replace

from gpulease.errors import BadValue
from gpulease.server.context import (
    RequestContext,
    caller_of_request,
    encoded_response,
    json_response,
    read_body,
)
from gpulease.server.machine_views import pause_view
from gpulease.server.messages import Request, Response
from gpulease.service.health import DrainResult
from gpulease.wire.machine import FIRST_IN_QUEUE, GpuAvailabilityView, PauseChangeView
from gpulease.wire.requests import DrainRequest, PauseRequest

_LONGEST_REASON = 200
_MOST_DIGITS = 9


class MachineHandlers:
    """One method for each route."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    async def status(self, request: Request, queue: str | None = None) -> Response:
        """Show GPUs, leases, unmanaged processes, and the first `queue` waiting jobs, or "all"."""
        first = _first_of(queue)
        viewer = self._context.redacted_for(caller_of_request(request))
        await self._context.look()
        return encoded_response(await self._context.listings.status(first, viewer))

    async def doctor(self, request: Request) -> Response:
        """Show the checks of this machine, and the policy for the caller's own jobs."""
        caller, rights = caller_of_request(request), self._context.rights
        overuse = self._context.overuse_of(caller.owner)
        sees_hidden = rights.hide_commands and rights.is_admin(caller)
        await self._context.look()
        checked = replace(self._context.doctor(), overuse=overuse, sees_hidden=sees_hidden)
        return json_response(checked)

    async def metrics(self) -> Response:
        """Show what the daemon has counted since its start, and its own health."""
        return json_response(await asyncio.to_thread(self._context.metrics))

    async def drain(self, request: Request, gpu: str) -> Response:
        """Stop granting leases on a GPU; running jobs continue."""
        caller = caller_of_request(request)
        why = _reason("drain", read_body(DrainRequest, await request.body() or b"{}").why)
        return _reply(
            await self._context.drains.drain(await self._context.gpu(gpu), caller.user, why)
        )

    async def resume(self, request: Request, gpu: str) -> Response:
        """Grant leases on a GPU again."""
        caller = caller_of_request(request)
        return _reply(await self._context.drains.resume(await self._context.gpu(gpu), caller.user))

    async def pause(self, request: Request) -> Response:
        """Start no more jobs; running jobs continue."""
        why = _reason("pause the queue", read_body(PauseRequest, await request.body() or b"{}").why)
        pause, changed = await self._context.pauses.pause(caller_of_request(request).user, why)
        return json_response(PauseChangeView(pause_view(pause), changed))

    async def unpause(self) -> Response:
        """Start jobs again."""
        return json_response(PauseChangeView(None, await self._context.pauses.unpause()))

    async def test_notification(self, request: Request) -> Response:
        """Send a message as the caller, and show what happened at each of their receivers."""
        uid = caller_of_request(request).uid
        return json_response(await self._context.test_notification(uid))


def _first_of(queue: str | None) -> int | None:
    """Return how many jobs of the queue to show; None: all of them."""
    if queue is None or queue == "all":
        return FIRST_IN_QUEUE if queue is None else None
    if not (queue.isascii() and queue.isdigit() and len(queue) <= _MOST_DIGITS):
        raise BadValue(
            f"cannot show {queue[:40]!r} jobs of the queue: that is no number",
            "queue=20, queue=all",
        )
    return int(queue)


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
