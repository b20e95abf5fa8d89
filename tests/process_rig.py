"""What the tests of shims and launches share: a launch, its end, and a peer on its socket."""

import asyncio
import json
import os
import pwd
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from gpulease.domain.gpu import GpuUuid
from gpulease.domain.job import Invocation
from gpulease.host.launch import Launch, SandboxSpec
from gpulease.host.launcher import Launcher, Started
from gpulease.host.scopes import Scope
from gpulease.host.shim_control import Exited, ShimEvent, follow, stop
from gpulease.shim.launch_request import IdentitySpec, ShimSpec
from gpulease.shim.process_tree import Entry
from gpulease.shim.record import is_alive, read_record
from gpulease.wire.frames import KINDS, FrameKind, FrameReader, frame

PATIENCE_S = 120.0
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else "python3"
"""An interpreter that every user can reach, which a virtual environment's may not be."""
PATH = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
READ_STAT = "read -r pid _ _ _ pgid sid _ tpgid _ < /proc/$$/stat"
"""Sets variables of a shell to its own ids, as of proc(5); some machines have no ps."""
T = TypeVar("T")


@contextmanager
def ephemeral_user() -> Iterator[pwd.struct_passwd]:
    """Make a user of this machine, and remove it again; needs root."""
    name = f"gltest_{secrets.token_hex(4)}"
    # Above those that useradd chooses, the gid is the uid: tests count on that.
    uid = 20_000 + secrets.randbelow(25_000)
    subprocess.run(
        ["useradd", "--no-create-home", "--user-group", "--uid", str(uid), name], check=True
    )
    try:
        yield pwd.getpwnam(name)
    finally:
        subprocess.run(["userdel", "--force", name], check=True, capture_output=True)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end, which has to come in time."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await coroutine

    return asyncio.run(bounded())


