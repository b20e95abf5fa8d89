"""Asking a real daemon by the client, for what the command is not the subject of."""

import os
import socket
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from daemon_rig import PATIENCE_S, Daemon, wait_for
from gpulease.client import Client
from gpulease.wire.jobs import JobView
from gpulease.wire.requests import ClaimRequest, HoldRequest, SubmitRequest, to_wire

G = 1 << 30


class UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("gpulease", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def raw(daemon: Daemon, method: str, target: str, body: bytes | str | None = None) -> Any:
    """Return the status and the content of an answer to a request that no client would send."""
    with closing(UnixConnection(daemon.socket)) as connection:
        connection.request(method, target, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()


def client(daemon: Daemon) -> Client:
    """Return a client of `daemon`."""
    return Client(daemon.socket)


def variables() -> dict[str, str]:
    """Return the environment of this process as the wire has it."""
    return {to_wire(name): to_wire(value) for name, value in os.environ.items()}


def submit(daemon: Daemon, *argv: str, memory: int = G, **fields: Any) -> int:
    """Queue a job of `argv`; `time_limit` and `gpus` go into its claim."""
    claim = ClaimRequest(
        memory=memory, gpus=fields.pop("gpus", 1), time_limit=fields.pop("time_limit", None)
    )
    request = SubmitRequest(list(argv), "/", variables(), claim=claim, **fields)
    return client(daemon).submit(request).id


def hold(
    daemon: Daemon, pid: int | None, *, memory: int = G, time_limit: float | None = None
) -> int:
    """Queue a lease for the process `pid`, asked for by this one."""
    request = HoldRequest(variables(), pid, ClaimRequest(memory=memory, time_limit=time_limit))
    return client(daemon).hold(request).id


def when(daemon: Daemon, job: int, what: str, true: Callable[[JobView], object]) -> JobView:
    """Return the job as soon as something is true of it."""

    def look() -> JobView | None:
        shown = client(daemon).job(job)
        return shown if true(shown) else None

    return wait_for(f"job {job}: {what}", look)


def when_in(daemon: Daemon, job: int, state: str) -> JobView:
    """Return the job as soon as it is in `state`."""
    return when(daemon, job, state, lambda shown: shown.state == state)


def leased(daemon: Daemon) -> int:
    """Return how many bytes are leased on all GPUs."""
    return sum(gpu.memory.leased for gpu in client(daemon).status().gpus)
