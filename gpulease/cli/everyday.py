"""The verbs of every day, without typer."""

from __future__ import annotations

import gc

from gpulease.cli.quick_parser import NotUnderstood, parse, with_defaults
from gpulease.errors import GpuleaseError
from gpulease.locations import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_SWITCH = "GPULEASE_QUICK_PARSER"
"""Set to "off", all lines are read by typer: for tests of both ways."""
_VERBS = {
    "status": ("status_page", "print_status"),
    "list": ("list_page", "print_list"),
    "show": ("show_jobs", "print_jobs"),
    "cancel": ("cancel_jobs", "cancel_jobs"),
    "history": ("list_page", "print_history"),
}
"""The module and the function that does what the verb is for."""


def run_everyday(line: Sequence[str]) -> int | None:
    """Run a command line, and return its exit code; None if typer has to read the line."""
    if environment().get(_SWITCH) == "off" or (parsed := parse(line)) is None:
        return None
    verb, typed = parsed
    if verb == "run":
        return _run(typed)
    gc.disable()  # otherwise it scans a long list many times while the list is read
    module, function = _VERBS[verb]
    perform = getattr(__import__(f"gpulease.cli.{module}", fromlist=[function]), function)
    return perform(**with_defaults(verb, typed)) or 0


def _run(typed: dict[str, Any]) -> int | None:
    from gpulease.cli.quick_defaults import quick_defaults
    from gpulease.cli.run_job import run_job
    from gpulease.options import run_options

    try:
        defaults = quick_defaults(typed, environment())
    except NotUnderstood:
        return None
    values = with_defaults("run", {name: each.value for name, each in defaults.items()} | typed)
    command, socket = values.pop("command") or [], values.pop("socket")
    try:
        return run_job(run_options(values), command, socket, must_copy="snapshot" in typed)
    except GpuleaseError as error:
        if in_effect := [each for name, each in defaults.items() if name not in typed]:
            from gpulease.cli.run_defaults import name_sources

            name_sources(error, in_effect)
        raise
