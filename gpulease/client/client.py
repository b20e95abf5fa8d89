"""The typed client of the daemon's API: one method for each route, over a Unix socket.

It knows the routes and the wire shapes. It must not know the terminal.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from gpulease import config, wire
from gpulease.client.codec import decode, encode
from gpulease.client.discovery import find
from gpulease.client.http import quoted
from gpulease.client.light_client import LightClient, query_of
from gpulease.client.transport import ANSWER_WITHIN, Transport, new_key
from gpulease.client.unix_socket import trusted_users
from gpulease.wire.frames import FrameKind
from gpulease.wire.history import SOME_POINTS, GpuHistoryView, JobMemoryView
from gpulease.wire.jobs import (
    JobView,
)
from gpulease.wire.machine import (
    DoctorView,
)
from gpulease.wire.metrics import MetricsView
from gpulease.wire.notifications import NotifyTestView
from gpulease.wire.requests import (
    AdoptRequest,
    SubmitRequest,
)
from gpulease.wire.usage import HistoryView, ReportView, SharesView

_STREAMS = IntEnum("_STREAMS", {"STDOUT": FrameKind.STDOUT, "STDERR": FrameKind.STDERR})
"""The kinds of frames that `logs` yields: elsewhere they are plain numbers."""
_MANY_WITHIN = 120.0
"""Timeout in seconds for a request that changes many jobs."""
_TEST_WITHIN = 60.0
"""Timeout in seconds for a test message; its sender is ended sooner."""


class Client(LightClient):
    """A client of one daemon; each call opens a connection.

    Every method raises `NoDaemon` if nothing answers, otherwise the error that the daemon replied
    with. Sizes are bytes, spans seconds, instants ISO 8601
    in UTC; arguments, paths and variables of jobs are one character per byte, as `to_wire`
    writes them.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        trusted: frozenset[int] | None = None,
        answer_within: float = ANSWER_WITHIN,
    ) -> None:
        """Create a client of the daemon on the socket `path`.

        Without a path, the daemon is found as the command finds it: GPULEASE_SOCKET, the machine's
        (waiting while it restarts), or the user's own. It must belong to root or the user. No
        daemon is started.

        Args:
            path: the daemon's socket.
            trusted: the users that may listen on `path`; None: any, but requests with an
                environment are sent to a daemon of root or the caller only.
            answer_within: timeout of an answer in seconds.

        Raises:
            NoDaemon: no path was given, and no daemon answers.
        """
        if path is None:
            path, trusted = find(config.candidate_sockets(None)), trusted_users()
        super().__init__(Transport(path, trusted, answer_within))

    def _view(self, kind: str, body: bytes) -> Any:
        return decode(getattr(wire, kind), body)

    def _body(self, request: Any) -> bytes:
        """Return a request as JSON, a submission with a key by which its repetition is known."""
        has_key = getattr(request, "key", "") is not None
        return encode(request if has_key else replace(request, key=new_key()))

    def logs(self, number: int, **options: Any) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the kept output of a job, as `LightClient.logs`; each stream has a `name`."""
        for kind, piece in super().logs(number, **options):
            stream: Any = _STREAMS(kind)
            yield stream, piece

    def submit(self, request: SubmitRequest) -> JobView:
        """Queue a job; when this returns, the job is on the daemon's disk.

        If the answer is lost, the request is sent again under the same key, and no second job is
        queued.

        Raises:
            BadValue: a field is out of range.
            CannotLease: the claim can never be granted on this machine.
            NoRoomNow: it would have to wait, and `request.wait` is 0.
            TooLarge: the request exceeds what the daemon reads.
        """
        return decode(JobView, self._daemon.submit("/jobs", self._body(request)))

    def adopt(self, request: AdoptRequest) -> JobView:
        """Lease what a process already uses, for its owner; granted when this returns.

        Raises:
            BadValue: no such process.
            NotAllowed: it belongs to another user, and the caller is no admin.
            AlreadyLeased: it belongs to a job, or has a lease.
            WrongState: it uses no GPU, or the driver does not report how much.
            NoRoomNow: it does not fit beside other leases, or a GPU takes no leases.
        """
        return decode(JobView, self._daemon.submit("/adoptions", self._body(request)))

    def test_notification(self) -> NotifyTestView:
        """Send a test message to the receivers of this user, and return what happened at each."""
        patient = self._daemon.within(max(_TEST_WITHIN, self._daemon.answer_within))
        return decode(NotifyTestView, patient.ask("POST", "/notifications/test"))

    def doctor(self) -> DoctorView:
        """Return the daemon's checks of this machine."""
        return decode(DoctorView, self._daemon.ask("GET", "/doctor"))

    def metrics(self) -> MetricsView:
        """Return what the daemon counts since its start, and its own health."""
        return decode(MetricsView, self._daemon.ask("GET", "/metrics"))

    def report(
        self, user: str | None = None, since: float | None = None, by: str = "user"
    ) -> ReportView:
        """Return what the jobs of one or all users asked for and used, until now.

        Only jobs that ended in the last `since` seconds count. They are summed up by user, group,
        week or month.

        Raises:
            NotAllowed: it is about other users, and the admin hides what they run.
        """
        return decode(ReportView, self.report_json(user, since, by))

    def history(
        self,
        user: str | None = None,
        since: float | None = None,
        *,
        outcome: str | None = None,
        name: str | None = None,
        before: int | None = None,
        limit: int = 1000,
    ) -> HistoryView:
        """Return the latest ended jobs, the newest first.

        At most 1000, those with ids below `before`, that ended in the last `since` seconds; of one
        or all users; with one outcome, or "failed" for any end without success; with a name that
        matches a shell pattern. The reply says which follow.
        """
        reply = self.history_json(
            user=user, since=since, outcome=outcome, name=name, before=before, limit=limit
        )
        return decode(HistoryView, reply)

    def gpu_history(
        self, gpu: str, since: float = 3600.0, until: float = 0.0, points: int = SOME_POINTS
    ) -> GpuHistoryView:
        """Return the memory of a GPU, named as in `drain`, from `since` to `until` seconds ago.

        Args:
            gpu: its index, UUID or the beginning of the UUID.
            since: seconds ago.
            until: seconds ago.
            points: the most values in a series, 2 to 1000.

        Raises:
            NoSuchGpu: no GPU has this name, or several have.
            NoSuchRoute: the daemon is too old.
        """
        query = query_of({"since": since, "until": until, "points": points})
        target = f"/gpus/{quoted(gpu, safe=':')}/history"
        return decode(GpuHistoryView, self._daemon.ask("GET", target, query))

    def job_memory(
        self,
        number: int,
        points: int = SOME_POINTS,
        since: float | None = None,
        until: float | None = None,
    ) -> JobMemoryView:
        """Return the memory of a job on each of its GPUs, from its start to its end or now.

        Args:
            number: the job.
            points: the most values in a series, 2 to 1000.
            since: leave out what was so many seconds ago and earlier.
            until: leave out what is less than so many seconds ago.

        Raises:
            NoSuchJob: there is none.
            NoSuchRoute: the daemon is too old.
        """
        target = f"/jobs/{number}/memory"
        query = query_of({"points": points, "since": since, "until": until})
        return decode(JobMemoryView, self._daemon.ask("GET", target, query))

    def shares(self, since: float | None = None) -> SharesView:
        """Return what each user has used, holds and waits for, and whose turn that makes it.

        Waits are those of jobs that started in the last `since` seconds, by default a week.
        """
        return decode(SharesView, self.shares_json(since))


def checked(daemon: Transport) -> Client:
    """Return a client that has all requests and checks replies, for a light one's daemon."""
    return Client(Path(daemon.path), trusted=daemon.trusted)
