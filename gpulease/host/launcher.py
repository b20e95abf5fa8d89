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
from dataclasses import dataclass, field, replace
from datetime import timedelta
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
from gpulease.shim.launch_request import (
    LARGEST_REQUEST,
    EarlySignalSpec,
    IdentitySpec,
    ShimSpec,
    TerminalSpec,
    WorkerSpec,
    pack,
)
from gpulease.shim.process_tree import entry, is_stopped
from gpulease.shim.record import Started, failure, read_record, started
from gpulease.shim.spawner import IDLE_TITLE

_log = logging.getLogger(__name__)

_LONGEST_REPLY = 64 << 10


class SpawnerReply:
    """The daemon's end of the pipe on which a shim reports its launch, line by line."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self._reader = reader
        self._transport = transport

    async def line(self) -> bytes:
        """Return the next line, or nothing if the writer has died."""
        with contextlib.suppress(OSError, ValueError):
            return _whole(await self._reader.readline())
        return b""

    async def rest(self) -> bytes:
        """Return all until the end, or nothing if that is not a complete line."""
        with contextlib.suppress(OSError):
            return _whole(await self._reader.read())
        return b""

    def close(self) -> None:
        self._transport.close()


def _whole(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else b""


async def read_reply(fd: int) -> SpawnerReply:
    """Read the pipe that is open as `fd`, and close it at the end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LONGEST_REPLY)
    pipe = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return SpawnerReply(reader, transport)


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
        if _is_stopped(spawner):
            return [spawner]
        waiting = [pid for pid in _children(spawner) if _title(pid) == IDLE_TITLE]
        return waiting if all(map(_is_stopped, waiting)) else []

    async def close(self) -> None:
        """Close the channel, which ends the spawner, and reap it."""
        self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, _CLOSES_WITHIN_S)
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


def _is_stopped(pid: int) -> bool:
    found = entry(pid)
    return found is not None and is_stopped(found)


def _children(pid: int) -> Sequence[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    return ""


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


__all__ = ["AlreadyLaunched", "Launch", "Launcher", "Started", "UserIdentity"]

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


@dataclass(frozen=True, slots=True)
class UserIdentity:
    """The user that a job runs as."""

    uid: int
    gid: int
    user: str
    groups: tuple[int, ...] | None
    """None: the groups in the user database, and `gid`."""


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is needed to launch a job's worker. Strings may contain surrogate escapes."""

    job: int
    directory: Path
    """It exists and belongs to the daemon's user, and nothing was launched in it before."""
    argv: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    """The complete environment of the worker."""
    identity: UserIdentity | None
    """None: the user of the daemon."""
    umask: int
    soft_limits: Mapping[str, int]
    """By name, such as "RLIMIT_NOFILE" or "nofile". Below 0 is unlimited."""
    stdin: bool
    """Whether the worker reads from the attached client, and not from /dev/null."""
    awaits_attach: bool
    """Whether output is held for a few seconds for the first client that attaches."""
    time_limit: timedelta | None
    grace: timedelta
    """Time between SIGTERM and SIGKILL at the time limit."""
    log_limit: int
    """Bytes of each log."""
    keep_free: int = 0
    """Bytes of the disk that the logs leave free."""
    nice: int = 0
    grace_at_shutdown: timedelta | None = None
    """Time between SIGTERM and SIGKILL at a shutdown of the machine; None: `grace`."""
    gpus: tuple[str, ...] | None = None
    """The device nodes of the leased GPUs, the only GPUs that the job may open; None: all."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Leased bytes by the UUID of the GPU."""
    terminal: TerminalSpec | None = None
    """The pseudo-terminal to run on; None: pipes."""
    early_signal: EarlySignalSpec | None = None
    ends_with_client: bool = False
    """It needs a time limit."""
    environment_within: Callable[[Mapping[str, int], bool], Mapping[str, str]] | None = None
    """Returns the environment, given the driver's limits in bytes by GPU UUID, and whether the job
    can open its own GPUs only. None: `environment` in any case."""
    notice: str = ""
    """A line for the owner in the job's output."""
    is_job: bool = True
    """False for a program of the daemon, which has no sandbox."""


PrepareSandbox = Callable[[int, Launch], Awaitable[Mapping[str, str] | None]]
"""Puts the shim with this pid into the sandbox of its job.

Returns the worker's environment if the sandbox changes it. May raise RecordUnwritable or
LaunchDeferred: then nothing was launched, and the launch can be tried again.
"""


class Launcher:
    """Launches workers, each below a shim that outlives this daemon."""

    def __init__(self, *, confined: bool = False, sandbox: PrepareSandbox | None = None) -> None:
        """Launch through a spawner that is started when it is first needed.

        With `confined`, jobs see the file system of process 1 and not that of this daemon. The shim
        is put into the `sandbox` before it does anything else.
        """
        self._confined = confined
        self._sandbox = sandbox
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
            record = await asyncio.to_thread(read_record, launch.directory)
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
        sandbox = self._sandbox if launch.is_job else None
        with contextlib.ExitStack() as ours:
            go: int | None = None
            with contextlib.ExitStack() as passed:
                receiver, sender = os.pipe()
                passed.callback(os.close, sender)
                reply = await read_reply(receiver)
                ours.callback(reply.close)
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
            first = await reply.line()
            if go is None or sandbox is None or (pid := _waiting(first)) is None:
                return first + await reply.rest(), spawner
            environment = await sandbox(pid, launch)
            if environment is not None:
                # The shim has the same file, and does not read it before the go-ahead.
                os.ftruncate(memory, 0)
                _write_all(memory, _request(replace(launch, environment=environment)))
            with contextlib.suppress(BrokenPipeError):
                os.write(go, b"g")
            return await _until_started(reply.rest()), spawner

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


async def _until_started(reply: Coroutine[Any, Any, bytes]) -> bytes:
    """Wait for the reply of a shim that has the go-ahead, even if the daemon is stopping.

    A shutdown ends the jobs after the daemon has stopped. By then each job either runs its command
    or was never launched, so a job that never began does not look as if it had run.
    """
    waiting = asyncio.ensure_future(reply)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait({waiting}, timeout=_BEGINS_WITHIN_S)
        waiting.cancel()
        raise


def _request(launch: Launch) -> bytes:
    """Write the request.

    Raises:
        LaunchFailed: the command is missing, or a string is invalid.
    """
    if not launch.argv:
        raise LaunchFailed("cannot start the job: no command was given")
    who = launch.identity
    shim = ShimSpec(
        job=launch.job,
        directory=str(launch.directory),
        identity=IdentitySpec(who.uid, who.gid, who.user, who.groups) if who else None,
        stdin=launch.stdin,
        awaits_attach=launch.awaits_attach,
        time_limit_s=launch.time_limit.total_seconds() if launch.time_limit is not None else None,
        grace_s=launch.grace.total_seconds(),
        log_limit=launch.log_limit,
        terminal=launch.terminal,
        early_signal=launch.early_signal,
        keep_free=launch.keep_free,
        ends_with_client=launch.ends_with_client,
    )
    worker = WorkerSpec(
        tuple(map(_string, launch.argv)),
        _string(launch.cwd),
        dict(_variable(*variable) for variable in launch.environment.items()),
        launch.umask,
        dict(launch.soft_limits),
        launch.nice,
    )
    request = pack(shim, worker)
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


def _waiting(reply: bytes) -> int | None:
    """Return the pid of a shim that waits for the go-ahead; None if this is its whole reply."""
    pid = json.loads(reply).get("waiting") if reply else None
    return None if pid is None else int(pid)
