"""Submitting a job, following it to its start in the same reply, and what a job inherits from the
process that submits it, besides directory and environment.
"""

from __future__ import annotations

import os
import resource

from gpulease.client.light_client import read, written
from gpulease.client.transport import LONGEST_SILENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpulease.client.transport import Reply, Transport
    from gpulease.wire.jobs import JobView
    from gpulease.wire.requests import SubmitRequest


def submit(daemon: Transport, request: SubmitRequest) -> JobView:
    """Queue a job; when this returns, the job is on the daemon's disk.

    Raises what `Client.submit` raises.
    """
    job: JobView = read(daemon.submit("/jobs", written(request)))
    return job


class Submission:
    """A job that is queued and followed by one request."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon
        self._reply: Reply | None = None
        self._lines: Iterator[bytes] = iter(())

    def submit(self, request: SubmitRequest, meanwhile: Callable[[], None]) -> JobView:
        """Queue a job; when this returns, the job is on the daemon's disk.

        `meanwhile` is called once the request is sent. Raises what `Client.submit` raises.
        """

        def begin(daemon: Transport) -> JobView:
            self._reply = daemon.open(
                "POST", "/jobs", {"follow": "true"}, body, daemon.answer_within, meanwhile
            )
            self._lines = self._reply.lines()
            job: JobView = read(next(self._lines))
            return job

        body = written(request)
        job = self._daemon.submitted(body, begin)
        assert self._reply is not None
        self._reply.settimeout(LONGEST_SILENCE)
        return job

    def changes(self) -> Iterator[JobView]:
        """Yield the job at its changes, until it has started or ended.

        The stream ends sooner if the user has too many of them, or the daemon is an older one.

        Raises:
            AnswerLost: the connection was lost.
        """
        last: JobView | None = None
        for line in self._lines:
            last = read(line) if line else last
            if last is not None:
                yield last


def umask() -> int:
    """Return the file mode creation mask."""
    # No system call reads the mask without setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def soft_limits() -> dict[str, int]:
    """Return the soft resource limits by the names of resource.RLIMIT_*; -1 is unlimited."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name))[0] for name in names}
