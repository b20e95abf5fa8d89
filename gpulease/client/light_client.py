"""The requests of everyday commands, with replies that are read without the wire's classes.

Importing those takes longer than all else that `gpulease status` does. A reply is read as
namespaces, which have the fields that the daemon has sent; `Client` returns checked views.
"""

from __future__ import annotations

from gpulease import light_json
from gpulease.client.http import quoted
from gpulease.client.transport import ANSWER_WITHIN, Transport
from gpulease.errors import NoSuchRoute
from gpulease.light_json import Namespace, encode
from gpulease.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any, Self

    from gpulease.client.transport import Reply
    from gpulease.errors import RecordLocked
    from gpulease.wire.frames import FrameKind
    from gpulease.wire.jobs import (
        CancelledView,
        EditedView,
        EnvironmentView,
        JobList,
        JobView,
        NestedView,
    )
    from gpulease.wire.machine import (
        GpuAvailabilityView,
        PauseChangeView,
        StatusView,
        TopologyView,
        WindowList,
        WindowView,
    )
    from gpulease.wire.requests import (
        CancelJobsRequest,
        EditRequest,
        HoldRequest,
        NestedRequest,
        ReserveRequest,
        SubmitRequest,
    )

_SHORTEST_TIMEOUT = 0.05
_MANY_WITHIN = 120.0
"""Timeout in seconds for a request that changes many jobs."""
_SURROGATE = rb"\ud"
"""How JSON in ASCII begins a character beyond 16 bits, and what UTF-8 cannot write."""


class View(Namespace):
    """An object of a reply. It has the attributes of the view that `gpulease.wire` describes."""

    def __getattr__(self, name: str) -> Any:
        """Return the default of a field that the daemon, an older one, has not sent."""
        if name.startswith("_"):
            raise AttributeError(name)
        from gpulease.client.codec import default_of

        return default_of(vars(self), name)


def read(body: bytes) -> Any:
    """Return a reply with its objects as views.

    Raises:
        GpuleaseError: it is no JSON.
    """
    try:
        return light_json.decode(body, View)
    except ValueError as error:
        from gpulease.client.errors import unreadable

        raise unreadable(str(error)) from error


def written(request: object) -> bytes:
    """Return a request as JSON.

    Raises:
        BadValue: a text in it cannot be sent.
    """
    body = encode(request)
    if _SURROGATE not in body:
        return body
    from gpulease.client import codec

    # Half of a character, or of a byte that is no text; msgspec tells them apart.
    return codec.encode(request)


