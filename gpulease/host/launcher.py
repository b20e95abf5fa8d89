"""The daemon's way to launch: through the spawner, which it starts and, if need be, starts anew.

What a shim tells of its launch, on a pipe to the daemon.

The spawner's process, as the daemon has it: started, handed requests, and buried.
"""

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
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
from gpulease.shim.record import Failure, Started, failure, read_record, started

_LONGEST_ANSWER = 64 << 10


class SpawnerReply:
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


async def read_reply(fd: int) -> SpawnerReply:
    """Read a pipe, and close it at the end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LONGEST_ANSWER)
    pipe = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return SpawnerReply(reader, transport)


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
                    *("-m", "gpulease.shim.spawner", str(theirs.fileno())),
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


__all__ = ["AlreadyLaunched", "Launch", "Launcher", "Started", "UserIdentity"]

_BEFORE_THE_RECORD = ("directory", "record")
_PASSING = (ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM, EAGAIN)
"""What may be over in a moment; as long as there is no record, the launch can be tried again."""
_BEGINS_WITHIN_S = 5.0
"""From our word to the command, on a slow disk or on a busy machine."""
_ERRORS: dict[int, type[GpuleaseError]] = {127: CommandNotFound, 126: CommandNotExecutable}


class AlreadyLaunched(Exception):
    """The job's directory has seen a launch before; its record says what came of it."""


@dataclass(frozen=True, slots=True)
class UserIdentity:
    """Whom a job runs as."""

    uid: int
    gid: int
    user: str
    groups: tuple[int, ...] | None
    """None: the groups that the user database gives, and `gid`."""


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is needed to launch a job's worker; strings may hold surrogate escapes."""

    job: int
    directory: Path
    """Exists, and belongs to whom the daemon runs as; nothing was launched in it before."""
    argv: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    """All of the worker's environment; nothing is added."""
    identity: UserIdentity | None
    """None: stay who the daemon is."""
    umask: int
    soft_limits: Mapping[str, int]
    """By name, as in "RLIMIT_NOFILE" or "nofile"; below 0 is without limit. Unknown: ignored."""
    stdin: bool
    """Whether the worker reads from who attaches; otherwise from /dev/null."""
    awaits_attach: bool
    """Whether the output is kept, for a few seconds, for the first who attaches."""
    time_limit: timedelta | None
    grace: timedelta
    """Between SIGTERM and SIGKILL at the time limit."""
    log_limit: int
    """Bytes of each log."""
    keep_free: int = 0
    """Bytes of the disk that the logs leave free."""
    nice: int = 0
    grace_at_shutdown: timedelta | None = None
    """Between SIGTERM and SIGKILL when the machine is shut down; None: `grace`."""
    gpus: tuple[str, ...] | None = None
    """The device nodes of the leased GPUs, no others of which may be opened; None: all may be."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Leased bytes by the UUID of the GPU."""
    terminal: TerminalSpec | None = None
    """The pseudo-terminal to run on; None: three streams of their own."""
    early_signal: EarlySignalSpec | None = None
    """Has a meaning with a time limit alone."""
    environment_within: Callable[[Mapping[str, int], bool], Mapping[str, str]] | None = None
    """Returns the environment where the driver keeps the job to so many bytes, by the UUID of the
    GPU, and where it can open no other GPU, or can; None: it is the same."""


Enclose = Callable[[int, Launch], Awaitable[Mapping[str, str] | None]]
"""Puts the process with this pid where the processes of the launch belong.

Returns the worker's environment if that is another one there. May raise RecordUnwritable or
LaunchDeferred: nothing was launched then, and it can be tried again.
"""


