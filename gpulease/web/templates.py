"""The templates of the page: every text in them is cleaned and escaped."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gpulease import __version__
from gpulease.web import text
from gpulease.web.bars import bar_of, exclusive_job
from gpulease.wire.text import (
    claimed,
    ending,
    has_failed,
    ordinal,
    printable,
    shown_command,
    spoken,
)
from gpulease.wire.unmanaged import used_without_lease

_FILTERS: tuple[Callable[..., Any], ...] = (
    text.address_of,
    text.between,
    claimed,
    text.clock,
    ending,
    text.event_time,
    text.figure,
    text.gib_hours,
    text.gpu_label,
    has_failed,
    text.id_of,
    text.kind_of,
    ordinal,
    text.reason_of,
    text.remark_on,
    shown_command,
    text.since,
    text.size,
    text.span,
    text.state_of,
    spoken,
    text.until,
)


def _finalize(value: Any) -> Any:
    """Clean what a template prints. What users write goes through this, wherever it stands."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
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
    made.filters.update({each.__name__: each for each in _FILTERS})
    made.globals.update(
        version=__version__,
        bar_of=bar_of,
        exclusive_job=exclusive_job,
        labels_of=text.labels_of,
        models_of=text.models_of,
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
