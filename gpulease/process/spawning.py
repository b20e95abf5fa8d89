"""The spawner's process, as the daemon has it: started, handed requests, and buried."""

import array
import asyncio
import socket
import subprocess
import sys
from pathlib import Path

_CLOSING_PATIENCE_S = 5.0


class SpawnerProcess:
    """One spawner, on a channel that ends it when it is closed."""

    def __init__(self, confined: bool) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-S", "-X", "utf8"),
                    *("-m", "gpulease.process.spawner", str(theirs.fileno())),
                    *(["confined"] if confined else []),
                ],
                cwd="/",
                env={"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    async def send(self, *descriptors: int) -> bool:
        """Hand over a request; False if the spawner is no more."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        while True:
            try:
                self._channel.sendmsg([b"L"], ancillary)
            except BlockingIOError:
                await self._can_take_more()
            except (BrokenPipeError, ConnectionResetError):
                return False
            else:
                return True

    async def close(self) -> None:
        """Close the channel, which ends the spawner, and bury it."""
        self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, _CLOSING_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _can_take_more(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self._channel, _resolve, ready)
        try:
            await ready
        finally:
            loop.remove_writer(self._channel)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
