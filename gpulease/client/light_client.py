"""The requests of everyday commands, with replies that are read without the wire's classes.

Importing those takes longer than all else that `gpulease status` does. A reply is read as
namespaces, which have the fields that the daemon has sent; `Client` returns checked views.
"""

from __future__ import annotations

from gpulease import light_json
from gpulease.client.transport import ANSWER_WITHIN, Transport
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
    from gpulease.wire.jobs import JobList, JobView
    from gpulease.wire.machine import StatusView
    from gpulease.wire.requests import SubmitRequest

_SHORTEST_TIMEOUT = 0.05


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
        body = None if grace is None else encode({"grace": grace})
        reply = self._daemon.ask("POST", f"/jobs/{number}/cancel", body=body)
        view: JobView = self._view("JobView", reply)
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
        body = encode({"by": by})
        reply = self._daemon.ask("POST", f"/jobs/{number}/extend", body=body)
        view: JobView = self._view("JobView", reply)
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

    def explain_json(self, request: SubmitRequest) -> bytes:
        """Return what would happen to a job, an ExplainView as JSON; nothing is queued.

        Raises:
            NoSuchRoute: the daemon is too old to tell.
            Others: as `Client.submit`, but not NoRoomNow.
        """
        return self._daemon.post_until_answered("/explain", encode(request))

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
