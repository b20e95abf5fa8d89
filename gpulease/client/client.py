"""The typed client of the daemon's API: one method for each route, over a Unix socket.

It knows the routes and the wire shapes. It must not know the terminal.
"""

from collections.abc import Iterator, Sequence
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
from gpulease.errors import NoSuchRoute
from gpulease.wire.frames import FrameKind
from gpulease.wire.history import SOME_POINTS, GpuHistoryView, JobMemoryView
from gpulease.wire.jobs import (
    CancelledView,
    EditedView,
    EnvironmentView,
    JobView,
    NestedView,
)
from gpulease.wire.machine import (
    DoctorView,
    GpuAvailabilityView,
    PauseChangeView,
    WindowList,
    WindowView,
)
from gpulease.wire.metrics import MetricsView
from gpulease.wire.notifications import NotifyTestView
from gpulease.wire.requests import (
    AdoptRequest,
    CancelJobsRequest,
    DrainRequest,
    EditRequest,
    HoldRequest,
    KeepRequest,
    MoveRequest,
    NestedRequest,
    PauseRequest,
    ReserveRequest,
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
        return decode(JobView, self._daemon.submit("/jobs", _with_key(request)))

    def hold(self, request: HoldRequest) -> JobView:
        """Queue a lease without a job; when this returns, it is on the daemon's disk.

        It leaves the queue if this process ends. Once granted (see `watch`), it is held until the
        process `request.pid` ends, its time is over, or `cancel` releases it.

        Raises:
            BadValue: no such process, or neither a process nor a time limit is given.
            NotAllowed: the process belongs to another user.
            CannotLease: the claim can never be granted on this machine.
            NoRoomNow: it would have to wait, and `request.wait` is 0.
            TooLarge: the request exceeds what the daemon reads.
        """
        return decode(JobView, self._daemon.submit("/holds", _with_key(request)))

    def adopt(self, request: AdoptRequest) -> JobView:
        """Lease what a process already uses, for its owner; granted when this returns.

        Raises:
            BadValue: no such process.
            NotAllowed: it belongs to another user, and the caller is no admin.
            AlreadyLeased: it belongs to a job, or has a lease.
            WrongState: it uses no GPU, or the driver does not report how much.
            NoRoomNow: it does not fit beside other leases, or a GPU takes no leases.
        """
        return decode(JobView, self._daemon.submit("/adoptions", _with_key(request)))

    def nested(self, request: NestedRequest) -> NestedView | None:
        """Return the job under whose lease this process runs, and the requested part of it.

        None: it runs under none, or the daemon is too old to tell.

        Raises:
            BadValue: a field is out of range.
            AlreadyLeased: the request exceeds what the job has.
        """
        try:
            found = decode(NestedView, self._daemon.post_until_answered("/nested", encode(request)))
        except NoSuchRoute:
            return None
        return None if found.job is None else found

    def environment(self, number: int) -> EnvironmentView:
        """Return what a lease changes in the environment of its holder.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it is not granted yet, or has ended.
        """
        reply = self._daemon.ask("GET", f"/jobs/{number}/environment")
        return decode(EnvironmentView, reply)

    def keep(self, number: int, span: float | None = None) -> JobView:
        """Allow a job to be idle for `span` seconds, by default an hour, and return it.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it waits, has ended, or is ending.
            BadValue: that is longer than a day.
        """
        body = encode(KeepRequest(span))
        return decode(JobView, self._daemon.ask("POST", f"/jobs/{number}/keep", body=body))

    def cancel_all(self, request: CancelJobsRequest) -> CancelledView:
        """Cancel many jobs in one transaction; those that have ended are left out.

        Raises:
            NotAllowed: they belong to another user, and the caller is not an admin.
        """
        return decode(CancelledView, self._change_many("/jobs/cancel", request))

    def requeue(self, number: int) -> JobView:
        """Stop a running job, have it queued again when it has ended, and return it.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it is queued, is ending, or has ended.
        """
        return decode(JobView, self._daemon.ask("POST", f"/jobs/{number}/requeue"))

    def edit(self, request: EditRequest) -> EditedView:
        """Change waiting jobs, all of them or none; they keep their age.

        Raises:
            NoSuchJob: one of them does not exist.
            NotAllowed: one of them belongs to another user, or only admins may ask for that.
            WrongState: one of them does not wait.
            CannotLease: the new claim can never be granted on this machine.
            BadValue: a value is out of range, or a job would wait for itself.
        """
        return decode(EditedView, self._change_many("/jobs/edit", request))

    def move(self, numbers: Sequence[int], before: int | None = None) -> EditedView:
        """Move waiting jobs before another one, or before all others of their owner.

        Raises:
            NoSuchJob: there is no such job.
            NotAllowed: one of them belongs to another user.
            WrongState: one of them does not wait.
            BadValue: a job cannot go before the other one.
        """
        request = MoveRequest(list(numbers), before, only_waiting=len(numbers) > 1)
        return decode(EditedView, self._change_many("/jobs/move", request))

    def _change_many(self, path: str, request: object) -> bytes:
        # Ten thousand jobs take some seconds on a busy machine.
        patient = self._daemon.within(max(_MANY_WITHIN, self._daemon.answer_within))
        return patient.ask("POST", path, body=encode(request))

    def drain(self, gpu: str, *, why: str | None = None) -> GpuAvailabilityView:
        """Stop granting leases on a GPU, named by index, UUID or the beginning of the UUID.

        Raises:
            NoSuchGpu: no GPU has this name, or several have.
            NotAllowed: the caller is not an admin of this machine.
        """
        body = encode(DrainRequest(why))
        target = f"/gpus/{quoted(gpu, safe=':')}/drain"
        return decode(GpuAvailabilityView, self._daemon.ask("POST", target, body=body))

    def resume(self, gpu: str) -> GpuAvailabilityView:
        """Grant leases on a GPU again.

        Raises:
            NoSuchGpu: no GPU has this name, or several have.
            NotAllowed: the caller is not an admin of this machine.
        """
        target = f"/gpus/{quoted(gpu, safe=':')}/resume"
        return decode(GpuAvailabilityView, self._daemon.ask("POST", target))

    def pause(self, *, why: str | None = None) -> PauseChangeView:
        """Start no more jobs on this machine; running jobs continue.

        Raises:
            NotAllowed: the caller is not an admin of this machine.
        """
        body = encode(PauseRequest(why))
        return decode(PauseChangeView, self._daemon.ask("POST", "/queue/pause", body=body))

    def unpause(self) -> PauseChangeView:
        """Start jobs again.

        Raises:
            NotAllowed: the caller is not an admin of this machine.
        """
        return decode(PauseChangeView, self._daemon.ask("POST", "/queue/unpause"))

    def windows(self) -> WindowList:
        """Return the GPUs that are set apart for a time."""
        return decode(WindowList, self.windows_json())

    def windows_json(self) -> bytes:
        """Return the reply of `windows` as JSON."""
        return self._daemon.ask("GET", "/windows")

    def reserve(self, request: ReserveRequest) -> WindowView:
        """Set GPUs apart for a time.

        Raises:
            BadValue: a field cannot be read, or the window would never be on.
            NoSuchGpu: no GPU has one of the names, or several have.
            WindowClash: another window has its name, or needs the same GPUs at the same time.
            NotAllowed: the caller is not an admin of this machine.
        """
        body = encode(request)
        return decode(WindowView, self._daemon.ask("POST", "/windows", body=body))

    def cancel_window(self, name: str) -> WindowView:
        """Remove a window, by its name or id, and return it.

        Raises:
            NoSuchWindow: there is none.
            NotAllowed: the caller is not an admin of this machine.
        """
        target = f"/windows/{quoted(name)}/cancel"
        return decode(WindowView, self._daemon.ask("POST", target))

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

    def report_json(
        self, user: str | None = None, since: float | None = None, by: str = "user"
    ) -> bytes:
        """Return the reply of `report` as JSON."""
        query = query_of({"user": user, "since": since, "by": by})
        return self._daemon.ask("GET", "/report", query)

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

    def job_memory(self, number: int, points: int = SOME_POINTS) -> JobMemoryView:
        """Return the memory of a job on each of its GPUs, from its start to its end or now.

        Raises:
            NoSuchJob: there is none.
            NoSuchRoute: the daemon is too old.
        """
        target = f"/jobs/{number}/memory"
        return decode(JobMemoryView, self._daemon.ask("GET", target, {"points": str(points)}))

    def shares(self, since: float | None = None) -> SharesView:
        """Return what each user has used, holds and waits for, and whose turn that makes it.

        Waits are those of jobs that started in the last `since` seconds, by default a week.
        """
        return decode(SharesView, self.shares_json(since))

    def shares_json(self, since: float | None = None) -> bytes:
        """Return the reply of `shares` as JSON."""
        return self._daemon.ask("GET", "/shares", query_of({"since": since}))


def checked(daemon: Transport) -> Client:
    """Return a client that has all requests and checks replies, for a light one's daemon."""
    return Client(Path(daemon.path), trusted=daemon.trusted)


def _with_key(request: SubmitRequest | HoldRequest | AdoptRequest) -> bytes:
    """Return a submission as JSON, under a key by which the daemon knows a repetition."""
    return encode(request if request.key is not None else replace(request, key=new_key()))
