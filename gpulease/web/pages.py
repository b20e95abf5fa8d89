"""The pages: each asks the daemon, and draws a template."""

import gzip
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from gpulease.drawing.arrays import array_of
from gpulease.drawing.words import alike, index_of, instant, jobs_in, labels_of
from gpulease.errors import GpuleaseError, NoSuchJob, NoSuchRoute, NotAllowed
from gpulease.web.bars import colors, remark_on
from gpulease.web.charts import gpu_charts, job_charts, user_chart
from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.filters import ENDS, Filter, filter_of, page_named
from gpulease.web.live import GZIP, LiveStatus, sections, values_of
from gpulease.web.templates import address, address_of, render
from gpulease.wire.history import SOME_POINTS, GpuHistoryView, JobMemoryView
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import GpuView, StatusView
from gpulease.wire.text import LARGEST_INDEX, LONGEST_NAME
from gpulease.wire.usage import HistoryView, PastJobView, ReportView, SharesView, ShareView, UseView

ROWS = 100
"""Of the queue or of past jobs, on one page."""
_MOST_PAGES = 200
_MOST_ROWS = 100
_MOST_LINKS = 8
"""Of an array, and of one of its rows."""
_QUEUE_FRESH_FOR_S = 2.0
_ARRAY_FRESH_FOR_S = 5.0
"""An array has up to 10,000 elements."""
_HOUR_S = 3600.0
_SLOW_FRESH_FOR_S = 30.0
"""Reports over weeks take the daemon a while, and change little."""
_AGAIN_AFTER_S = 5
_LARGEST_ID = (1 << 63) - 1
_OF_USER = 20
"""Past jobs on the page of a user; waiting ones as well."""
_REFRESH_S = 15
"""After so many seconds a page asks for itself again; that of a running job or a GPU sooner."""
_REFRESH_SOON_S = 5
_GZIP_LEVEL = 5
_SHORTEST_S = 60
_LONGEST_S = 365 * 86400

_SPANS = {
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "week": timedelta(days=7),
    "month": timedelta(days=30),
    "year": timedelta(days=365),
}
_OF_GPU = ("hour", "day", "week", "year")
_OF_PEOPLE = ("day", "week", "month", "year")


_WORST_FIRST = ("failure", "warning", "ok")


class _Person(NamedTuple):
    """A user, with share and use where they are known."""

    user: str
    share: ShareView | None = None
    use: UseView | None = None
    waits: UseView | ShareView | None = None


