"""The daemon's side of a shim: follow its worker, ask it to stop the worker, and find the shim.

The daemon may restart at any moment, so the record is read before and after each talk to the shim,
and the record counts. The job's directory shows whether the shim lives, its session and its scope.
If the directory is missing, the database shows which process is the shim.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from gpulease.domain.job import Job
from gpulease.host.proc_reader import real_uid
from gpulease.shim.process_tree import Entry, entry
from gpulease.shim.record import (
    Exited,
    MainExited,
    Record,
    Started,
    exited,
    is_alive,
    main_exited,
    read_record,
    read_with_life,
    started,
)
from gpulease.wire.frames import BadFrame, FrameKind, FrameReader, frame

__all__ = [
    "Exited",
    "Lost",
    "MainExited",
    "Missing",
    "ShimEvent",
    "Started",
    "Stopping",
    "follow",
    "notify",
    "set_time_limit",
    "stop",
]

_PIECE = 64 << 10
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Stopping:
    """The worker was asked to stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The shim died and recorded no end. Processes of the worker may still run."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The record is missing: nothing was launched, or the directory was removed or moved."""


ShimEvent = Started | Stopping | MainExited | Exited | Lost | Missing


async def follow(directory: Path) -> AsyncGenerator[ShimEvent, None]:
    """Yield what happens to the worker launched in `directory`, each event once.

    The last event is `Exited`, `Lost` or `Missing`.
    """
    seen: set[type[ShimEvent]] = set()
    pause = _FIRST_PAUSE_S
    while True:
        async with contextlib.aclosing(_look(directory)) as events:
            async for event in events:
                if type(event) not in seen:
                    seen.add(type(event))
                    pause = _FIRST_PAUSE_S
                    yield event
                if isinstance(event, Exited | Lost | Missing):
                    return  # the shim may stay for a slow reader
        # The shim lives but does not answer: it is about to listen or to end.
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


async def stop(directory: Path, reason: str, grace: timedelta) -> bool:
    """Send SIGTERM to all processes of the worker, and SIGKILL after `grace`.

    Another call may shorten the grace. Return False if there is no shim to do so.
    """
    content = {"reason": reason, "grace_s": grace.total_seconds()}
    return await _command(directory, FrameKind.STOP, content)


async def set_time_limit(directory: Path, limit: timedelta | None) -> bool:
    """Let the worker run for `limit` from its start, instead of the limit of its launch.

    Return False if there is no shim to do so.
    """
    content = {"time_limit_s": None if limit is None else limit.total_seconds()}
    return await _command(directory, FrameKind.TIME_LIMIT, content)


async def notify(directory: Path, text: str) -> bool:
    """Write a line to the job's output, possibly twice if the confirmation is lost.

    Return False if there is no shim to do so.
    """
    return await _command(directory, FrameKind.NOTICE, {"text": text})


async def _look(directory: Path) -> AsyncGenerator[ShimEvent, None]:
    """Yield the events in the record, then those that the shim sends."""
    found = read_with_life(directory)
    if found is None:
        yield Missing()
        return
    record, alive = found
    for event in _recorded(record):
        yield event
    if record.exited is not None:
        return
    if not alive:
        yield Lost()
        return
    async with contextlib.aclosing(_listen(directory)) as events:
        async for event in events:
            yield event


def _recorded(record: Record) -> list[ShimEvent]:
    stopping = Stopping(record.stopping) if record.stopping is not None else None
    # The end of the main process is an event only while other processes are left.
    main_exited = record.main_exited if record.exited is None else None
    events = (record.started, stopping, main_exited, record.exited)
    return [event for event in events if event is not None]


