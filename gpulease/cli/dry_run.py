"""`gpulease run --dry-run`: what would happen to a job, without submitting it."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from gpulease.cli.caller import environment
from gpulease.cli.job_page import labelled, predicted, refusal_table, suggestion_text
from gpulease.cli.render import print_stdout, screen_of, show_page
from gpulease.cli.tables import Page, Span
from gpulease.client import Client, decode
from gpulease.drawing.words import behind_of, clean, clock, id_of, in_the_way, sentence
from gpulease.errors import EXIT_GAVE_UP
from gpulease.light_json import indent
from gpulease.units import format_span
from gpulease.wire.jobs import ExplainView, NestedView
from gpulease.wire.requests import SubmitRequest
from gpulease.wire.text import claimed, ordinal


def dry_run(client: Client, request: SubmitRequest, outer: NestedView | None, *, json: bool) -> int:
    """Print what would happen to a job; return 0 if it would start now, else 75.

    `outer` is the lease that the command would run within.
    """
    if outer is not None and outer.job is not None:
        print_stdout(f"would run at once, within the lease of job {id_of(outer.job)}")
        return 0
    reply = client.explain_json(request)
    view = decode(ExplainView, reply)
    if json:
        print_stdout(indent(reply))
    else:
        now = datetime.now(UTC).astimezone()
        show_page(page(view, now), screen_of(sys.stdout, environment()))
    return 0 if view.starts_now else EXIT_GAVE_UP


def page(view: ExplainView, now: datetime) -> Page:
    """Lay out what would happen to a job."""
    return [
        (Span(_summary(view), "title"),),
        *(labelled(name, text) for name, text in _fields(view, now) if text),
        *refusal_table(view.refusals),
    ]


def _summary(view: ExplainView) -> str:
    if view.starts_now:
        return f"would start now on {'GPU' if len(view.gpus) == 1 else 'GPUs'} " + ", ".join(
            clean(each) for each in view.gpus
        )
    if view.preempts:
        jobs = ", ".join(map(str, view.preempts))
        named, have = ("job", "has") if len(view.preempts) == 1 else ("jobs", "have")
        return f"would start when {named} {jobs} {have} made way"
    return f"would wait, {ordinal(view.position)} in line" if view.position else "would wait"


def _fields(view: ExplainView, now: datetime) -> Iterator[tuple[str, str | None]]:
    yield "reason", sentence(view.reason) if view.reason else None
    yield "begin", f"not before {clock(view.begin_at, now)}" if view.begin_at else None
    yield "waits for", ", ".join(f"job {each}" for each in in_the_way(view))
    yield "behind", f"the reservation of job {behind_of(view)}" if view.behind else None
    yield "starts", predicted(view.expected_start_at, now)
    for each in view.suggestions:
        yield "starts now", suggestion_text(each)
    yield "asks", claimed(view.claim)
    yield "size", clean(view.sized) if view.sized else None
    yield "runs for", f"{format_span(timedelta(seconds=view.runs_for))} (a prediction)"
