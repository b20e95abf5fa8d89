"""The verbs of every day, without typer."""

from __future__ import annotations

from gpulease.cli.quick_parser import parse, with_defaults
from gpulease.locations import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_OFF = "GPULEASE_QUICK_PARSER"
"""Set to "off", all lines are read by typer: for tests of both ways."""


_VERBS = {
    "status": ("status_page", "print_status"),
    "list": ("list_page", "print_list"),
    "show": ("show_jobs", "print_jobs"),
    "cancel": ("cancel_jobs", "cancel_jobs"),
}
"""The module and the function that does what the verb is for."""


def run_everyday(line: Sequence[str]) -> int | None:
    """Run a command line, and return its exit code; None if typer has to read the line."""
    if environment().get(_OFF) == "off" or (parsed := parse(line)) is None:
        return None
    verb, typed = parsed
    module, function = _VERBS[verb]
    perform = getattr(__import__(f"gpulease.cli.{module}", fromlist=[function]), function)
    return perform(**with_defaults(verb, typed)) or 0
