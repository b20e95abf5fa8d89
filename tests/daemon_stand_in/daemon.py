"""A daemon as the command sees it: HTTP on a Unix socket, answering from plain values."""

import contextlib
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from daemon_stand_in import views
from gpulease.errors import GpuleaseError, NoSuchJob
from gpulease.wire.jobs import JobList, JobView, NestedView
from gpulease.wire.machine import DoctorView, StatusView
from gpulease.wire.requests import ErrorBody, ErrorReply, SubmitRequest
from gpulease.wire.text import has_failed
from gpulease.wire.usage import HistoryView, PastJobView


class StandIn:
    """What is served, and what was asked; a test reads and changes both."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: dict[int, JobView] = {}
        self.past: list[PastJobView] = []
        """Jobs that have ended, the newest first."""
        self.status: StatusView = views.status()
        self.doctor = DoctorView(checks=[])
        self.on_submit = views.job()
        self.refusal: GpuleaseError | None = None
        self.raw: bytes | None = None
        """Sent instead of any answer, with HTTP 500."""
        self.logs = b""
        self.follows = True
        """Whether it follows the job of a submission, as older daemons do not."""
        self.most_listed = 10_000
        """Jobs in one answer, if some of them may have ended."""
        self.submitted: list[SubmitRequest] = []
        self.cancelled: list[int] = []
        self.followed: list[int] = []
        """The jobs whose submission a command follows, once it knows their number."""
        self.asked: list[str] = []
        self._changed = threading.Condition()
        self._server: _Server | None = None

    def open(self) -> None:
        self._server = _Server(str(self.path), _Handler)
        self._server.stand_in = self
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Go as a killed daemon goes: no last words on any stream."""
        server, self._server = self._server, None
        if server is None:
            return
        server.gone = True
        self.tell()
        server.shutdown()
        server.server_close()
        self.path.unlink()

    def put(self, job: JobView) -> None:
        """Make `job` what is known of it, and tell those who watch."""
        self.jobs[job.id] = job
        self.tell()

    def hear_the_end(self, directory: Path) -> None:
        """Learn that the job in this directory has ended, as from its shim."""
        known = {self.on_submit.id: self.on_submit} | self.jobs
        for job in known.values():
            if job.directory == str(directory):
                self.put(replace(job, state="ended"))

    def tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def until(self, condition: Any, within: float = 20.0) -> None:
        """Wait for something that the command does; `condition` is called without arguments."""
        with self._changed:
            assert self._changed.wait_for(condition, within), "the command did not do it"

    def changes(self, number: int, server: "_Server") -> Iterator[JobView]:
        """Yield a job at once and at each change until it has ended, or the server goes."""
        shown = None
        while not server.gone:
            with self._changed:
                if self.jobs[number] == shown:
                    self._changed.wait(0.5)
            if self.jobs[number] != shown and not server.gone:
                shown = self.jobs[number]
                yield shown
                if shown.state == "ended":
                    return


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64
    stand_in: StandIn
    gone = False

    def handle_error(self, *_: Any) -> None:
        """A client that left early is no news."""


def _is_in(job: JobView, state: str) -> bool:
    return has_failed(job) if state == "failed" else state in (job.state, job.outcome)


