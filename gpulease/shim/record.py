"""The record of one launch: a file in the job's directory with the events of its worker.

The file has lines of JSON. Each is written by one call to space that was allocated at the start, so
the end can be written on a full disk. What must survive a crash of the machine is synced: that the
job was launched, and how it ended. The shim that creates the record
holds its lock as long as it lives: a locked record means a living shim. A record that exists means
that the job was launched once and never will be again. Daemon and shim share this module, which
knows nothing of sockets and signals.
"""

from __future__ import annotations

import fcntl
import os
import time
from errno import E2BIG, EAGAIN, ENOENT, ENOMEM, ENOSPC, ENOTDIR

from gpulease.light_json import decode_plain, encode
from gpulease.record import record, replace
from gpulease.shim.accounting import HostUse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from typing import Any

NAME = "record"
SIZE = 4096
"""Bytes of a record. The longest possible lines fit."""
EXEC = "exec"
"""The step of a launch in which the worker becomes the command."""


@record(frozen=True)
class Failure:
    """Why a launch failed, and at which step."""

    step: str
    errno: int | None
    message: str
    hint: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of a shell: 127 not found, 126 not executable, otherwise 125."""
        if self.step != EXEC or self.errno in (E2BIG, EAGAIN, ENOMEM, None):
            return 125
        return 127 if self.errno in (ENOENT, ENOTDIR) else 126


@record(frozen=True)
class Started:
    """The worker runs."""

    pid: int
    shim_pid: int
    started_at: datetime


@record(frozen=True)
class MainExited:
    """The main process has ended. Other processes of the worker may still run."""

    exit_code: int | None
    signal: int | None
    at: datetime


@record(frozen=True)
class Exited:
    """The last process of the worker has ended."""

    reason: str
    """"exited", "signaled", "launch_failed", or why it was stopped, such as "cancelled"."""
    exit_code: int | None
    signal: int | None
    ended_at: datetime
    main_exited_at: datetime | None = None
    failed: Failure | None = None
    terminated: bool = False
    """The shim got SIGTERM too, as all processes do at a shutdown."""
    host_use: HostUse = HostUse()
    interrupted: bool = False
    """A client has sent it a signal that ends programs, or typed Ctrl-C on its terminal."""


@record(frozen=True)
class Record:
    """The events of a launch. Each is None until it has happened."""

    started: Started | None = None
    stopping: str | None = None
    """Why the worker was asked to stop."""
    main_exited: MainExited | None = None
    exited: Exited | None = None
    claimed_by: int | None = None
    """The pid of the shim, which it wrote as root: the user cannot have changed it."""


def read_record(directory: str | os.PathLike[str]) -> Record | None:
    """Return the record in a job's directory, or None if the job was never launched."""
    try:
        fd = os.open(f"{os.fspath(directory)}/{NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return parse(os.pread(fd, SIZE, 0))
    finally:
        os.close(fd)


def is_alive(directory: str | os.PathLike[str]) -> bool:
    """Return whether the shim of the job in this directory lives."""
    try:
        fd = os.open(f"{os.fspath(directory)}/{NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not _can_lock(fd)
    finally:
        os.close(fd)


def read_with_life(directory: str | os.PathLike[str]) -> tuple[Record, bool] | None:
    """Return the record in a job's directory and whether its shim lives; None without a record.

    Both are read from one open file: the directory may be moved between two calls.
    """
    try:
        fd = os.open(f"{os.fspath(directory)}/{NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        # The lock first: if the shim was dead before the record was read, the record is final.
        is_dead = _can_lock(fd)
        return parse(os.pread(fd, SIZE, 0)), not is_dead
    finally:
        os.close(fd)


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def parse(text: bytes) -> Record:
    """Read a record. A line that a crash left incomplete, and all after it, are ignored."""
    record = Record()
    for line in text.partition(b"\0")[0].split(b"\n")[:-1]:
        try:
            record = _with(record, decode_plain(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            break
    return record


def exited(line: Mapping[str, Any]) -> Exited:
    """Read the end of the worker, as in the record and in the frame EXITED."""
    at, failed = line.get("main_exited_at"), line.get("failed")
    return Exited(
        reason=str(line["reason"]),
        exit_code=line.get("exit_code"),
        signal=line.get("signal"),
        ended_at=_instant(line["ended_at"]),
        main_exited_at=_instant(at) if at else None,
        failed=failure(failed) if failed else None,
        terminated=bool(line.get("terminated")),
        host_use=_host_use(line),
        interrupted=bool(line.get("interrupted")),
    )


def _host_use(line: Mapping[str, Any]) -> HostUse:
    peak, cpu_s, limit = line.get("ram_peak"), line.get("cpu_s"), line.get("ram_limit")
    return HostUse(
        None if peak is None else int(peak),
        None if cpu_s is None else float(cpu_s),
        int(line.get("oom_kills", 0)),
        None if limit is None else int(limit),
        bool(line.get("watched")),
    )


def main_exited(line: Mapping[str, Any]) -> MainExited:
    """Read the end of the main process, as in the record and in the frame MAIN_EXITED."""
    at = _instant(line["at"])
    return MainExited(line.get("exit_code"), line.get("signal"), at)


def started(line: Mapping[str, Any]) -> Started:
    """Read the start of the worker, as in the record and in the shim's report."""
    at = _instant(line["started_at"])
    return Started(int(line["pid"]), int(line["shim_pid"]), at)


def failure(line: Mapping[str, Any]) -> Failure:
    """Read why a launch failed, as in the record and in the shim's report."""
    return Failure(line["step"], line.get("errno"), line["message"], line.get("hint"))


def _instant(text: str) -> datetime:
    from datetime import datetime  # not in shims, which only write

    return datetime.fromisoformat(text)


def _with(record: Record, line: dict[str, Any]) -> Record:
    match line["event"]:
        case "claimed":
            return replace(record, claimed_by=int(line["shim_pid"]))
        case "started":
            return replace(record, started=started(line))
        case "stopping":
            return replace(record, stopping=str(line["reason"]))
        case "main_exited":
            return replace(record, main_exited=main_exited(line))
        case "exited":
            return replace(record, exited=exited(line))
        case _:
            return record


class RecordWriter:
    """The open and locked record of this shim. Its death unlocks the record, which others see."""

    def __init__(self, fd: int, end: int) -> None:
        """Append from the byte `end` on."""
        self._fd = fd
        self._end = end

    def append(self, *lines: Mapping[str, Any], sync: bool = True) -> None:
        """Write all of the lines or none, and return when they are on disk, unless not `sync`.

        Raises:
            OSError: the disk failed, or the record is full.
        """
        text = b"".join(encode(line) + b"\n" for line in lines)
        if self._end + len(text) > SIZE:
            raise OSError(ENOSPC, "the record is full")
        os.pwrite(self._fd, text, self._end)
        self._end += len(text)
        if sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Unlock the record: its shim then counts as dead."""
        os.close(self._fd)


def claim(directory: int, shim_pid: int | None = None) -> RecordWriter | None:
    """Create the record in the directory that is open as `directory`; None if there is one.

    The first line is the pid of the shim, if a shim creates it. The record is locked before it gets
    its name, so it is never seen unlocked while its shim lives. If several processes try at once,
    link(2) succeeds for exactly one.
    """
    private = f"{NAME}.{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(private, flags, 0o600, dir_fd=directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begin = _allocate(fd, shim_pid)
        os.link(private, NAME, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, FileExistsError):
            return None
        raise
    finally:
        os.unlink(private, dir_fd=directory)
    return RecordWriter(fd, begin)


def forbid(directory: str | os.PathLike[str]) -> bool:
    """Create a record that says cancelled, so that no launch can follow; False if there is one.

    A shim that an earlier daemon started may be about to launch the job.

    Raises:
        OSError: the record cannot be written.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        record = claim(fd)
    finally:
        os.close(fd)
    if record is None:
        return False
    try:
        record.append({"event": "exited", "reason": "cancelled", "ended_at": now()})
    finally:
        record.close()
    return True


def _allocate(fd: int, shim_pid: int | None) -> int:
    line = {"event": "claimed", "shim_pid": shim_pid}
    begin = b"" if shim_pid is None else encode(line) + b"\n"
    # Written and not only allocated, which works on file systems without fallocate. Nothing syncs
    # it: after a crash of the machine the name says that the job was launched, and that is all.
    os.pwrite(fd, begin.ljust(SIZE, b"\0"), 0)
    return len(begin)


class JobEvents:
    """The events of one worker, in memory and in the record. Each is None until it has happened.

    They are kept as they are written, so that clients get exactly the same.
    """

    def __init__(self, record: RecordWriter) -> None:
        self.started: dict[str, Any] | None = None
        self.stopping: dict[str, Any] | None = None
        self.main_exited: dict[str, Any] | None = None
        self.exited: dict[str, Any] | None = None
        self.stop_came_late = False
        """The command had ended by itself, with all of its processes, before SIGTERM was sent."""
        self.terminated = False
        """This shim got SIGTERM, which it ignores."""
        self.interrupted = False
        """A client has sent the worker a signal that ends programs, or typed its key."""
        self._record = record
        self._unwritten: list[Mapping[str, Any]] = []

    def note_start(self, pid: int) -> dict[str, Any]:
        """Note that the worker has become its command."""
        self.started = {"pid": pid, "shim_pid": os.getpid(), "started_at": now()}
        self._unwritten.append({"event": "started", **self.started})
        return self.started

    def note_stopping(self, reason: str) -> dict[str, Any]:
        """Note that the worker is being asked to stop."""
        self.stopping = {"reason": reason, "at": now()}
        self._unwritten.append({"event": "stopping", **self.stopping})
        return self.stopping

    def note_main_exit(self, code: int) -> dict[str, Any]:
        """Note that the main process has ended, with this code or, below 0, by this signal."""
        how = {"exit_code": code} if code >= 0 else {"signal": -code}
        self.main_exited = {**how, "at": now()}
        self._unwritten.append({"event": "main_exited", **self.main_exited})
        return self.main_exited

    def note_end(self, use: HostUse) -> dict[str, Any]:
        """Note that the last process has ended."""
        main = dict(self.main_exited or {})
        at = main.pop("at", None)
        usual = "signaled" if "signal" in main else "exited"
        stop = None if self.stop_came_late else self.stopping
        reason = stop["reason"] if stop else usual
        end = {"reason": reason, **main, "main_exited_at": at, "ended_at": now()}
        end |= {"terminated": True} if self.terminated else {}
        end |= {"interrupted": True} if self.interrupted else {}
        known = {name: value for name, value in vars(use).items() if value}
        return self._end({**end, **known})

    def note_failure(self, failure: Failure) -> dict[str, Any]:
        """Note that the worker did not become its command."""
        failed = vars(failure) | {"message": failure.message[:1000]}
        failed["hint"] = failure.hint and failure.hint[:500]
        end = {"reason": "launch_failed", "exit_code": failure.exit_code, "ended_at": now()}
        return self._end({**end, "failed": failed})

    def write(self, sync: bool = True) -> None:
        """Write the events that are not in the record yet, to the disk unless not `sync`."""
        lines, self._unwritten = self._unwritten, []
        try:
            if lines:
                self._record.append(*lines, sync=sync)
        except OSError:
            return  # the worker continues, and the clients still get the event

    def _end(self, end: dict[str, Any]) -> dict[str, Any]:
        self.exited = end
        self._unwritten.append({"event": "exited", **end})
        return end


def now() -> str:
    """Return this instant as ISO 8601 in UTC."""
    milliseconds = time.time_ns() // 1_000_000
    year, month, day, hour, minute, second, *_ = time.gmtime(milliseconds // 1000)
    clock = f"{hour:02}:{minute:02}:{second:02}.{milliseconds % 1000:03}"
    return f"{year}-{month:02}-{day:02}T{clock}Z"
