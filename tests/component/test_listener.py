"""Connections on the daemon's socket: what each costs before it asks for anything."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gpulease.server.listener import Acceptor, ConnectionCounts, listen

MOST = 5


class SameForRoot(ConnectionCounts):
    """Counts that limit every user, since tests may run as root."""

    def has_room_for(self, uid: int) -> bool:
        return self._open[uid] < self.most


class Greeter(asyncio.Protocol):
    """Answers the first bytes with the same bytes."""

    made = 0

    def __init__(self) -> None:
        Greeter.made += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Rig:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = SameForRoot(MOST)
        Greeter.made = 0
        self.acceptor = Acceptor(listen(path, to_all=False), Greeter, self.counts)

    def connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(self.path))
        link.setblocking(False)
        return link

    @property
    def open(self) -> int:
        return self.counts.open


@asynccontextmanager
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path / "s")
    try:
        yield made
    finally:
        made.acceptor.close()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happened():
            await asyncio.sleep(0)


async def answer(link: socket.socket, data: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(link, data)
    return await loop.sock_recv(link, 4096)


def test_a_connection_that_says_nothing_gets_no_protocol(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as made:
            links = [made.connect() for _ in range(MOST)]
            await until(lambda: made.open == MOST)
            assert Greeter.made == 0
            assert await answer(links[0], b"hello") == b"hello"
            assert Greeter.made == 1
            for each in links:
                each.close()

    asyncio.run(check())


def test_a_connection_that_leaves_without_a_word_makes_room(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as made:
            for _ in range(3):
                links = [made.connect() for _ in range(MOST)]
                await until(lambda: made.open == MOST)
                for each in links:
                    each.close()
                await until(lambda: made.open == 0)
            assert Greeter.made == 0

    asyncio.run(check())


def test_connections_over_the_limit_are_refused_and_the_others_served(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as made:
            links = [made.connect() for _ in range(MOST + 3)]
            loop = asyncio.get_running_loop()
            refusals = [await loop.sock_recv(each, 4096) for each in links[MOST:]]
            assert all(each.startswith(b"HTTP/1.1 429 ") for each in refusals)
            assert made.counts.refused == 3
            assert [await answer(each, b"hello") for each in links[:MOST]] == [b"hello"] * MOST
            for each in links:
                each.close()

    asyncio.run(check())


def test_the_end_closes_connections_that_say_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as made:
            link = made.connect()
            await until(lambda: made.open == 1)
            made.acceptor.close()
            assert await asyncio.get_running_loop().sock_recv(link, 1) == b""
            assert made.open == 0
            link.close()

    asyncio.run(check())