class Pages:
    """One method for each page."""

    def __init__(self, daemon: DaemonReader, live: LiveStatus) -> None:
        self._daemon = daemon
        self._live = live
        self.actions_on: Callable[[JobView], Sequence[object]] | None = None
        """What the user can do with a job; None where nobody acts."""
        self.own_user: str | None = None
        """Whose page this is; None if it is everybody's."""

    async def now(self, request: Request) -> Response:
        """Show the machine now; live where the browser runs scripts."""
        status = await self._live.status()
        trends = await self._live.trends(status)
        drawn = {name: Markup(html) for name, html in sections(status, trends).items()}  # noqa: S704
        return page(
            request, "now.html", status=status, sections=drawn, now=instant(status.at).astimezone()
        )

    async def find(self, request: Request) -> Response:
        """Lead to the job, the GPU or the user that is asked for, or to jobs with such a name."""
        asked = request.query_params.get("q", "").strip()
        status = await self._live.status()
        if named := page_named(asked, status.gpus):
            target = named
        elif asked == "last" and (newest := await self._newest()):
            target = f"jobs/{newest}"
        elif await self._is_known(asked):
            target = f"users/{address(asked)}"
        else:
            target = f"jobs{Filter(name=asked[:LONGEST_NAME]).query()}"
        return RedirectResponse(target, 303)

    async def _is_known(self, user: str) -> bool:
        """Tell whether a user has, or had, a job on this machine."""
        return (
            (user, user) in _users(await self._live.status())
            or any(each.user == user for each in (await self._shares()).users)
            or bool((await self._past(Filter(user=user), limit=1)).jobs)
        )

    async def _unknown(self, wanted: Filter, gpus: Sequence[GpuView] = ()) -> Sequence[str]:
        """Say which user or GPU of a filter that nothing matches is not known here.

        A search for a user who is not known looks for jobs with this name.
        """
        asked = [each for each in (wanted.user, wanted.name) if each]
        said = [_no_user(each) for each in asked if not await self._is_known(each)]
        is_there = not wanted.gpu or wanted.gpu in map(index_of, gpus)
        return said if is_there else [*said, f"no GPU named {wanted.gpu!r}"]

    async def _newest(self) -> str:
        """Return the address of what was submitted last, by the user whose page this is if any."""
        status = await self._queue()
        past = await self._past(Filter(user=self.own_user or ""), limit=1)
        found: list[JobView | PastJobView] = [*past.jobs]
        found += [job for job in status.jobs if self.own_user in (None, job.user)]
        newest = max(found, key=lambda job: job.id, default=None)
        return "" if newest is None else address_of([newest])

    async def jobs(self, request: Request) -> Response:
        """Show a page of the jobs that run and wait, those that match the filter of the address."""
        wanted = filter_of(request.query_params)
        number = _number(request.query_params.get("page", "1"), _MOST_PAGES) or 1
        rows = number * ROWS
        # What is filtered is looked for in all of a queue.
        status = await (self._queue() if wanted.is_set else self._queue(rows))
        values = values_of(status)
        running = len(values["holding"])
        found = [job for job in values["queued"] if wanted.matches(job, status.gpus)]
        values["holding"] = [job for job in values["holding"] if wanted.matches(job, status.gpus)]
        values["queued"] = found[rows - ROWS : rows]
        values["groups"] = alike(values["queued"])
        more = len(found) > rows if wanted.is_set else jobs_in(found) < values["waiting"]
        unknown = [] if found or values["holding"] else await self._unknown(wanted, status.gpus)
        return page(
            request, "jobs.html", **values, filter=wanted, running=running, number=number,
            first=rows - ROWS + 1, more=more, users=_users(status), refresh=_REFRESH_S,
            unknown=unknown,
            gpus=[(index_of(each), index_of(each)) for each in status.gpus],
        )  # fmt: skip

    async def _queue(self, rows: int = _MOST_PAGES * ROWS) -> StatusView:
        return await self._daemon.ask(
            ("queue", rows), lambda client: client.status(rows), _QUEUE_FRESH_FOR_S
        )

    async def past(self, request: Request) -> Response:
        """Show ended jobs, the newest first: those with ids below `before`."""
        before = _number(request.query_params.get("before", ""), _LARGEST_ID)
        wanted = filter_of(request.query_params)
        found = await self._past(wanted, before)
        status = await self._live.status()
        return page(
            request, "past.html", found=found, is_first=before is None, filter=wanted, ends=ENDS,
            users=_users(status, (each.user for each in found.jobs)),
            unknown=[] if found.jobs else await self._unknown(wanted),
        )  # fmt: skip

    async def _past(
        self, wanted: Filter, before: int | None = None, limit: int = ROWS
    ) -> HistoryView:
        return await self._daemon.ask(
            ("past", wanted, before, limit),
            lambda client: client.history(
                wanted.user or None, outcome=wanted.end or None, name=wanted.pattern,
                before=before, limit=limit,
            ),
            _QUEUE_FRESH_FOR_S,
        )  # fmt: skip

    async def job(self, request: Request) -> Response:
        """Show one job: how it is or ended, what to do, its memory over time, its events."""
        asked = request.path_params["job"]
        job = await self.asked_job(request)
        if is_array(job, asked):
            return await self._array(request, job.id)
        status = await self._live.status()
        span, began, ended = _range(request, _OF_GPU, "hour")
        memory = await self._memory_of(job.id, None if span else (began, ended))
        now = instant(status.at).astimezone()
        return page(
            request, "job.html", job=job, labels=labels_of(status.gpus), now=now, asked=asked,
            charts=[] if memory is None else list(job_charts(memory, job.user)),
            remark=remark_on(job, job.leases, now), is_zoomed=not span,
            refresh=None if job.state == "ended" else _REFRESH_SOON_S,
            own=self.actions_on is not None,
            actions=self.actions_on(job) if self.actions_on else [],
        )  # fmt: skip

    async def asked_job(self, request: Request) -> JobView:
        """Return the job that the address names.

        Raises:
            NoSuchJob: it names none.
        """
        number = await self._number_of(request.path_params["job"])
        return await self._daemon.ask(("job", number), lambda client: client.job(number))

    async def _number_of(self, asked: str) -> int:
        """Return the number of the job 17, or of the last attempt of the element 17_3.

        Raises:
            NoSuchJob: that is neither, or there is no such element.
        """
        array, underscore, index = asked.partition("_")
        number, place = _number(array, _LARGEST_ID), _index(index)
        if number is not None and not underscore:
            return number
        if number is not None and place is not None:
            found = await self._daemon.ask(
                ("element", number, place), lambda client: client.elements(number, place)
            )
            if found:
                return found[-1].id
        raise NoSuchJob(f"no job {asked[:40]}")

    async def _array(self, request: Request, number: int) -> Response:
        """Show an array: how many of its elements wait, run and have ended."""
        now = datetime.now().astimezone()
        jobs = await self._daemon.ask(
            ("array", number), lambda client: client.elements(number), _ARRAY_FRESH_FOR_S
        )
        return page(
            request,
            "array.html",
            array=array_of(jobs, now),
            actions=any(self.actions_on(job) for job in jobs) if self.actions_on else False,
            now=now,
            most=_MOST_ROWS,
            links=_MOST_LINKS,
            refresh=_REFRESH_S,
        )

    async def _memory_of(self, job: int, zoom: tuple[float, float] | None) -> JobMemoryView | None:
        """Return the memory of a job over time, or of a part of it; None from an older daemon.

        `zoom` is its begin and end in seconds ago.
        """
        since, until = zoom or (None, None)
        try:
            return await self._daemon.ask(
                ("memory", job, zoom and tuple(map(round, zoom))),
                lambda client: client.job_memory(job, SOME_POINTS, since, until),
            )
        except NoSuchRoute:
            return None

    async def gpu(self, request: Request) -> Response:
        """Show one GPU: its state, who is on it, and its memory over time by owner."""
        name = request.path_params["gpu"]
        span, began, ended = _range(request, _OF_GPU, "hour")
        status = await self._live.status()
        history = await self._history(name, span, began, ended)
        values = values_of(status)
        found = next((each for each in status.gpus if each.uuid == history.gpu), None)
        here = [job for job in values["holding"] if any(it.gpu == history.gpu for it in job.leases)]
        return page(
            request, "gpu.html", **values, history=history, charts=list(gpu_charts(history)),
            spans=_OF_GPU, span=span, gpu=found, here=here, moves=_moves(began, ended),
            shown=[each for each in values["strangers"] if each[0] is found],
            refresh=_REFRESH_SOON_S if span == "hour" else _REFRESH_S if span else None,
        )  # fmt: skip

    async def _history(self, gpu: str, span: str, began: float, ended: float) -> GpuHistoryView:
        """Return what was recorded of a GPU from `began` to `ended` seconds ago."""
        key: tuple[object, ...] = ("gpu", gpu, span or (round(time.time() - began), round(ended)))
        return await self._daemon.ask(
            key,
            lambda client: client.gpu_history(gpu, began, ended, SOME_POINTS),
            min((began - ended) / SOME_POINTS / 2, _SLOW_FRESH_FOR_S),
        )

    async def user(self, request: Request) -> Response:
        """Show one user: jobs that run, wait and have ended, the share, use over time."""
        user, usual = request.path_params["user"][:LONGEST_NAME], "week"
        span, began, ended = _range(request, _OF_PEOPLE, usual)
        wanted = Filter(user=user)
        status = await self._queue()
        past = await self._past(wanted, limit=_OF_USER)
        report = await self._report(span or usual)
        people = _people(await self._shares(None if report is None else _HOUR_S), report)
        values = values_of(status)
        queued = [job for job in values["queued"] if job.user == user]
        values |= {
            "holding": [job for job in values["holding"] if job.user == user],
            "queued": queued[:_OF_USER],
            "groups": alike(queued[:_OF_USER]),
            "person": next((each for each in people if each.user == user), None),
            "colors": colors([user]),
        }
        if not past.jobs and not any(values[it] for it in ("holding", "queued", "person")):
            absent = GpuleaseError(_no_user(user), "the page of people has all who did")
            return page(request, "error.html", 404, error=absent, again=None)
        chart = user_chart(
            user,
            [await self._history(index_of(each), span, began, ended) for each in status.gpus],
        )
        return page(
            request, "user.html", **values, user=user, past=past.jobs,
            spans=_OF_PEOPLE, span=span or usual, filter=wanted, is_zoomed=not span,
            charts=[] if chart is None else [chart], more_waiting=len(queued) > _OF_USER,
            refresh=_REFRESH_S,
        )  # fmt: skip

    async def people(self, request: Request) -> Response:
        """Show what each user asked for, used and waited, those with the most use first."""
        span = _span(request, _OF_PEOPLE, "week")
        report = await self._report(span)
        # The report has the waits as well; adding them up twice takes the daemon twice as long.
        seconds = _SPANS[span].total_seconds() if report is None else _HOUR_S
        people = _people(await self._shares(seconds), report)
        return page(
            request, "people.html", people=people, reported=report is not None,
            spans=_OF_PEOPLE, span=span, colors=colors(each.user for each in people),
            refresh=_REFRESH_S,
        )  # fmt: skip

    async def _shares(self, waits_of_s: float | None = _HOUR_S) -> SharesView:
        return await self._daemon.ask(
            ("shares", waits_of_s), lambda client: client.shares(waits_of_s), _SLOW_FRESH_FOR_S
        )

    async def _report(self, span: str) -> ReportView | None:
        """Return what users asked for and used; None where the admin hides what they run."""
        seconds = _SPANS[span].total_seconds()
        try:
            return await self._daemon.ask(
                ("report", span), lambda client: client.report(None, seconds), _SLOW_FRESH_FOR_S
            )
        except NotAllowed:
            return None

    async def health(self, request: Request) -> Response:
        """Show the daemon's checks, the state of each GPU, and health events."""
        status = await self._live.status()
        doctor = await self._daemon.ask("doctor", lambda client: client.doctor())
        events = [(gpu, event) for gpu in status.gpus for event in gpu.events]
        events.sort(key=lambda each: each[1].at, reverse=True)
        return page(
            request, "health.html", status=status, events=events,
            checks=sorted(doctor.checks, key=lambda each: _WORST_FIRST.index(each.state)),
            gpus=sorted(status.gpus, key=lambda each: each.state == "available"),
            now=instant(status.at).astimezone(), refresh=_REFRESH_S,
        )  # fmt: skip


