"""What a shim and its worker are told, and how it is written into the request.

A request is two lines of JSON: a short one for the shim, and one for the worker with the
environment, which the shim never reads, so that it stays small and holds no one's secrets.
Strings may hold bytes that are not UTF-8, as surrogate escapes (PEP 383); JSON keeps them.
"""

import json
import os
from collections.abc import Iterable
from typing import NamedTuple

LARGEST_REQUEST = 32 << 20
_PIECE = 16 << 10


class IdentitySpec(NamedTuple):
    """Whom to become."""

    uid: int
    gid: int
    user: str
    groups: tuple[int, ...] | None
    """None: those that the user database gives."""


class TerminalSpec(NamedTuple):
    """The pseudo-terminal that a worker gets."""

    rows: int
    columns: int
    attributes: tuple[int, ...] | None
    """As termios(3) has them: iflag, oflag, cflag, lflag, ispeed, ospeed, then the control
    characters; None: those of the system."""
    stderr: bool
    """Whether standard error is the terminal as well; otherwise it is a pipe of its own."""


class EarlySignalSpec(NamedTuple):
    """A signal for the main process, so long before its time is over."""

    signal: int
    before_s: float


class ShimSpec(NamedTuple):
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


class WorkerSpec(NamedTuple):
    """The worker's part of a launch."""

    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    umask: int
    soft_limits: dict[str, int]
    nice: int


def pack(shim: ShimSpec, worker: WorkerSpec) -> bytes:
    """Write a request."""
    return json.dumps(shim).encode() + b"\n" + json.dumps(worker).encode()


def read_shim_spec(request: int) -> ShimSpec:
    """Read the shim's part of the request that is open as `request`."""
    order = ShimSpec(*json.loads(_first_line(request)))
    return order._replace(
        identity=None if order.identity is None else _identity(*order.identity),
        terminal=None if order.terminal is None else _terminal(*order.terminal),
        early_signal=None if order.early_signal is None else EarlySignalSpec(*order.early_signal),
    )


def _first_line(request: int) -> bytes:
    """Read by pieces: mostly the first is all of it, but a user may be in thousands of groups."""
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
    text = os.pread(request, os.fstat(request).st_size, 0)
    return WorkerSpec(*json.loads(text.partition(b"\n")[2]))