@contextlib.asynccontextmanager
async def _connection(
    directory: Path,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to the shim with the role that may control it.

    Raises:
        OSError: the shim does not listen yet, or no longer.
    """
    # Through a descriptor: the path may be too long for the address of a socket.
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{fd}/socket")
    finally:
        os.close(fd)
    try:
        writer.write(frame(FrameKind.HELLO, b'{"role": "control"}'))
        yield reader, writer
    finally:
        writer.close()


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[FrameKind, bytes]]:
    frames = FrameReader()
    while piece := await reader.read(_PIECE):
        for kind, payload in frames.feed(piece):
            yield kind, payload


async def _listen(directory: Path) -> AsyncGenerator[ShimEvent, None]:
    with contextlib.suppress(OSError, BadFrame):
        async with _connection(directory) as (reader, _):
            async for kind, payload in _frames(reader):
                if (read := _READERS.get(kind)) is not None:
                    yield read(json.loads(payload))


_READERS: dict[FrameKind, Callable[[dict[str, Any]], ShimEvent]] = {
    FrameKind.STARTED: started,
    FrameKind.STOPPING: lambda content: Stopping(content["reason"]),
    FrameKind.MAIN_EXITED: main_exited,
    FrameKind.EXITED: exited,
}


async def _command(directory: Path, kind: FrameKind, content: dict[str, Any]) -> bool:
    """Send a command until the shim confirms it; False if there is no shim left."""
    pause = _FIRST_PAUSE_S
    while is_alive(directory):
        record = read_record(directory)
        if record is not None and record.exited is not None:
            return False
        if await _sent(directory, frame(kind, json.dumps(content).encode())):
            return True
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return False


async def _sent(directory: Path, command: bytes) -> bool:
    """Send a command and return whether the shim has read it: then it closes without an error."""
    with contextlib.suppress(OSError, BadFrame):
        async with _connection(directory) as (reader, writer):
            writer.write(command)
            writer.write_eof()
            kinds = [kind async for kind, _ in _frames(reader)]
            return FrameKind.REFUSED not in kinds
    return False


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CLOCK_SLACK_S = 2.0
"""The kernel reports the time of boot in whole seconds."""
_SCOPE = "scope"
"""An empty file. Without it, a scope of this name may belong to another daemon."""


def note_scope(directory: Path) -> None:
    """Record that the shim was put into a scope. Raises OSError on a full disk."""
    (directory / _SCOPE).touch(mode=0o600)


def has_scope(directory: Path) -> bool:
    """Return whether this daemon put the shim into a scope."""
    return (directory / _SCOPE).exists()


def living_shim(directory: Path) -> Entry | None:
    """Return the shim of a job that has not ended, or None."""
    record = read_record(directory)
    if record is None or record.exited is not None or not is_alive(directory):
        return None
    pid = record.started.shim_pid if record.started else record.claimed_by
    return None if pid is None else entry(pid)


def system_started_at() -> float:
    """Return when this system booted, in seconds since the epoch; in a container, when it started.

    The boot time in /proc/stat is the host's, in whole seconds, while process 1 is the container's.
    """
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    first = entry(1)  # not visible to a user where /proc has hidepid
    return booted_at + (0 if first is None else first.started / _TICKS_PER_S)


def session_of(directory: Path) -> int | None:
    """Return the session that the shim led, if it started after the machine's last boot."""
    record = read_record(directory)
    if record is None or record.started is None:
        return None
    started = record.started
    return started.shim_pid if started.started_at.timestamp() > system_started_at() else None


def has_living_shim(directory: Path, job: Job | None) -> bool:
    """Return whether the shim of a job lives, even if the job's directory is missing."""
    if is_alive(directory):
        return True
    return job is not None and read_record(directory) is None and shim_on_record(job) is not None


def shim_on_record(job: Job) -> Entry | None:
    """Return the shim of `job` by its pid in the database, or None if it has ended.

    The shim starts before the job's command. A later process with the same pid starts after it.
    """
    if job.shim_pid is None or job.started_at is None:
        return None
    found = entry(job.shim_pid)
    if found is None or found.zombie or real_uid(found.pid) != job.owner.uid:
        return None
    started_at_s = psutil.boot_time() + found.started / _TICKS_PER_S
    return found if started_at_s <= job.started_at.timestamp() + _CLOCK_SLACK_S else None


def session_on_record(job: Job) -> int | None:
    """Return the session that the shim of `job` led, if the job started after the last boot."""
    if job.started_at is None or job.started_at.timestamp() <= system_started_at():
        return None
    return job.shim_pid