class LightClient:
    """A client of one daemon; each call opens a connection."""

    def __init__(self, transport: Transport) -> None:
        self._daemon = transport

    @property
    def path(self) -> Path | str:
        """The daemon's socket."""
        return self._daemon.path

    @property
    def transport(self) -> Transport:
        """The connection to the daemon."""
        return self._daemon

    def _view(self, kind: str, body: bytes) -> Any:
        """Return the view in a reply; `kind` is the name of its class."""
        return read(body)

    def _body(self, request: object) -> bytes:
        """Return a request as JSON."""
        return written(request)

    def _post(self, kind: str, target: str, request: object = None) -> Any:
        """Return the view in the reply to a request that changes something."""
        body = None if request is None else self._body(request)
        return self._view(kind, self._daemon.ask("POST", target, body=body))

    def within(self, seconds: float) -> Self:
        """Return a client of the same daemon with a shorter timeout, for callers with a deadline.

        A daemon that is stopped accepts requests and does not answer.
        """
        client = object.__new__(type(self))
        # A timeout of zero would fail even if the daemon answers at once.
        timeout = max(_SHORTEST_TIMEOUT, min(seconds, self._daemon.answer_within))
        client._daemon = self._daemon.within(timeout)
        return client

    def saying_locked(self, locked: Callable[[RecordLocked], None]) -> Self:
        """Return a client that calls `locked` while a submission waits for a locked database."""
        client = object.__new__(type(self))
        client._daemon = replace(self._daemon, locked=locked)
        return client

    def jobs(
        self,
        *,
        everything: bool = False,
        user: str | None = None,
        state: str | None = None,
        newest: bool = False,
        after: int | None = None,
        limit: int | None = None,
        name: str | None = None,
        since: float | None = None,
    ) -> JobList:
        """Return the jobs that wait or hold memory, or with `everything` also those that ended.

        The oldest come first, or the `newest`. Without a limit, these are all live jobs, or the
        latest 10,000 of `everything`. With `limit`, one page: the jobs that follow the job `after`.
        `state` is that of a job, the way it ended, or "failed" for any end without success. `name`
        is a shell pattern. With `since`, jobs that ended more seconds ago are left out.
        """
        reply = self.jobs_json(
            everything=everything, user=user, state=state, newest=newest, after=after, limit=limit,
            name=name, since=since,
        )  # fmt: skip
        view: JobList = self._view("JobList", reply)
        return view

    def jobs_json(self, **asked: object) -> bytes:
        """Return the reply of `jobs` as JSON."""
        return self._daemon.ask("GET", "/jobs", query_of(asked, everything="all"))

    def elements(
        self, array: int, index: int | None = None, *, everything: bool = True
    ) -> list[JobView]:
        """Return the jobs of an array, oldest first, or those with one index.

        A job that was tried or queued again is followed by the job that continues it, with the same
        index. With `everything` false, jobs that have ended are left out.
        """
        reply = self.jobs_json(everything=everything, array=array, index=index)
        view: JobList = self._view("JobList", reply)
        return view.jobs

    def job(self, number: int) -> JobView:
        """Return one job with its events.

        Raises:
            NoSuchJob: there is none.
        """
        view: JobView = self._view("JobView", self.job_json(number))
        return view

    def job_json(self, number: int) -> bytes:
        """Return the reply of `job` as JSON."""
        return self._daemon.ask("GET", f"/jobs/{number}")

    def watch(self, number: int) -> Iterator[JobView]:
        """Yield a job at once, at each change and at keep-alives, until it has ended.

        Raises:
            NoSuchJob: there is none.
            NoDaemon: the stream ended before the job.
        """
        last: JobView | None = None
        with self._daemon.open("GET", f"/jobs/{number}/watch") as reply:
            for line in reply.lines():
                last = self._view("JobView", line) if line else last
                if last is not None:
                    yield last
        if last is None or last.state != "ended":
            from gpulease.client.errors import lost

            raise lost(self.path)

    def cancel(self, number: int, *, grace: float | None = None) -> JobView:
        """Ask a job to end, or release a lease, and return it as it is then.

        With `grace`, it is killed after so many seconds, if that is sooner than its own grace,
        also if it was cancelled before.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it has ended already.
        """
        body = None if grace is None else {"grace": grace}
        view: JobView = self._post("JobView", f"/jobs/{number}/cancel", body)
        return view

    def status(self, queue: int | None = None) -> StatusView:
        """Return the state of the machine, the jobs that hold memory, and those that wait.

        With `queue`, only so many of the waiting jobs, the next to start first.
        """
        view: StatusView = self._view("StatusView", self.status_json(queue))
        return view

    def status_json(self, queue: int | None = None) -> bytes:
        """Return the reply of `status` as JSON."""
        return self._daemon.ask("GET", "/status", {"queue": "all" if queue is None else str(queue)})

    def topology(self) -> TopologyView:
        """Return the links between the GPUs, and the socket that each belongs to."""
        view: TopologyView = self._view("TopologyView", self.topology_json())
        return view

    def topology_json(self) -> bytes:
        """Return the reply of `topology` as JSON."""
        return self._daemon.ask("GET", "/topology")

    def history_json(self, **asked: object) -> bytes:
        """Return the reply of `Client.history` as JSON."""
        return self._daemon.ask("GET", "/history", query_of(asked))

    def extend(self, number: int, by: float) -> JobView:
        """Add `by` seconds, which may be negative, to the time limit of a job, and return it.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it has ended, is ending, or has no time limit.
            BadValue: the new time limit has passed already, or is out of range.
        """
        view: JobView = self._post("JobView", f"/jobs/{number}/extend", {"by": by})
        return view

    def ends(self, numbers: Sequence[int], timeout: float | None = None) -> Iterator[JobView]:
        """Yield each of some jobs when it has ended, until all have, or for `timeout` seconds.

        If a job was tried or queued again, the job that continues it (`retried_as`) is waited for
        as well. All use one connection. The iteration also ends if the daemon stops.

        Raises:
            NoSuchJob: one of them does not exist.
            NoDaemon: the stream ended too early.
        """
        body = encode({"jobs": list(numbers), "timeout": timeout})
        with self._daemon.open("POST", "/jobs/wait", body=body) as reply:
            for line in reply.lines():
                if line:
                    yield self._view("JobView", line)

    def submission(self, number: int) -> SubmitRequest:
        """Return the request for the same work as that of an ended job, without environment.

        Raises:
            NoSuchJob: there is none, or its command is not known any more.
            NotAllowed: it belongs to another user.
            WrongState: it has not ended, or had no command.
        """
        reply = self._daemon.ask("GET", f"/jobs/{number}/submission")
        view: SubmitRequest = self._view("SubmitRequest", reply)
        return view

    def explain_json(self, request: SubmitRequest) -> bytes:
        """Return what would happen to a job, an ExplainView as JSON; nothing is queued.

        Raises:
            NoSuchRoute: the daemon is too old to tell.
            Others: as `Client.submit`, but not NoRoomNow.
        """
        return self._daemon.post_until_answered("/explain", self._body(request))

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
        view: JobView = self._view("JobView", self._daemon.submit("/holds", self._body(request)))
        return view

    def nested(self, request: NestedRequest) -> NestedView | None:
        """Return the job under whose lease this process runs, and the requested part of it.

        None: it runs under none, or the daemon is too old to tell.

        Raises:
            BadValue: a field is out of range.
            AlreadyLeased: the request exceeds what the job has.
        """
        try:
            reply = self._daemon.post_until_answered("/nested", self._body(request))
        except NoSuchRoute:
            return None
        found: NestedView = self._view("NestedView", reply)
        return None if found.job is None else found

    def environment(self, number: int) -> EnvironmentView:
        """Return what a lease changes in the environment of its holder.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it is not granted yet, or has ended.
        """
        reply = self._daemon.ask("GET", f"/jobs/{number}/environment")
        view: EnvironmentView = self._view("EnvironmentView", reply)
        return view

    def keep(self, number: int, span: float | None = None) -> JobView:
        """Allow a job to be idle for `span` seconds, by default an hour, and return it.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it waits, has ended, or is ending.
            BadValue: that is longer than a day.
        """
        view: JobView = self._post("JobView", f"/jobs/{number}/keep", {"span": span})
        return view

    def cancel_all(self, request: CancelJobsRequest) -> CancelledView:
        """Cancel many jobs in one transaction; those that have ended are left out.

        Raises:
            NotAllowed: they belong to another user, and the caller is not an admin.
        """
        view: CancelledView = self._change_many("CancelledView", "/jobs/cancel", request)
        return view

    def requeue(self, number: int) -> JobView:
        """Stop a running job, have it queued again when it has ended, and return it.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it is queued, is ending, or has ended.
        """
        view: JobView = self._post("JobView", f"/jobs/{number}/requeue")
        return view

    def edit(self, request: EditRequest) -> EditedView:
        """Change waiting jobs, all of them or none; they keep their age.

        Raises:
            NoSuchJob: one of them does not exist.
            NotAllowed: one of them belongs to another user, or only admins may ask for that.
            WrongState: one of them does not wait.
            CannotLease: the new claim can never be granted on this machine.
            BadValue: a value is out of range, or a job would wait for itself.
        """
        view: EditedView = self._change_many("EditedView", "/jobs/edit", request)
        return view

    def move(self, numbers: Sequence[int], before: int | None = None) -> EditedView:
        """Move waiting jobs before another one, or before all others of their owner.

        Raises:
            NoSuchJob: there is no such job.
            NotAllowed: one of them belongs to another user.
            WrongState: one of them does not wait.
            BadValue: a job cannot go before the other one.
        """
        many = len(numbers) > 1
        request = {"jobs": list(numbers), "before": before, "only_waiting": many}
        view: EditedView = self._change_many("EditedView", "/jobs/move", request)
        return view

    def _change_many(self, kind: str, path: str, request: object) -> Any:
        # Ten thousand jobs take some seconds on a busy machine.
        patient = self._daemon.within(max(_MANY_WITHIN, self._daemon.answer_within))
        return self._view(kind, patient.ask("POST", path, body=self._body(request)))

    def drain(self, gpu: str, *, why: str | None = None) -> GpuAvailabilityView:
        """Stop granting leases on a GPU, named by index, UUID or the beginning of the UUID.

        Raises:
            NoSuchGpu: no GPU has this name, or several have.
            NotAllowed: the caller is not an admin of this machine.
        """
        target = f"/gpus/{quoted(gpu, safe=':')}/drain"
        view: GpuAvailabilityView = self._post("GpuAvailabilityView", target, {"why": why})
        return view

    def resume(self, gpu: str) -> GpuAvailabilityView:
        """Grant leases on a GPU again.

        Raises:
            NoSuchGpu: no GPU has this name, or several have.
            NotAllowed: the caller is not an admin of this machine.
        """
        target = f"/gpus/{quoted(gpu, safe=':')}/resume"
        view: GpuAvailabilityView = self._post("GpuAvailabilityView", target)
        return view

    def pause(self, *, why: str | None = None) -> PauseChangeView:
        """Start no more jobs on this machine; running jobs continue.

        Raises:
            NotAllowed: the caller is not an admin of this machine.
        """
        view: PauseChangeView = self._post("PauseChangeView", "/queue/pause", {"why": why})
        return view

    def unpause(self) -> PauseChangeView:
        """Start jobs again.

        Raises:
            NotAllowed: the caller is not an admin of this machine.
        """
        view: PauseChangeView = self._post("PauseChangeView", "/queue/unpause")
        return view

    def windows(self) -> WindowList:
        """Return the GPUs that are set apart for a time."""
        view: WindowList = self._view("WindowList", self.windows_json())
        return view

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
        view: WindowView = self._post("WindowView", "/windows", request)
        return view

    def cancel_window(self, name: str) -> WindowView:
        """Remove a window, by its name or id, and return it.

        Raises:
            NoSuchWindow: there is none.
            NotAllowed: the caller is not an admin of this machine.
        """
        target = f"/windows/{quoted(name)}/cancel"
        view: WindowView = self._post("WindowView", target)
        return view

    def report_json(
        self, user: str | None = None, since: float | None = None, by: str = "user"
    ) -> bytes:
        """Return the reply of `report` as JSON."""
        query = query_of({"user": user, "since": since, "by": by})
        return self._daemon.ask("GET", "/report", query)

    def shares_json(self, since: float | None = None) -> bytes:
        """Return the reply of `shares` as JSON."""
        return self._daemon.ask("GET", "/shares", query_of({"since": since}))

    def logs(
        self,
        number: int,
        *,
        stdout: bool = True,
        stderr: bool = True,
        tail: int | None = None,
        follow: bool = False,
        begin: Mapping[FrameKind, int] | None = None,
        opened: Callable[[Reply], None] | None = None,
        positions: dict[FrameKind, int] | None = None,
    ) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the kept output of a job in pieces, each with its stream.

        Each stream starts at byte `begin`, or with its last `tail` lines. With `follow` it
        continues until the job has ended, also if the job has not started. `opened` is called with
        the reply, which another thread may interrupt. After each piece, `positions` has where to
        `begin` to continue; an older daemon leaves it empty.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it belongs to another user.
            WrongState: it is a hold, which has no output.
            NoDaemon: the stream ended too early.
        """
        from gpulease.wire.frames import BadFrame, FrameKind, FrameReader

        begin = begin or {}
        query = query_of(
            {
                "tail": tail,
                "follow": follow,
                "stdout_from": begin.get(FrameKind.STDOUT, 0),
                "stderr_from": begin.get(FrameKind.STDERR, 0),
                "positions": positions is not None,
            }
        ) | {"stdout": str(stdout).lower(), "stderr": str(stderr).lower()}
        frames = FrameReader()
        with self._daemon.open("GET", f"/jobs/{number}/logs", query) as reply:
            # A job may be silent for days, and this stream has no keep-alives.
            reply.settimeout(None if follow else ANSWER_WITHIN)
            if opened is not None:
                opened(reply)
            try:
                found = (each for piece in reply.pieces() for each in frames.feed(piece))
                yield from found if positions is None else _noting(positions, found)
            except BadFrame as error:
                from gpulease.client.errors import lost

                raise lost(self.path) from error


def query_of(asked: Mapping[str, object], **names: str) -> dict[str, str]:
    """Return parameters as the query of a request, without those that are None or false.

    `names` are those that the daemon calls otherwise.
    """
    return {
        names.get(name, name): "true" if value is True else str(value)
        for name, value in asked.items()
        if value is not None and value is not False
    }


def _noting(
    positions: dict[FrameKind, int], frames: Iterator[tuple[FrameKind, bytes]]
) -> Iterator[tuple[FrameKind, bytes]]:
    """Yield the output in `frames`, and note the position after each piece before it is yielded.

    A piece waits for the position that follows it: if that is lost, the piece is sent again.
    """
    from gpulease.light_json import decode_plain
    from gpulease.wire.frames import FrameKind

    waiting: tuple[FrameKind, bytes] | None = None
    for kind, payload in frames:
        piece, waiting = waiting, None
        if kind == FrameKind.POSITION:
            at = decode_plain(payload)
            positions[at["kind"]] = at["at"]
        elif positions:
            waiting = kind, payload
        else:
            piece = kind, payload  # of an older daemon
        if piece is not None:
            yield piece
    if waiting is not None:
        yield waiting
