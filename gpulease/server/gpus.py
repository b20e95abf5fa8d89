"""What admins do with whole GPUs: drain and resume them."""

import msgspec
from fastapi import Request
from fastapi.responses import Response

from gpulease.domain.gpu import GpuReading
from gpulease.errors import BadValue
from gpulease.server.auth import caller_in
from gpulease.server.context import RequestContext
from gpulease.server.validation import user_of
from gpulease.service.health import DrainResult, named
from gpulease.wire.requests import DrainRequest
from gpulease.wire.views import GpuAvailabilityView

_LONGEST_REASON = 200


class GpuHandlers:
    """One method for each route that is about a GPU."""

    def __init__(self, desk: RequestContext) -> None:
        self._desk = desk

    async def drain(self, request: Request, gpu: str) -> Response:
        """Grant nothing more on a GPU; what runs there goes on."""
        caller = caller_in(dict(request.scope))
        why = reason_of(await request.body())
        drained = await self._desk.drains.drain(await self._gpu(gpu), user_of(caller), why)
        return _reply(drained)

    async def resume(self, request: Request, gpu: str) -> Response:
        """Grant on a GPU again."""
        caller = caller_in(dict(request.scope))
        return _reply(await self._desk.drains.resume(await self._gpu(gpu), user_of(caller)))

    async def _gpu(self, text: str) -> GpuReading:
        seen = await self._desk.keeper.observer.recent()
        there = {reading.uuid for reading in seen.readings}
        # One that is out for repair can be resumed, and one that has only jobs left be drained.
        gone = [uuid for uuid in self._desk.keeper.store.availabilities() if uuid not in there]
        return named(text, (*seen.readings, *map(self._desk.keeper.store.gpu, gone)))


def reason_of(body: bytes) -> str:
    """Return why a GPU is to be drained, which nobody has to say.

    Raises:
        BadValue: it is no reason that a listing can show.
    """
    try:
        asked = msgspec.json.decode(body or b"{}", type=DrainRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadValue(f"cannot read the request: {str(error)[:200]}") from error
    why = (asked.why or "").strip()
    if not why.isprintable() or len(why) > _LONGEST_REASON:
        raise BadValue(
            f"cannot drain for the reason {why[:40]!r}: it is to be shown on one line",
            f"at most {_LONGEST_REASON} printable characters, as in --why 'new fan'",
        )
    return why


def _reply(done: DrainResult) -> Response:
    view = GpuAvailabilityView(
        done.gpu.uuid, done.gpu.label, done.availability.reason, done.changed, list(done.jobs)
    )
    return Response(msgspec.json.encode(view), media_type="application/json")
