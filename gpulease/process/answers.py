"""What a shim tells of its launch, on a pipe to the daemon."""

import asyncio
import contextlib
import os

_LONGEST_ANSWER = 64 << 10


class Answers:
    """The daemon's end of the pipe on which a shim tells how its launch goes, line by line."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self._reader = reader
        self._transport = transport

    async def line(self) -> bytes:
        """Return the next line, or nothing if whoever was to write it has died."""
        with contextlib.suppress(OSError, ValueError):
            return _whole(await self._reader.readline())
        return b""

    async def rest(self) -> bytes:
        """Return what comes until the end, or nothing if that is not a whole line."""
        with contextlib.suppress(OSError):
            return _whole(await self._reader.read())
        return b""

    def close(self) -> None:
        self._transport.close()


def _whole(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else b""


async def read_answers(fd: int) -> Answers:
    """Read a pipe, and close it at the end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LONGEST_ANSWER)
    pipe = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return Answers(reader, transport)