def wait_until(condition: Callable[[], T], what: str = "the condition") -> T:
    """Return what `condition` returns once that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (met := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.005)
    return met


@contextmanager
def job_directory() -> Iterator[Path]:
    """Make a directory as the daemon does, that others may pass; no shim is left in it."""
    with tempfile.TemporaryDirectory(prefix="gpulease-job-", dir="/tmp") as parent:
        Path(parent).chmod(0o711)
        directory = Path(parent, "17")
        directory.mkdir(mode=0o711)
        try:
            yield directory
        finally:
            end_shim(directory)


def end_shim(directory: Path) -> None:
    """Kill what is left of a launch."""
    if is_alive(directory):
        run(stop(directory, "test over", timedelta(0)))
        wait_until(lambda: not is_alive(directory), "the end of the shim")
    record = read_record(directory)
    if record is not None and record.started is not None:
        end_session(record.started.shim_pid)


def end_session(leader: int) -> None:
    """Kill what a worker left behind whose shim, which led the session, was killed."""
    for pid in [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]:
        with suppress(OSError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def launch_of(
    directory: Path,
    *argv: str,
    job: int = 17,
    cwd: str = "/",
    environment: Mapping[str, str] = PATH,
    umask: int = 0o022,
    soft_limits: Mapping[str, int] | None = None,
    nice: int = 0,
    memory: Mapping[GpuUuid, int] | None = None,
    time_limit: timedelta | None = None,
    grace: timedelta = timedelta(seconds=30),
    **shim: Any,
) -> Launch:
    """Return a plain launch, but for what is given."""
    usual: dict[str, Any] = {
        "identity": None,
        "stdin": False,
        "awaits_attach": False,
        "log_limit": 64 << 20,
        **shim,
    }
    return Launch(
        ShimSpec(
            job=job,
            directory=str(directory),
            time_limit_s=time_limit and time_limit.total_seconds(),
            grace_s=grace.total_seconds(),
            **usual,
        ),
        Invocation(argv, cwd, environment, umask, soft_limits or {}, nice),
        SandboxSpec(Scope(job, "alice", grace), memory or {}, lambda limits, alone: environment),
    )


def user_identity(user: pwd.struct_passwd, groups: tuple[int, ...] | None = None) -> IdentitySpec:
    """Return whom to become to be a user."""
    return IdentitySpec(user.pw_uid, user.pw_gid, user.pw_name, groups)


def shell(directory: Path, script: str, **changes: Any) -> Launch:
    """Return the launch of a shell script."""
    return launch_of(directory, "/bin/sh", "-c", script, **changes)


def python(directory: Path, program: str, **changes: Any) -> Launch:
    """Return the launch of a Python program."""
    return launch_of(directory, PYTHON, "-c", program, **changes)


async def launched(launch: Launch) -> Started:
    """Launch through a launcher that is gone afterwards, as after a restart of the daemon."""
    launcher = Launcher()
    try:
        return await launcher.launch(launch)
    finally:
        await launcher.close()


def start(launch: Launch) -> Started:
    """Launch, and wait for the start."""
    return run(launched(launch))


async def events_of(directory: Path) -> list[ShimEvent]:
    """Return all that happens to the worker after its start."""
    return [event async for event in follow(directory) if not isinstance(event, Started)]


def end(directory: Path) -> Exited:
    """Wait for the end of a worker, which has to be a proper one."""
    last = run(events_of(directory))[-1]
    assert isinstance(last, Exited), last
    return last


def finish(launch: Launch) -> Exited:
    """Launch, and wait for the end."""
    start(launch)
    return end(Path(launch.shim.directory))


def output(directory: Path) -> str:
    """Return what the worker has written to its standard output."""
    return (directory / "stdout").read_text()


def is_running(pid: int) -> bool:
    """Tell whether there is such a process, and it is no zombie."""
    try:
        return state(pid) not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def state(pid: int) -> str:
    """Return the state of a process, one letter."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Client:
    """A peer on a job's socket, that does exactly what it is told."""

    def __init__(self, directory: Path, role: str | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        fd = os.open(directory, os.O_PATH)
        try:
            # Blocking: with a time-out, a connect to a busy listener fails at once.
            self.socket.connect(f"/proc/self/fd/{fd}/socket")
        finally:
            os.close(fd)
        self.socket.settimeout(PATIENCE_S)
        self._frames = FrameReader()
        self._ready: list[tuple[FrameKind, bytes]] = []
        if role is not None:
            self.send(FrameKind.HELLO, role=role)

    def send(self, kind: FrameKind, payload: bytes = b"", **content: Any) -> None:
        """Send a frame, with bytes or JSON."""
        self.socket.sendall(frame(kind, json.dumps(content).encode() if content else payload))

    def next(self) -> tuple[FrameKind, bytes] | None:
        """Return the next frame, or None when the shim has closed."""
        while not self._ready:
            piece = self.socket.recv(1 << 16)
            if not piece:
                return None
            self._ready += self._frames.feed(piece)
        return self._ready.pop(0)

    def until(self, kind: FrameKind) -> bytes:
        """Skip frames until one of this kind, and return its payload."""
        while (got := self.next()) is not None:
            if got[0] is kind:
                return got[1]
        raise AssertionError(f"the shim closed before {kind}")

    def read(self, size: int) -> bytes:
        """Return so many bytes of standard output."""
        data = b""
        while len(data) < size:
            data += self.until(FrameKind.STDOUT)
        return data

    def read_until(self, what: bytes) -> bytes:
        """Return what is shown until `what` is."""
        seen = b""
        while what not in seen:
            seen += self.until(FrameKind.STDOUT)
        return seen

    def collect(self) -> dict[FrameKind, bytes]:
        """Return all that comes until EXITED, joined by kind."""
        joined: dict[int, bytearray] = {kind: bytearray() for kind in KINDS}
        while not joined[FrameKind.EXITED]:
            seen = self.next()
            assert seen is not None, "the shim closed before EXITED"
            joined[seen[0]] += seen[1]
        return {kind: bytes(data) for kind, data in joined.items()}

    def is_closed(self) -> bool:
        """Wait for the shim to close this connection."""
        try:
            while self.next() is not None:
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kill(pid: int) -> None:
    """Kill a process and wait until it has gone."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), f"the end of process {pid}")


def pids(found: Iterable[Entry]) -> set[int]:
    """Return the pids of processes."""
    return {each.pid for each in found}
