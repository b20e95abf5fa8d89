"""Launch workers through the spawner, a process that the daemon starts and restarts.

The spawner forks a shim for each launch. The shim reports on a pipe how the launch goes.
"""

import array
import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from errno import EAGAIN, EDQUOT, EMFILE, ENFILE, ENOMEM, ENOSPC
from pathlib import Path
from typing import Any

from gpulease.errors import (
    CommandNotExecutable,
    CommandNotFound,
    GpuleaseError,
    LaunchFailed,
    RecordUnwritable,
)
from gpulease.host.launch import Launch
from gpulease.shim.launch_request import LARGEST_REQUEST, WorkerSpec, pack
from gpulease.shim.process_tree import is_stopped, read_proc
from gpulease.shim.record import Started, failure, read_record, started
from gpulease.shim.spawner import IDLE_TITLE

_log = logging.getLogger(__name__)

_LONGEST_REPLY = 64 << 10
_IDLE = IDLE_TITLE.encode()
_CLOSES_WITHIN_S = 5.0


class SpawnerProcess:
    """One spawner. It ends when its channel is closed."""

    def __init__(self, confined: bool) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-S", "-X", "utf8"),
                    *("-m", "gpulease.shim.spawner", str(theirs.fileno())),
                    *(["confined"] if confined else []),
                ],
                cwd="/",
                env={
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "LD_BIND_NOW": "1",  # otherwise each shim binds the functions that it calls
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    async def send(self, *descriptors: int) -> bool:
        """Send a request; False if the spawner has ended."""
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

    def stopped(self) -> Sequence[int]:
        """Return the processes that a signal has stopped, if nothing can be launched for that.

        That is the spawner, or every shim that waits.
        """
        spawner = self._process.pid
        if is_stopped(spawner):
            return [spawner]
        children = map(int, read_proc(f"/proc/{spawner}/task/{spawner}/children").split())
        waiting = [pid for pid in children if read_proc(f"/proc/{pid}/cmdline").startswith(_IDLE)]
        return waiting if all(map(is_stopped, waiting)) else []

    async def close(self) -> None:
        """Close the channel, which ends the spawner, and reap it."""
        self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, _CLOSES_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _can_take_more(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_writer(self._channel, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._channel)


_TRIES = 3
"""A try may meet a spawner that another launch ends."""
_BEFORE_THE_RECORD = ("directory", "record")
_TEMPORARY = (ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM, EAGAIN)
"""Errors that may pass. Without a record the launch can be tried again."""
_TAKEN_WITHIN_S = 2.0
"""For a shim to take a request; later, it is asked whether a signal has stopped it."""
_BEGINS_WITHIN_S = 5.0
"""Time from the go-ahead to the command on a slow disk or a busy machine."""
_ERRORS: dict[int, type[GpuleaseError]] = {127: CommandNotFound, 126: CommandNotExecutable}


class AlreadyLaunched(Exception):
    """A job was launched in this directory before. The record says what happened to it."""


PrepareSandbox = Callable[[int, Launch], Awaitable[Mapping[str, str] | None]]
"""Puts the shim with this pid into the sandbox of its job.

Returns the worker's environment if the sandbox changes it. May raise RecordUnwritable or
LaunchDeferred: then nothing was launched, and the launch can be tried again.
"""


class Launcher:
    """Launches workers, each below a shim that outlives this daemon."""

    def __init__(
        self,
        *,
        confined: bool = False,
        sandbox: PrepareSandbox | None = None,
        begins_within_s: float = _BEGINS_WITHIN_S,
    ) -> None:
        """Launch through a spawner that is started when it is first needed.

        With `confined`, jobs see the file system of process 1 and not that of this daemon. The shim
        is put into the `sandbox` before it does anything else.
        """
        self._confined = confined
        self._sandbox = sandbox
        self._begins_within_s = begins_within_s
        self._spawner: SpawnerProcess | None = None
        self._turn = asyncio.Lock()
        self._sent: dict[bytes, float] = {}
        """The requests without a reply, and when they were sent."""
        self._obstacle: str | None = None

    def obstacle(self) -> str | None:
        """Return why no job can start now: a signal has stopped the processes that start jobs."""
        since = min(self._sent.values(), default=None)
        is_late = since is not None and time.monotonic() - since > _TAKEN_WITHIN_S
        pids = " ".join(map(str, self._spawner.stopped())) if is_late and self._spawner else ""
        before, self._obstacle = self._obstacle, None
        if pids:
            self._obstacle = (
                f"the processes that start jobs are stopped by a signal; kill -CONT {pids} "
                "continues them"
            )
        if before != self._obstacle:
            _log.warning("%s", self._obstacle or "the processes that start jobs continue")
        return self._obstacle

    async def launch(self, launch: Launch) -> Started:
        """Start the worker and return once it has become its command.

        Raises:
            AlreadyLaunched: this directory was launched in before.
            CommandNotFound: there is no such command.
            CommandNotExecutable: the command cannot be executed.
            RecordUnwritable: the disk is full, for example; it can be tried again.
            LaunchDeferred: nothing can be started now; it can be tried again.
            LaunchFailed: the launch failed for another reason.
        """
        request = _request(launch)
        for _ in range(_TRIES):
            self._sent[request] = time.monotonic()
            try:
                reply, spawner = await self._request(request, launch)
            finally:
                self._sent.pop(request, None)
            if reply:
                return _started(reply)
            # The spawner or the shim died. Another try is safe: a record allows one launch only.
            record = await asyncio.to_thread(read_record, launch.shim.directory)
            if record is not None and record.started is not None:
                return record.started
            if record is not None:
                # Its shim has died. The job may have begun and left processes behind.
                raise AlreadyLaunched
            # The stock of a spawner that was killed is about to end, and would lose it again.
            await self._end(spawner)
        raise LaunchFailed(
            "cannot start the job: the process that starts it was killed",
            "check the system's log; the machine may have run out of memory",
        )

    async def close(self) -> None:
        """End the spawner; shims and workers stay."""
        async with self._turn:
            if self._spawner is not None:
                await self._spawner.close()
                self._spawner = None

    async def _request(self, request: bytes, launch: Launch) -> tuple[bytes, SpawnerProcess]:
        """Return the reply to a request, or nothing if spawner or shim died, and the spawner."""
        sandbox = self._sandbox if launch.sandbox is not None else None
        with contextlib.ExitStack() as ours:
            go: int | None = None
            with contextlib.ExitStack() as passed:
                receiver, sender = os.pipe()
                ours.callback(os.close, receiver)
                os.set_blocking(receiver, False)
                passed.callback(os.close, sender)
                memory = os.memfd_create("gpulease-request", os.MFD_CLOEXEC)
                ours.callback(os.close, memory)
                _write_all(memory, request)
                descriptors = [memory, sender]
                if sandbox is not None:
                    waits, go = os.pipe()
                    ours.callback(os.close, go)
                    passed.callback(os.close, waits)
                    descriptors.append(waits)
                spawner = await self._pass_on(*descriptors)
            first = await _line(receiver)
            pid = json.loads(first).get("waiting") if first else None
            if go is None or sandbox is None or pid is None:
                return first, spawner
            environment = await sandbox(pid, launch)
            if environment is not None:
                # The shim has the same file, and does not read it before the go-ahead.
                os.ftruncate(memory, 0)
                changed = replace(launch.invocation, environment=environment)
                _write_all(memory, _request(replace(launch, invocation=changed)))
            with contextlib.suppress(BrokenPipeError):
                os.write(go, b"g")
            return await self._until_started(_line(receiver)), spawner

    async def _until_started(self, reply: Coroutine[Any, Any, bytes]) -> bytes:
        """Wait for the reply of a shim that has the go-ahead, even if the daemon is stopping.

        A shutdown ends the jobs after the daemon has stopped. By then each job either runs its
        command or was never launched, so a job that never began does not look as if it had run.
        """
        waiting = asyncio.ensure_future(reply)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await asyncio.wait({waiting}, timeout=self._begins_within_s)
            waiting.cancel()
            await asyncio.wait({waiting})
            raise

    async def _pass_on(self, *descriptors: int) -> SpawnerProcess:
        """Send a request, and return the spawner that has it."""
        async with self._turn:
            if self._spawner is not None and await self._spawner.send(*descriptors):
                return self._spawner
            if self._spawner is not None:
                await self._spawner.close()
            self._spawner = SpawnerProcess(self._confined)
            await self._spawner.send(*descriptors)
            return self._spawner

    async def _end(self, spawner: SpawnerProcess) -> None:
        """End this spawner, unless another has replaced it."""
        async with self._turn:
            if self._spawner is spawner:
                self._spawner = None
                await spawner.close()


async def _line(reply: int) -> bytes:
    """Return the next line on the pipe from a shim, or nothing if the shim has died.

    A shim writes no more than one line before it is answered.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    line = b""
    loop.add_reader(reply, ready.set)
    try:
        while not line.endswith(b"\n"):
            await ready.wait()
            ready.clear()
            piece = os.read(reply, _LONGEST_REPLY)
            if not piece or len(line) > _LONGEST_REPLY:
                return b""
            line += piece
    finally:
        loop.remove_reader(reply)
    return line


def _request(launch: Launch) -> bytes:
    """Write the request.

    Raises:
        LaunchFailed: the command is missing, or a string is invalid.
    """
    invocation = launch.invocation
    if not invocation.argv:
        raise LaunchFailed("cannot start the job: no command was given")
    worker = WorkerSpec(
        tuple(map(_string, invocation.argv)),
        _string(invocation.cwd),
        dict(_variable(*variable) for variable in invocation.environment.items()),
        invocation.umask,
        dict(invocation.soft_limits),
        invocation.nice,
    )
    request = pack(launch.shim, worker)
    if len(request) > LARGEST_REQUEST:
        raise LaunchFailed("cannot start the job: its arguments and environment are too long")
    return request


def _string(string: str) -> bytes:
    """Encode an argument or a path."""
    if (encoded := _encoded(string)) is None:
        raise LaunchFailed(
            f"cannot start the job: {string[:80]!r} has a NUL byte or cannot be encoded"
        )
    return encoded


def _variable(name: str, value: str) -> tuple[bytes, bytes]:
    """Encode a variable. Its value may be secret and is not shown."""
    encoded = _encoded(name)
    if not encoded or b"=" in encoded:
        raise LaunchFailed(f"cannot start the job: {name[:80]!r} is not a valid variable name")
    if (text := _encoded(value)) is None:
        raise LaunchFailed(
            f"cannot start the job: the variable {name} has a NUL byte or cannot be encoded"
        )
    return encoded, text


def _encoded(string: str) -> bytes | None:
    """Encode what a system call accepts; None for anything else."""
    try:
        encoded = string.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None
    return None if b"\0" in encoded else encoded


def _started(reply: bytes) -> Started:
    content: dict[str, Any] = json.loads(reply)
    if "started" in content:
        return started(content["started"])
    if "already" in content:
        raise AlreadyLaunched
    failed = failure(content["failed"])
    if failed.step in _BEFORE_THE_RECORD and failed.errno in _TEMPORARY:
        raise RecordUnwritable(failed.message, failed.hint)
    raise _ERRORS.get(failed.exit_code, LaunchFailed)(failed.message, failed.hint)


def _write_all(fd: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)
