"""The verbs of every day, without typer."""

from __future__ import annotations

from gpulease.cli.quick_parser import parse, with_defaults
from gpulease.locations import environment, personal_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_OFF = "GPULEASE_QUICK_PARSER"
"""Set to "off", all lines are read by typer: for tests of both ways."""


_VERBS = {
    "run": ("run_job", "run_everyday"),
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
    if verb == "run" and _has_users_defaults(typed):
        return None
    module, function = _VERBS[verb]
    perform = getattr(__import__(f"gpulease.cli.{module}", fromlist=[function]), function)
    return perform(**with_defaults(verb, typed)) or 0


def _has_users_defaults(typed: Mapping[str, Any]) -> bool:
    """Return whether options of `run` may come from a file or a variable, see `run_defaults`."""
    is_within = environment().get("GPULEASE_JOB") and not typed.get("new_lease")
    if typed.get("no_defaults") or is_within:
        return False
    try:
        return bool(environment().get("GPULEASE_RUN_OPTIONS") or personal_config())
    except OSError:
        return True  # typer's way says what is wrong