async def failed(request: Request, error: Exception) -> Response:
    """Show an error of the daemon. One that may pass reloads itself, also without scripts."""
    assert isinstance(error, GpuleaseError)
    passes = error.http_status >= 429
    status = 503 if passes else error.http_status
    headers = {"refresh": str(_AGAIN_AFTER_S), "retry-after": str(_AGAIN_AFTER_S)}
    return page(request, "error.html", status, headers if passes else None,
                 error=error, again=_AGAIN_AFTER_S if passes else None)  # fmt: skip


async def not_found(request: Request, error: Exception) -> Response:
    """Show that there is no such page."""
    missing = GpuleaseError("cannot find this page", "the links above lead to all pages")
    return page(request, "error.html", 404, error=missing, again=None)


def page(
    request: Request,
    template: str,
    status_code: int = 200,
    headers: Mapping[str, str] | None = None,
    **values: Any,
) -> Response:
    """Return a page; what follows what it shows is compressed, and has no token of a form."""
    html = render(template, request.scope["path"], **values).encode(errors="replace")
    if not values.get("refresh") or "gzip" not in request.headers.get("accept-encoding", ""):
        return HTMLResponse(html, status_code, headers)
    packed = gzip.compress(html, _GZIP_LEVEL, mtime=0)
    return HTMLResponse(packed, status_code, {**(headers or {}), **GZIP})


