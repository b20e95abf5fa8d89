"""The live view: one task asks for the status while a browser listens, and all get its result.

The page has sections. A section is drawn once for all listeners and sent when it has changed. A
listener that reads slowly gets the latest state, not each state: nothing is queued for it.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from gpulease.drawing.words import alike, index_of, instant, jobs_in, labels_of
from gpulease.errors import GpuleaseError
from gpulease.web.bars import colors
from gpulease.web.charts import TREND_POINTS, TREND_S, trend
from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.templates import render
from gpulease.wire.machine import FIRST_IN_QUEUE, StatusView
from gpulease.wire.text import free_of, unmanaged_processes

SECTIONS = ("machine", "trends", "gpus", "jobs", "strangers", "queue")
"""Each has a template, and an element in the page."""
MOST_WAITING = 12
MOST_STRANGERS = 5
"""Rows on the page of the machine, which fits a screen."""
ON_PHONE = 5
"""Of these rows, those that style.css shows on a phone."""
_EVERY_S = 1.0
_TREND_FRESH_FOR_S = TREND_S / TREND_POINTS
_KEEP_ALIVE_S = 15.0
_WRITTEN_WITHIN_S = 30.0
MOST_LISTENERS = 500
_AGAIN_AFTER_S = 30
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "x-accel-buffering": "no",  # nginx would collect events until its buffer is full
}
GZIP = {"content-encoding": "gzip", "vary": "accept-encoding"}
_GZIP_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
"""RFC 1952: deflate, no name, no time, unknown system."""
_LAST_BLOCK = b"\x03\0"


class _Part(NamedTuple):
    """A part of the stream, compressed once for all listeners."""

    plain: bytes
    packed: bytes
    """Blocks of deflate that refer to nothing before them: any parts make a stream."""


def _part(plain: bytes) -> _Part:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return _Part(plain, packer.compress(plain) + packer.flush(zlib.Z_FULL_FLUSH))


_KEEP_ALIVE = _part(b": keep-alive\n\n")


class _Encoding:
    """How one listener gets the parts: as they are, or as a gzip stream."""

    def __init__(self, scope: Scope) -> None:
        accepted = Headers(scope=scope).get("accept-encoding", "")
        words = [each.strip() for each in accepted.split(",")]
        self._packs = "gzip" in words
        self._crc, self._size = 0, 0
        self.headers = _HEADERS | (GZIP if self._packs else {})
        self.head = _GZIP_HEAD if self._packs else b""

    def body(self, parts: Sequence[_Part]) -> bytes:
        """Return parts as they are sent."""
        if not self._packs:
            return b"".join(each.plain for each in parts)
        for each in parts:
            self._crc = zlib.crc32(each.plain, self._crc)
            self._size += len(each.plain)
        return b"".join(each.packed for each in parts)

    def tail(self) -> bytes:
        """Return what ends the stream."""
        if not self._packs:
            return b""
        checks = (self._crc, self._size & 0xFFFF_FFFF)
        return _LAST_BLOCK + b"".join(each.to_bytes(4, "little") for each in checks)


class LiveStatus:
    """Draws the status once for all listeners."""

    def __init__(
        self, daemon: DaemonReader, *, every_s: float = _EVERY_S, most: int = MOST_LISTENERS
    ) -> None:
        self._daemon = daemon
        self._every_s = every_s
        self._most = most
        self._listeners = 0
        self._closed = False
        self._events: dict[str, _Part] = {}
        """The latest event of each section; another object if it has changed."""
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""
        self._asking: asyncio.Task[None] | None = None
        self._known_at: str | None = None
        """The time of the latest status."""

    async def status(self) -> StatusView:
        """Return the status of a moment ago, with the first jobs of the queue."""
        found = await self._daemon.ask(
            "status", lambda client: client.status(FIRST_IN_QUEUE), self._every_s / 2
        )
        self._known_at = found.at
        return found

    async def trends(self, status: StatusView) -> Sequence[str]:
        """Return the curve of each GPU; empty where nothing is known."""
        # One after the other, so that they never take all places in the line for the daemon.
        return [await self._trend(index_of(gpu)) for gpu in status.gpus]

    async def _trend(self, gpu: str) -> str:
        with contextlib.suppress(GpuleaseError):  # an older daemon, or a GPU that has just gone
            return trend(
                await self._daemon.ask(
                    ("trend", gpu),
                    lambda client: client.gpu_history(gpu, TREND_S, 0, TREND_POINTS),
                    _TREND_FRESH_FOR_S,
                )
            )
        return ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the sections, and each again when it changes, until the browser disconnects."""
        if scope["method"] == "HEAD":
            await Response(headers=_HEADERS)(scope, receive, send)
            return
        if self._listeners >= self._most:
            text = "cannot send events: too many browsers listen\n"
            again = {"retry-after": str(_AGAIN_AFTER_S)}
            await PlainTextResponse(text, 503, again)(scope, receive, send)
            return
        self._listeners += 1
        if self._asking is None:
            self._asking = asyncio.create_task(self._poll(), name="status")
        try:
            await _first_of(self._write(send, _Encoding(scope)), _gone(receive))
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._asking.cancel()
                self._asking = None
                self._events.clear()  # the next listener gets a fresh status first

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._wake()

    async def _write(self, send: Send, encoding: _Encoding) -> None:
        headers = [(name.encode(), value.encode()) for name, value in encoding.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sent: dict[str, _Part] = {}
        head = encoding.head
        while not self._closed:
            changed = self._changed
            news = [each for name, each in self._events.items() if sent.get(name) is not each]
            sent = dict(self._events)
            body, head = head + encoding.body(news or [_KEEP_ALIVE]), b""
            async with asyncio.timeout(_WRITTEN_WITHIN_S):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    await changed.wait()
        await send({"type": "http.response.body", "body": head + encoding.tail()})

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            self._publish(await self._drawn())
            await asyncio.sleep(max(0.0, begun + self._every_s - loop.time()))

    async def _drawn(self) -> Mapping[str, str]:
        """Return the sections, or the notice alone if the daemon does not answer."""
        try:
            status = await self.status()
        except GpuleaseError as error:
            return {"notice": render("_notice.html", "/", error=error, known_at=self._known_at)}
        return {"notice": "", **sections(status, await self.trends(status))}

    def _publish(self, drawn: Mapping[str, str]) -> None:
        changed = False
        for name, html in drawn.items():
            event, before = _event(name, html), self._events.get(name)
            if before is None or before.plain != event:
                self._events[name] = _part(event)
                changed = True
        if changed:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def sections(status: StatusView, trends: Sequence[str] = ()) -> Mapping[str, str]:
    """Return the HTML of each section of the page."""
    values = values_of(status) | {"trends": trends}
    return {name: render(f"_{name}.html", "/", **values) for name in SECTIONS}


def values_of(status: StatusView) -> dict[str, Any]:
    """Return what the templates of sections show."""
    holding = [job for job in status.jobs if job.state != "queued"]
    queued = [job for job in status.jobs if job.state == "queued"]
    groups = alike(queued)
    free = [(gpu, free_of(gpu) or 0) for gpu in status.gpus]
    return {
        "status": status,
        "now": instant(status.at).astimezone(),
        "labels": labels_of(status.gpus),
        "holding": holding,
        "queued": queued,
        "waiting": jobs_in(queued) if status.waiting is None else status.waiting,
        "groups": groups,
        "shown_waiting": sum(map(jobs_in, groups[:MOST_WAITING])),
        "most_waiting": MOST_WAITING,
        "colors": colors({job.user for job in holding}),
        "room": sorted((it for it in free if it[1] > 0), key=lambda it: -it[1]),
        "strangers": sorted(
            ((gpu, each) for gpu in status.gpus for each in unmanaged_processes(gpu, status)),
            key=lambda it: -(it[1].memory or 0),
        ),
        "most_strangers": MOST_STRANGERS,
        "on_phone": ON_PHONE,
    }


def _event(name: str, html: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in html.split("\n"))
    return f"event: {name}\n{lines}\n".encode(errors="replace")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(*running: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one of them ends, and cancel the others."""
    tasks = [asyncio.create_task(each) for each in running]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        with contextlib.suppress(TimeoutError):  # the browser has stopped reading
            task.result()
