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
    from collections.abc import Iterable

LARGEST_REQUEST = 32 << 20
_PIECE = 16 << 10


@record(frozen=True)
class IdentitySpec:
    """The user to become."""

    uid: int
    gid: int
    user: str
    groups: tuple[int, ...] | None
    """None: the groups in the user database."""


@record(frozen=True)
class TerminalSpec:
    """The pseudo-terminal of a worker."""

    rows: int
    columns: int
    attributes: tuple[int, ...] | None
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
    identity: IdentitySpec | None
    stdin: bool
    awaits_attach: bool
    time_limit_s: float | None
    grace_s: float
    log_limit: int
    terminal: TerminalSpec | None = None
    early_signal: EarlySignalSpec | None = None
    keep_free: int = 0
    """Bytes of the disk that the logs leave free."""
    ends_with_client: bool = False
    """Stop the worker when the attached client exits or is killed."""


@record(frozen=True)
class WorkerSpec:
    """The worker's part of a launch."""

    argv: tuple[bytes, ...]
    cwd: bytes
    environment: dict[bytes, bytes]
    umask: int
    soft_limits: dict[str, int]
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
    fields = decode_plain(_first_line(request))
    identity, terminal, early = fields["identity"], fields["terminal"], fields["early_signal"]
    fields["identity"] = None if identity is None else _identity(**identity)
    fields["terminal"] = None if terminal is None else _terminal(**terminal)
    fields["early_signal"] = None if early is None else EarlySignalSpec(**early)
    return ShimSpec(**fields)


def _first_line(request: int) -> bytes:
    """Read in pieces. One is usually enough, but a user may be in thousands of groups."""
    text = b""
    while b"\n" not in text and (piece := os.pread(request, _PIECE, len(text))):
        text += piece
    return text.partition(b"\n")[0]


def _identity(uid: int, gid: int, user: str, groups: Iterable[int] | None) -> IdentitySpec:
    return IdentitySpec(uid, gid, user, None if groups is None else tuple(groups))


def _terminal(
    rows: int, columns: int, attributes: Iterable[int] | None, stderr: bool
) -> TerminalSpec:
    return TerminalSpec(rows, columns, None if attributes is None else tuple(attributes), stderr)


def read_worker_spec(request: int) -> WorkerSpec:
    """Read the worker's part of the request that is open as `request`."""
    _, numbers, text = os.pread(request, os.fstat(request).st_size, 0).split(b"\n", 2)
    umask, soft_limits, nice, count = decode_plain(numbers)
    cwd, *strings = text.split(b"\0")[:-1]
    variables = (variable.partition(b"=") for variable in strings[count:])
    environment = {name: value for name, _, value in variables}
    return WorkerSpec(tuple(strings[:count]), cwd, environment, umask, soft_limits, nice)
