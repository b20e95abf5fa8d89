"""The templates of the page: every text in them is cleaned and escaped."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from gpulease import __version__
from gpulease.drawing import endings, words
from gpulease.drawing.arrays import indices_of
from gpulease.drawing.gpus import exclusive_job, models, notes
from gpulease.units import format_span
from gpulease.web.bars import UNKNOWN, bar_of, folded, held_by, known_size
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import CheckView, GpuView
from gpulease.wire.text import (
    claimed,
    clean,
    ending,
    has_failed,
    leased,
    model,
    ordinal,
    shown_command,
    spoken,
    used_without_lease,
)
from gpulease.wire.usage import PastJobView


def span(seconds: float) -> str:
    """Write a length of time."""
    return format_span(timedelta(seconds=seconds))


def time(
    written: str | None, now: datetime, *, seconds: bool = False, ago: bool = False
) -> Markup | str:
    """Write an instant, or `ago` how far away it is too; scripts put it into the viewer's zone."""
    if written is None:
        return UNKNOWN
    text, away = words.clock(written, now, seconds=seconds), now - words.instant(written)
    marks = " data-ago" * ago + " data-seconds" * seconds
    if ago:
        length = words.span_in_minutes(abs(away))
        text += f", in {length}" if away < timedelta(0) else f", {length} ago"
    at = words.instant(written).astimezone(UTC).isoformat(timespec="seconds")
    return Markup('<time datetime="{}"{}>{}</time>').format(at, Markup(marks), text)  # noqa: S704


_NAMED = re.compile(
    r"\b(jobs?|GPUs?) (\d+(?:[_:]\d+)?(?:(?:, (?:or )?| or | and )\d+(?:[_:]\d+)?)*)"
)
_NUMBER = re.compile(r"\d+(?:[_:]\d+)?")


def linked(text: str, root: str) -> Markup:
    """Return a sentence of the daemon with links for the jobs and GPUs that it names."""

    def link(found: re.Match[str]) -> str:
        page = "jobs" if found[1].startswith("job") else "gpus"
        numbers = _NUMBER.sub(rf'<a class="in" href="{root}{page}/\g<0>">\g<0></a>', found[2])
        return f"{found[1]} {numbers}"

    # What is a number before escaping is one after it, and nothing else gets into a tag.
    return Markup(_NAMED.sub(link, str(escape(clean(text)))))  # noqa: S704


def address(user: str) -> str:
    """Return the name of a user as a part of an address."""
    return quote(user, safe="", errors="replace")


def counted(checks: Sequence[CheckView]) -> str:
    """Write how many checks have failed, warn and are fine."""
    states: list[str] = [check.state for check in checks]
    named = ("failure", "failures"), ("warning", "warnings"), ("ok", "ok")
    counts = [(states.count(state), state, many) for state, many in named]
    return ", ".join(f"{n} {one if n == 1 else many}" for n, one, many in counts if n)


def address_of(jobs: Sequence[JobView | PastJobView]) -> str:
    """Return the last part of the address of jobs in one row; the bare id of an array is all."""
    job = jobs[0]
    queue = job.queue if isinstance(job, JobView) else None
    if queue is not None and (len(jobs) > 1 or queue.array_waiting is not None):
        return str(queue.array)
    return job.label if job.label.startswith(f"{job.id}_") else str(job.id)


def state_of(job: JobView) -> str:
    """Write the state of a job, or how it ended."""
    return words.label(job) if job.state != "ended" else ending(job)


def reason_of(job: JobView) -> str:
    """Write why a job waits or how it ended, unless state and exit status say it."""
    return "" if job.reason in (None, f"exited with {job.exit_status}") else job.reason or ""


def kind_of(job: JobView | PastJobView) -> str:
    """Write what sets a job apart from one that was run: a hold, or a job of Slurm."""
    if job.slurm_job is not None:
        return "Slurm"
    return "hold" if job.kind == "hold" else ""


def machine_models(gpus: Sequence[GpuView]) -> str:
    """Write the models of all GPUs: 4 x A100 24G."""
    return models([(words.index_of(gpu), model(gpu.name, gpu.memory.total)) for gpu in gpus])


_FILTERS: Mapping[str, Callable[..., Any]] = {
    "address": address,
    "address_of": address_of,
    "amount": words.amount,
    "between": words.between,
    "cpu_time": endings.cpu_time,
    "claimed": claimed,
    "counted": counted,
    "ending": ending,
    "event_detail": endings.event_detail,
    "figure": partial(words.figure, unknown=UNKNOWN),
    "gib_hours": words.gib_hours,
    "gpu_label": words.index_of,
    "has_failed": has_failed,
    "has_seconds": endings.has_seconds,
    "how_it_ended": endings.how_it_ended,
    "ids_of": words.ids_of,
    "in_the_way": words.in_the_way,
    "indices_of": indices_of,
    "jobs_in": words.jobs_in,
    "kind_of": kind_of,
    "ordinal": ordinal,
    "ram_use": endings.ram_use,
    "probable_start": words.probable_start,
    "reason_of": reason_of,
    "shown_command": shown_command,
    "size": known_size,
    "is_asked_back": words.is_asked_back,
    "leased": leased,
    "linked": linked,
    "needed": endings.needed,
    "span": span,
    "starts_in": words.starts_in,
    "state_of": state_of,
    "steps": endings.steps,
    "spoken": spoken,
    "until": partial(words.until, write=words.span_in_minutes),
    "until_now": words.minutes_since,
    "which_try": endings.which_try,
}


def _finalize(value: Any) -> Any:
    """Clean what a template prints. What users write goes through this, wherever it stands."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return clean(value)
    return value


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("gpulease.web"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(_FILTERS)
    made.globals.update(
        version=__version__,
        bar_of=bar_of,
        commands=endings.commands,
        exclusive_job=exclusive_job,
        folded=folded,
        held_by=held_by,
        machine_models=machine_models,
        notes=notes,
        time=time,
        used_without_lease=used_without_lease,
    )
    return made


_ENVIRONMENT = _environment()
# Compiled at the start: a sandbox may hide their files later.
_TEMPLATES = {name: _ENVIRONMENT.get_template(name) for name in _ENVIRONMENT.list_templates()}


def render(name: str, path: str, **values: Any) -> str:
    """Return a page for the request of `path`, from which its links are relative.

    So they work under any path of a proxy.
    """
    root = "../" * (path.count("/") - 1) or "./"
    now = values.pop("now", None) or datetime.now().astimezone()
    return _TEMPLATES[name].render(root=root, now=now, **values)