def _page(found: list[JobView], query: dict[str, str], most: int) -> JobList:
    if query.get("newest") == "true":
        ids = [job.id for job in found]
        begin = ids.index(int(query["after"])) if "after" in query else len(ids)
        limit = min(int(query.get("limit", most)), most)
        shown = found[max(0, begin - limit) : begin][::-1]
        return JobList(shown, len(found), shown[-1].id if begin > limit else None)
    if query.get("all") != "true" or "limit" in query:
        shown = found[: int(query.get("limit", len(found)))]
        return JobList(shown, len(found), shown[-1].id if len(shown) < len(found) else None)
    shown = found[-most:]
    return JobList(shown, len(found), shown[0].id if len(shown) < len(found) else None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    _ROUTES: ClassVar = ("status", "doctor", "jobs")

    def log_message(self, *_: Any) -> None:
        """Tests read what is asked from the stand-in."""

    def address_string(self) -> str:
        return "unix"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, body: bytes) -> None:
        self.close_connection = True
        stand_in = self.server.stand_in
        stand_in.asked.append(f"{self.command} {self.path}")
        stand_in.tell()
        if stand_in.raw is not None:
            self._send(500, stand_in.raw)
            return
        try:
            if stand_in.refusal is not None:
                raise stand_in.refusal
            self._route(body)
        except GpuleaseError as error:
            reply = ErrorReply(ErrorBody(error.code, error.message, error.hint))
            self._send(error.http_status, msgspec.json.encode(reply))

    def _route(self, body: bytes) -> None:
        stand_in = self.server.stand_in
        target = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(target.query).items()}
        views = {"status": stand_in.status, "doctor": stand_in.doctor}
        match target.path.split("/")[2:]:
            case [what] if what in views:
                self._json(views[what])
            case ["history"]:
                self._json(self._past(query))
            case ["nested"]:
                self._json(NestedView(None))
            case ["jobs"] if body:
                stand_in.submitted.append(msgspec.json.decode(body, type=SubmitRequest))
                job = stand_in.on_submit
                stand_in.jobs.setdefault(job.id, job)
                if query.get("follow") == "true" and stand_in.follows:
                    self._chunks(self._start(job.id), 201)
                else:
                    self._json(stand_in.jobs[job.id], 201)
                stand_in.tell()
            case ["jobs"]:
                self._json(self._listed(query))
            case ["jobs", number, *what]:
                self._job(int(number), what)

    def _past(self, query: dict[str, str]) -> HistoryView:
        past, limit = self.server.stand_in.past, int(query["limit"])
        found = [job for job in past if job.id < int(query.get("before", job.id + 1))]
        return HistoryView(found[:limit], found[limit - 1].id if len(found) >= limit else None)

    def _listed(self, query: dict[str, str]) -> JobList:
        stand_in = self.server.stand_in
        found = [
            job
            for _, job in sorted(stand_in.jobs.items())
            if query.get("all") == "true" or job.state != "ended"
            if query.get("user", job.user) == job.user
            if "state" not in query or _is_in(job, query["state"])
        ]
        return _page(found, query, stand_in.most_listed)

    def _job(self, number: int, what: list[str]) -> None:
        stand_in = self.server.stand_in
        job = stand_in.jobs.get(number)
        if job is None:
            raise NoSuchJob(f"cannot find job {number}: there is none", "gpulease list")
        match what:
            case ["cancel"]:
                ended = replace(job, state="ended", outcome="cancelled", position=None)
                stand_in.cancelled.append(number)
                if job.state == "queued":
                    stand_in.put(ended)
                stand_in.tell()
                self._json(stand_in.jobs[number])
            case ["watch"]:
                self._watch(number)
            case ["logs"]:
                self._chunks(iter([stand_in.logs]))
            case _:
                self._json(job)

    def _start(self, number: int) -> Iterator[bytes]:
        """Yield a job as lines: at once, then if it still waits and at each change."""
        stand_in = self.server.stand_in
        stand_in.tell()
        if stand_in.jobs[number].state in ("queued", "granted"):
            yield msgspec.json.encode(stand_in.jobs[number]) + b"\n"
        stand_in.followed.append(number)
        stand_in.tell()
        for job in stand_in.changes(number, self.server):
            yield msgspec.json.encode(job) + b"\n"
            if job.state in ("active", "releasing", "ended"):
                return

    def _watch(self, number: int) -> None:
        changes = self.server.stand_in.changes(number, self.server)
        self._chunks(msgspec.json.encode(job) + b"\n\n" for job in changes)

    def _chunks(self, pieces: Iterator[bytes], status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for piece in pieces:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if not self.server.gone:
                self.wfile.write(b"0\r\n\r\n")

    def _json(self, view: object, status: int = 200) -> None:
        self._send(status, msgspec.json.encode(view))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
