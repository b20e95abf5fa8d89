"""The pages: each asks the daemon, and draws a template."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from gpulease.drawing.arrays import array_of
from gpulease.drawing.charts import (
    Chart,
    Curve,
    mean_curve,
    memory_chart,
    peak_band,
    plain_chart,
)
from gpulease.drawing.words import instant, jobs_in, labels_of
from gpulease.errors import GpuleaseError, NoSuchJob, NoSuchRoute, NotAllowed
from gpulease.web.daemon_reader import DaemonReader
from gpulease.web.live import LiveStatus, sections, values_of
from gpulease.web.templates import colors, render
from gpulease.wire.history import SOME_POINTS, GpuHistoryView, JobMemoryView, MeanView
from gpulease.wire.jobs import JobView
from gpulease.wire.text import LARGEST_INDEX
from gpulease.wire.usage import ReportView, SharesView, ShareView, UseView

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
    share: ShareView | None
    use: UseView | None
    waits: UseView | ShareView | None


class Pages:
    """One method for each page."""

    def __init__(self, daemon: DaemonReader, live: LiveStatus) -> None:
        self._daemon = daemon
        self._live = live
        self.actions_on: Callable[[JobView], Sequence[object]] | None = None
        """What the user can do with a job; None where nobody acts."""

    async def now(self, request: Request) -> Response:
        """Show the machine now; live where the browser runs scripts."""
        status = await self._live.status()
        drawn = {name: Markup(html) for name, html in sections(status).items()}  # noqa: S704
        return page(
            request, "now.html", status=status, sections=drawn, now=instant(status.at).astimezone()
        )

    async def queue(self, request: Request) -> Response:
        """Show a page of the queue, in its order, with reasons and expected starts."""
        number = _number(request.query_params.get("page", "1"), _MOST_PAGES) or 1
        rows = number * ROWS
        status = await self._daemon.ask(
            ("queue", rows), lambda client: client.status(rows), _QUEUE_FRESH_FOR_S
        )
        values = values_of(status)
        found = jobs_in(values["queued"])
        waiting = found if status.waiting is None else status.waiting
        values["queued"] = values["queued"][rows - ROWS :]
        return page(
            request, "queue.html", **values, number=number, first=rows - ROWS + 1, waiting=waiting,
            more=found < waiting,
        )  # fmt: skip

    async def past(self, request: Request) -> Response:
        """Show ended jobs, the newest first: those with ids below `before`."""
        before = _number(request.query_params.get("before", ""), _LARGEST_ID)
        found = await self._daemon.ask(
            ("past", before),
            lambda client: client.history(before=before, limit=ROWS),
            _QUEUE_FRESH_FOR_S,
        )
        return page(request, "past.html", found=found, is_first=before is None)

    async def job(self, request: Request) -> Response:
        """Show one job: its claim, its leases, its memory over time, its events."""
        asked = request.path_params["job"]
        job = await self.asked_job(request)
        number = job.id
        if job.queue is not None and job.queue.array == job.id and "_" not in asked:
            return await self._array(request, number)
        status = await self._live.status()
        memory = await self._memory_of(number)
        charts = [] if memory is None else list(_job_charts(memory, job.user))
        return page(
            request, "job.html", job=job, charts=charts, labels=labels_of(status.gpus),
            asked=asked, own=self.actions_on is not None,
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
            now=now,
            most=_MOST_ROWS,
            links=_MOST_LINKS,
        )

    async def _memory_of(self, job: int) -> JobMemoryView | None:
        """Return the memory of a job over time; None from an older daemon."""
        try:
            return await self._daemon.ask(
                ("memory", job), lambda client: client.job_memory(job, SOME_POINTS)
            )
        except NoSuchRoute:
            return None

    async def gpu(self, request: Request) -> Response:
        """Show the memory of one GPU over time, by owner."""
        name, span = request.path_params["gpu"], _span(request, _OF_GPU, "hour")
        status = await self._live.status()
        seconds = _SPANS[span].total_seconds()
        history = await self._daemon.ask(
            ("gpu", name, span),
            lambda client: client.gpu_history(name, seconds, 0, SOME_POINTS),
            min(seconds / SOME_POINTS / 2, _SLOW_FRESH_FOR_S),
        )
        return page(
            request, "gpu.html", history=history, charts=list(gpu_charts(history)),
            spans=_OF_GPU, span=span, gpus=status.gpus,
        )  # fmt: skip

    async def people(self, request: Request) -> Response:
        """Show what each user asked for, used and waited."""
        span = _span(request, _OF_PEOPLE, "week")
        seconds = _SPANS[span].total_seconds()
        report = await self._report(span, seconds)
        # The report has the waits as well; adding them up twice takes the daemon twice as long.
        waits_of_s = seconds if report is None else _HOUR_S
        shares = await self._daemon.ask(
            ("shares", waits_of_s), lambda client: client.shares(waits_of_s), _SLOW_FRESH_FOR_S
        )
        return page(
            request, "people.html", people=_people(shares, report), reported=report is not None,
            spans=_OF_PEOPLE, span=span,
        )  # fmt: skip

    async def _report(self, span: str, seconds: float) -> ReportView | None:
        """Return what users asked for and used; None where the admin hides what they run."""
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
            now=instant(status.at).astimezone(),
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
    """Return a page."""
    html = render(template, request.scope["path"], **values)
    return HTMLResponse(html.encode(errors="replace"), status_code, headers)


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
    """Return all users of both views, those with a share first."""
    if report is None:
        return [_Person(each.user, each, None, each) for each in shares.users]
    uses = {each.user: each for each in report.users}
    found = [
        _Person(each.user, each, use := uses.pop(each.user, None), use) for each in shares.users
    ]
    return found + [_Person(user, None, use, use) for user, use in uses.items()]


def _job_charts(memory: JobMemoryView, user: str) -> Iterator[Chart]:
    for each in memory.gpus:
        mean, busy = each.means.get("used"), each.means.get("utilization")
        kind = f"used {colors([user])[user]}"
        used = replace(mean_curve(kind, "used", each.used, mean), is_stacked=False)
        curves = [
            *peak_band("peak of use", each.used, mean),
            used,
            Curve("pool", "in memory pools of frameworks", each.pool, is_line=True),
            Curve("lease", "lease", [each.leased] * len(each.used), is_line=True),
        ]
        known = [it for it in curves if any(value is not None for value in it.peaks or it.values)]
        title = f"Memory on GPU {each.label}"
        yield from _drawn(memory_chart(title, memory.begins_at, memory.step, known))
        yield from _plain(memory, f"Utilization of GPU {each.label}", "%", 100,
                          "utilization", each.utilization, busy)  # fmt: skip


def gpu_charts(history: GpuHistoryView) -> Iterator[Chart]:
    color, mean = colors(each.user for each in history.owners), history.means.get
    curves = peak_band("peak of use", history.used, mean("used"))
    for each in history.owners:
        kind, name = f"used {color.get(each.user, 'others')}", each.user or "other users"
        curves.append(mean_curve(kind, name, each.used, each.mean))
    curves.append(mean_curve("unmanaged", "no lease", history.unmanaged, mean("unmanaged")))
    curves.append(mean_curve("lease", "leased", history.leased, mean("leased"), is_line=True))
    total: list[float | None] = [history.total] * len(history.used)
    curves.append(Curve("total", "all memory", total, is_line=True))
    if any(value is not None for value in (*history.used, *history.leased)):
        yield from _drawn(memory_chart("Memory", history.begins_at, history.step, curves))
    for title, unit, top, values in (
        ("Utilization", "%", 100, history.utilization),
        ("Temperature", " °C", 0, history.temperature),
        ("Power", " W", 0, history.power),
    ):
        name = title.lower()
        yield from _plain(history, title, unit, top, name, values, mean(name))


def _plain(
    over: GpuHistoryView | JobMemoryView,
    title: str,
    unit: str,
    top: float,
    name: str,
    values: Sequence[int | None],
    mean: MeanView | None,
) -> Iterator[Chart]:
    """Yield a chart of one value: its means as a line, its largest values as a band."""
    line = mean_curve("busy", name, values, mean, is_line=True)
    curves = [*peak_band(f"peak of {name}", values, mean), line]
    yield from _drawn(plain_chart(title, over.begins_at, over.step, curves, unit, top))


def _drawn(chart: Chart | None) -> Iterator[Chart]:
    if chart is not None:
        yield chart