def is_array(job: JobView, asked: str) -> bool:
    """Tell whether an address names an array, which has the number of its first element."""
    return job.queue is not None and job.queue.array == job.id and "_" not in asked


def _number(text: str, most: int) -> int | None:
    """Read a number from 1 to `most`; None if it is none."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    return int(text) if is_number and 0 < int(text) <= most else None


def _index(text: str) -> int | None:
    """Read the index of an element; None if it is none."""
    return 0 if text == "0" else _number(text, LARGEST_INDEX)


def _span(request: Request, known: Sequence[str], usual: str) -> str:
    asked = request.query_params.get("span", usual)
    return asked if asked in known else usual


def _people(shares: SharesView, report: ReportView | None) -> list[_Person]:
    """Return all users of both views, those with the most use first."""
    if report is None:
        return [_Person(each.user, each, None, each) for each in shares.users]
    uses = {each.user: each for each in report.users}
    found = [
        _Person(each.user, each, use := uses.pop(each.user, None), use) for each in shares.users
    ]
    found += [_Person(user, None, use, use) for user, use in uses.items()]
    return sorted(found, key=lambda each: -each.use.used if each.use else 0.0)


def _no_user(user: str) -> str:
    return f"no user {user} has used this machine"


def _users(status: StatusView, others: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return users with jobs, as choices."""
    found = {job.user for job in status.jobs} | {it.user for it in status.waiting_by_user}
    return [(user, user) for user in sorted(found.union(others))]


def _range(request: Request, known: Sequence[str], usual: str) -> tuple[str, float, float]:
    """Return the span by its name, and its begin and end in seconds ago.

    The name is empty for a range that the address has as two instants, in seconds of the epoch.
    """
    asked, now = request.query_params, int(time.time())
    begin, end = (_number(asked.get(name, ""), now) for name in ("from", "to"))
    if begin is not None and end is not None and begin < end:
        began = min(now - begin, _LONGEST_S)
        return "", float(max(began, now - end + _SHORTEST_S)), float(now - end)
    span = _span(request, known, usual)
    return span, _SPANS[span].total_seconds(), 0.0


def _moves(began: float, ended: float) -> Mapping[str, str]:
    """Return the addresses of the ranges beside one, within and around it."""
    now, length = time.time(), began - ended

    def address(begin: float, end: float) -> str:
        return "?" + urlencode({"from": round(now - begin), "to": round(now - max(0.0, end))})

    return {
        "earlier": address(began + length / 2, ended + length / 2),
        "later": address(began - length / 2, ended - length / 2) if ended >= 1 else "",
        "closer": address(ended + max(_SHORTEST_S, length / 2), ended),
        "wider": address(began + length, ended),
    }
