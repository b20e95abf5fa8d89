"""The typed client of the daemon's API: one method for each route, over a Unix socket.

It knows the routes and the wire shapes. It must not know the terminal.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from copy import copy
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from urllib.parse import quote

import msgspec

from gpulease import config
from gpulease.client.discovery import find
from gpulease.client.errors import lost
from gpulease.client.transport import Transport, body_of, decode, lines
from gpulease.client.unix_socket import trusted_users
from gpulease.errors import NoSuchRoute
from gpulease.wire.frames import BadFrame, FrameKind, FrameReader
from gpulease.wire.requests import (
    CancelRequest,
    DrainRequest,
    ExtendRequest,
    HoldRequest,
    KeepRequest,
    NestedRequest,
    SubmitRequest,
)
from gpulease.wire.views import (
    DoctorView,
    EnvironmentView,
    GpuAvailabilityView,
    JobList,
    JobView,
    NestedView,
    ReportView,
    StatusView,
)

ANSWER_WITHIN = 30.0
"""Seconds that a request may take; the daemon answers in milliseconds."""
_LEAST_PATIENCE = 0.05


class Client:
    """What the daemon of this machine can be asked; each call is a connection of its own.

    Every method raises `NoDaemon` when nothing answers, and otherwise the error that the daemon
    replied with, as the class that it was there. Sizes are bytes, spans seconds, instants ISO 8601
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
        """Speak to the daemon on the socket `path`.

        Without a path it is found as the command finds it: GPULEASE_SOCKET, the machine's, which
        is waited for where there is one, or the user's own; root or the user must be listening
        there. No daemon is started.

        Args:
            path: the daemon's socket.
            trusted: the users who may be listening on `path`; None is anyone at all, and root or
                the caller for what holds an environment.
            answer_within: seconds that an answer may take.

        Raises:
            NoDaemon: no path was given, and no daemon answers.
        """
        if path is None:
            path, trusted = find(config.candidate_sockets(None)), trusted_users()
        self.path = path
        self._daemon = Transport(path, trusted, answer_within)

    def within(self, seconds: float) -> "Client":
        """Return a client of the same daemon that waits at most `seconds` for an answer.

        For a caller that has a deadline: a daemon that is stopped takes requests and does not
        answer.
        """
        hurried = copy(self)
        # Zero would not wait at all, not even for a daemon that answers at once.
        patience = max(_LEAST_PATIENCE, min(seconds, self._daemon.answer_within))
        hurried._daemon = replace(self._daemon, answer_within=patience)
        return hurried

    def submit(self, request: SubmitRequest) -> JobView:
        """Queue a job; what is returned is on the daemon's disk.

        Where the answer was lost it is asked for again, under the same key, and no second job is
        queued.

        Raises:
            BadValue: a field cannot be what it is.
            CannotLease: the claim can never be granted on this machine.
            NoRoomNow: it would have to wait, and `request.wait` is 0.
            TooLarge: the request is over what the daemon reads.
        """
        return decode(JobView, self._daemon.order("/jobs", request))

    def hold(self, request: HoldRequest) -> JobView:
        """Queue a lease without a job; what is returned is on the daemon's disk.

        Until it is granted (see `watch`) it is wanted only as long as this process lives. Then it
        is held until the process `request.pid` ends, its time is over, or it is released with
        `cancel`.

        Raises:
            BadValue: there is no such process, or neither a process nor a time limit was given.
            NotAllowed: the process is somebody else's.
            CannotLease: the claim can never be granted on this machine.
            NoRoomNow: it would have to wait, and `request.wait` is 0.
            TooLarge: the request is over what the daemon reads.
        """
        return decode(JobView, self._daemon.order("/holds", request))

    def nested(self, request: NestedRequest) -> NestedView | None:
        """Return the job under whose lease this process runs, and the part that is asked for.

        None: it runs under none, or the daemon is of a version that cannot tell.

        Raises:
            BadValue: a field cannot be what it is.
            AlreadyLeased: more is asked for than the job has.
        """
        try:
            found = decode(NestedView, self._daemon.insist("/nested", body_of(request)))
        except NoSuchRoute:
            return None
        return None if found.job is None else found

    def environment(self, number: int) -> EnvironmentView:
        """Return what a lease changes in the environment of its holder.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to somebody else.
            WrongState: it has not been granted yet, or has ended.
        """
        reply = self._daemon.ask("GET", f"/jobs/{number}/environment")
        return decode(EnvironmentView, reply)

    def extend(self, number: int, by: float) -> JobView:
        """Add `by` seconds, which may be negative, to the time limit of a job, and return it.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to somebody else.
            WrongState: it has ended, was asked to go, or has no time limit.
            BadValue: the new limit would be over already, or is past all bounds.
        """
        body = msgspec.json.encode(ExtendRequest(by))
        return decode(JobView, self._daemon.ask("POST", f"/jobs/{number}/extend", body=body))

    def keep(self, number: int, span: float | None = None) -> JobView:
        """Let a job be idle for `span` seconds, or for an hour, and return it.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to somebody else.
            WrongState: it waits, has ended, or was asked to go.
            BadValue: that is longer than a day.
        """
        body = msgspec.json.encode(KeepRequest(span))
        return decode(JobView, self._daemon.ask("POST", f"/jobs/{number}/keep", body=body))

    def jobs(
        self, *, everything: bool = False, user: str | None = None, state: str | None = None
    ) -> JobList:
        """Return the jobs that are not over, or `everything` that is remembered."""
        return decode(JobList, self.jobs_json(everything=everything, user=user, state=state))

    def jobs_json(
        self, *, everything: bool = False, user: str | None = None, state: str | None = None
    ) -> bytes:
        """Return the reply of `jobs` as it came."""
        query = {"all": "true" if everything else None, "user": user, "state": state}
        return self._daemon.ask("GET", "/jobs", query)

    def job(self, number: int) -> JobView:
        """Return all about one job, with its events.

        Raises:
            NoSuchJob: there is none.
        """
        return decode(JobView, self.job_json(number))

    def job_json(self, number: int) -> bytes:
        """Return the reply of `job` as it came."""
        return self._daemon.ask("GET", f"/jobs/{number}")

    def cancel(self, number: int, *, grace: float | None = None) -> JobView:
        """Ask a job to end, or give a lease back, and return it as it is then.

        With `grace`, what is left of it is killed after so many seconds, if that is sooner than
        the job's own grace; also where it was cancelled before.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to somebody else.
            WrongState: it has ended already.
        """
        body = None if grace is None else msgspec.json.encode(CancelRequest(grace))
        return decode(JobView, self._daemon.ask("POST", f"/jobs/{number}/cancel", body=body))

    def drain(self, gpu: str, *, why: str | None = None) -> GpuAvailabilityView:
        """Have nothing more granted on a GPU: its index, its UUID, or the beginning of that.

        Raises:
            NoSuchGpu: there is none of that name, or more than one.
            NotAllowed: the caller is no admin of this machine.
        """
        body = msgspec.json.encode(DrainRequest(why))
        target = f"/gpus/{quote(gpu, safe=':')}/drain"
        return decode(GpuAvailabilityView, self._daemon.ask("POST", target, body=body))

    def resume(self, gpu: str) -> GpuAvailabilityView:
        """Have leases granted on a GPU again.

        Raises:
            NoSuchGpu: there is none of that name, or more than one.
            NotAllowed: the caller is no admin of this machine.
        """
        target = f"/gpus/{quote(gpu, safe=':')}/resume"
        return decode(GpuAvailabilityView, self._daemon.ask("POST", target))

    def status(self) -> StatusView:
        """Return one look at the whole machine."""
        return decode(StatusView, self.status_json())

    def status_json(self) -> bytes:
        """Return the reply of `status` as it came."""
        return self._daemon.ask("GET", "/status")

    def doctor(self) -> DoctorView:
        """Return what the daemon finds right and wrong with this machine."""
        return decode(DoctorView, self._daemon.ask("GET", "/doctor"))

    def report(self, user: str | None = None, since: float | None = None) -> ReportView:
        """Return what the ended jobs of a user, or of all, asked for and used.

        `since` is how many seconds ago they ended at the earliest.

        Raises:
            NotAllowed: it is about others, and the admin hides what others run.
        """
        return decode(ReportView, self.report_json(user, since))

    def report_json(self, user: str | None = None, since: float | None = None) -> bytes:
        """Return the reply of `report` as it came."""
        query = {"user": user, "since": None if since is None else f"{since:.0f}"}
        return self._daemon.ask("GET", "/report", query)

    def watch(self, number: int) -> Iterator[JobView]:
        """Yield a job at once, at each change and now and then between, until it has ended.

        Raises:
            NoSuchJob: there is none.
            NoDaemon: the stream broke off before the end of the job.
        """
        last: JobView | None = None
        with closing(self._daemon.open("GET", f"/jobs/{number}/watch")) as reply:
            for line in lines(reply, self.path):
                last = decode(JobView, line) if line else last
                if last is not None:
                    yield last
        if last is None or last.state != "ended":
            raise lost(self.path)

    def logs(
        self,
        number: int,
        *,
        stdout: bool = True,
        stderr: bool = True,
        tail: int | None = None,
        follow: bool = False,
        begin: Mapping[FrameKind, int] | None = None,
    ) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the kept output of a job, piece by piece, each with the stream that it is of.

        `begin` is the byte of each stream to begin with, the first if left out; `tail` is of how
        many last lines; with `follow` it goes on until the job has ended, also from before its
        start.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to somebody else.
            WrongState: it is a lease without a job.
            NoDaemon: the stream broke off.
        """
        begin = begin or {}
        query = {
            "stdout": str(stdout).lower(),
            "stderr": str(stderr).lower(),
            "tail": None if tail is None else str(tail),
            "follow": str(follow).lower(),
            "stdout_from": str(begin.get(FrameKind.STDOUT, 0)),
            "stderr_from": str(begin.get(FrameKind.STDERR, 0)),
        }
        frames = FrameReader()
        with closing(self._daemon.open("GET", f"/jobs/{number}/logs", query)) as reply:
            # A job may be silent for days, and this stream has no keep-alives.
            reply.settimeout(None if follow else ANSWER_WITHIN)
            try:
                while piece := reply.response.read1(1 << 16):
                    yield from frames.feed(piece)
            except (OSError, HTTPException, BadFrame) as error:
                raise lost(self.path) from error