class Launcher:
    """Launch workers; each in the company of a shim that outlives this daemon."""

    def __init__(self, *, confined: bool = False, enclose: Enclose | None = None) -> None:
        """Launch through a spawner that is started when it is first needed.

        `confined`: jobs are not to see the files as this daemon does, but as process 1 does.
        `enclose` puts a shim, by its pid, where its job belongs, before anything else happens.
        """
        self._confined = confined
        self._enclose = enclose
        self._spawner: SpawnerProcess | None = None
        self._turn = asyncio.Lock()

    async def launch(self, launch: Launch) -> Started:
        """Start the worker and return once it has become its command.

        Raises:
            AlreadyLaunched: this directory was launched in before.
            CommandNotFound: there is no such command.
            CommandNotExecutable: the command cannot be executed.
            RecordUnwritable: the disk is full, or the like; it may be tried again.
            LaunchDeferred: nothing may be started now; it may be tried again.
            LaunchFailed: anything else was in the way.
        """
        request = _request(launch)
        for _ in range(2):
            answer = await self._ask(request, launch)
            if answer:
                return _understood(answer)
            # The spawner or the shim died. Trying again is safe: a record admits one launch only.
            record = await asyncio.to_thread(read_record, launch.directory)
            if record is not None and record.started is not None:
                return record.started
            if record is not None:
                # Its shim has died. The job may have begun, and left something behind.
                raise AlreadyLaunched
        raise LaunchFailed(
            "cannot start the job: the process that was to start it was killed",
            "the system's log may say why; memory may have run out",
        )

    async def close(self) -> None:
        """Let the spawner go; shims and workers stay."""
        async with self._turn:
            if self._spawner is not None:
                await self._spawner.close()
                self._spawner = None

    async def _ask(self, request: bytes, launch: Launch) -> bytes:
        """Return the answer to a request, or nothing if whoever was to answer died."""
        with contextlib.ExitStack() as ours:
            go: int | None = None
            with contextlib.ExitStack() as passed:
                answer, theirs = os.pipe()
                passed.callback(os.close, theirs)
                reader = await read_reply(answer)
                ours.callback(reader.close)
                memory = os.memfd_create("gpulease-request", os.MFD_CLOEXEC)
                ours.callback(os.close, memory)
                _write_all(memory, request)
                descriptors = [memory, theirs]
                if self._enclose is not None:
                    waits, go = os.pipe()
                    ours.callback(os.close, go)
                    passed.callback(os.close, waits)
                    descriptors.append(waits)
                await self._pass_on(*descriptors)
            first = await reader.line()
            if go is None or self._enclose is None or (pid := _waiting(first)) is None:
                return first + await reader.rest()
            environment = await self._enclose(pid, launch)
            if environment is not None:
                # The shim has the same file, and reads nothing of it before our word.
                os.ftruncate(memory, 0)
                _write_all(memory, _request(replace(launch, environment=environment)))
            with contextlib.suppress(BrokenPipeError):
                os.write(go, b"g")
            return await _to_its_end(reader.rest())

    async def _pass_on(self, *descriptors: int) -> None:
        async with self._turn:
            if self._spawner is not None and await self._spawner.send(*descriptors):
                return
            if self._spawner is not None:
                await self._spawner.close()
            self._spawner = SpawnerProcess(self._confined)
            await self._spawner.send(*descriptors)


async def _to_its_end(answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Wait for the answer of a shim that has our word, also when the daemon leaves meanwhile.

    At a shutdown jobs are asked to go when the daemon has left. By then each either runs its
    command or was never launched, and nothing in between is taken for a job that ran.
    """
    waiting = asyncio.ensure_future(answer)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait({waiting}, timeout=_BEGINS_WITHIN_S)
        waiting.cancel()
        raise


def _request(launch: Launch) -> bytes:
    """Write the request."""
    _check(launch)
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
    )
    worker = WorkerSpec(
        launch.argv,
        launch.cwd,
        dict(launch.environment),
        launch.umask,
        dict(launch.soft_limits),
        launch.nice,
    )
    request = pack(shim, worker)
    if len(request) > LARGEST_REQUEST:
        raise LaunchFailed("cannot start the job: its arguments and environment are too long")
    return request


def _check(launch: Launch) -> None:
    """Refuse what no system call would take; values of variables may be secret, and are not shown.

    Raises:
        LaunchFailed: there is no command, or a string is not what it has to be.
    """
    if not launch.argv:
        raise LaunchFailed("cannot start the job: there is no command")
    for string in (*launch.argv, launch.cwd):
        if not _is_sound(string):
            raise LaunchFailed(f"cannot start the job: {string[:80]!r} cannot be passed on")
    for name, value in launch.environment.items():
        if not name or "=" in name or not _is_sound(name):
            raise LaunchFailed(f"cannot start the job: no variable can be called {name[:80]!r}")
        if not _is_sound(value):
            raise LaunchFailed(f"cannot start the job: the variable {name} cannot be passed on")


def _is_sound(string: str) -> bool:
    try:
        return b"\0" not in string.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def _understood(answer: bytes) -> Started:
    content: dict[str, Any] = json.loads(answer)
    if "started" in content:
        return started(content["started"])
    if "already" in content:
        raise AlreadyLaunched
    raise _error(failure(content["failed"]))


def _error(failed: Failure) -> GpuleaseError:
    if failed.step in _BEFORE_THE_RECORD and failed.errno in _PASSING:
        return RecordUnwritable(failed.message, failed.hint)
    return _ERRORS.get(failed.exit_code, LaunchFailed)(failed.message, failed.hint)


def _write_all(fd: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)


def _waiting(answer: bytes) -> int | None:
    """Return the pid of a shim that waits for our word; None if this is its whole answer."""
    pid = json.loads(answer).get("waiting") if answer else None
    return None if pid is None else int(pid)
