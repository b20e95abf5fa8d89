"""The format of a launch request: what a shim and its worker need to know.

A request is a line of JSON for the shim, a line of JSON for the worker, and then the worker's
strings, each followed by NUL: directory, arguments, environment. The shim reads its worker's part
as the user, and forgets it when the worker is forked.
"""

from __future__ import annotations

import os

from gpulease.light_json import decode_plain, encode
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST_REQUEST = 32 << 20
_PIECE = 16 << 10


@record(frozen=True)
class IdentitySpec:
    """The user to become."""

    uid: int
    gid: int
    user: str
    groups: Sequence[int] | None
    """None: the groups in the user database, and `gid`."""


@record(frozen=True)
class TerminalSpec:
    """The pseudo-terminal of a worker."""

    rows: int
    columns: int
    attributes: Sequence[int] | None
    """As in termios(3): iflag, oflag, cflag, lflag, ispeed, ospeed, then the control characters.
    None: the defaults of the system."""
    stderr: bool
    """Whether standard error is the terminal as well. Otherwise it is a pipe."""


@record(frozen=True)
class EarlySignalSpec:
    """A signal for the main process, this long before the time limit."""

    signal: int
    before_s: float


@record(frozen=True)
class ShimSpec:
    """The shim's part of a launch."""

    job: int
    directory: str
    """It exists and belongs to the daemon's user, and nothing was launched in it before."""
    identity: IdentitySpec | None
    """None: the user of the daemon."""
    stdin: bool
    """Whether the worker reads from the attached client, and not from /dev/null."""
    awaits_attach: bool
    """Whether output is held for a few seconds for the first client that attaches."""
    time_limit_s: float | None
    grace_s: float
    """Between SIGTERM and SIGKILL at the time limit."""
    log_limit: int
    """Bytes of each log."""
    terminal: TerminalSpec | None = None
    """None: pipes."""
    early_signal: EarlySignalSpec | None = None
    keep_free: int = 0
    """Bytes of the disk that the logs leave free."""
    ends_with_client: bool = False
    """Stop the worker when the attached client exits or is killed; it needs a time limit."""
    cores: Sequence[int] = ()
    """The CPUs that the worker runs on; empty for all."""
    ram: int | None = None
    """Leased bytes of RAM; None without such a lease."""
    ram_grace_s: float | None = None
    """How long the job may use more where no cgroup limits it; None: it only gets notices."""


@record(frozen=True)
class WorkerSpec:
    """The worker's part of a launch."""

    argv: tuple[bytes, ...]
    cwd: bytes
    environment: dict[bytes, bytes]
    umask: int
    soft_limits: dict[str, int]
    """By name, such as "RLIMIT_NOFILE" or "nofile". Below 0 is unlimited."""
    nice: int


def pack(shim: ShimSpec, worker: WorkerSpec) -> bytes:
    """Write a request."""
    numbers = [worker.umask, worker.soft_limits, worker.nice, len(worker.argv)]
    variables = map(b"=".join, worker.environment.items())
    strings = (worker.cwd, *worker.argv, *variables, b"")
    lines = encode(shim), encode(numbers), b"\0".join(strings)
    return b"\n".join(lines)


def read_shim_spec(request: int) -> ShimSpec:
    """Read the shim's part of the request that is open as `request`."""
    text = b""
    # One piece is usually enough, but a user may be in thousands of groups.
    while b"\n" not in text and (piece := os.pread(request, _PIECE, len(text))):
        text += piece
    fields = decode_plain(text.partition(b"\n")[0])
    parts = {"identity": IdentitySpec, "terminal": TerminalSpec, "early_signal": EarlySignalSpec}
    for name, kind in parts.items():
        if fields[name] is not None:
            fields[name] = kind(**fields[name])
    return ShimSpec(**fields)


def read_worker_spec(request: int) -> WorkerSpec:
    """Read the worker's part of the request that is open as `request`."""
    _, numbers, text = os.pread(request, os.fstat(request).st_size, 0).split(b"\n", 2)
    umask, soft_limits, nice, count = decode_plain(numbers)
    cwd, *strings = text.split(b"\0")[:-1]
    variables = (variable.partition(b"=") for variable in strings[count:])
    environment = {name: value for name, _, value in variables}
    return WorkerSpec(tuple(strings[:count]), cwd, environment, umask, soft_limits, nice)
