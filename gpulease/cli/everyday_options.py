"""The options of everyday verbs, each once; those of `run` are in `gpulease.options`.

The declarations for typer and the quick parser are derived from them.
"""

from __future__ import annotations

from gpulease.options import OPTIONS as OPTIONS_OF_RUN
from gpulease.options import Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ENDS = (
    "ended", "exited", "failed", "signaled", "released", "cancelled", "time-limit", "over-lease",
    "idle", "gave-up", "preempted", "requeued", "dependency-failed", "launch-failed", "lost",
)  # fmt: skip
"""How a job ended; `failed` is any end without success."""
STATES = ("queued", "granted", "active", "suspended", "releasing", *ENDS)
"""A state, or how a job ended."""


def _flag(*flags: str, help: str) -> Option:
    return Option(flags, help, "Options", default=False, annotation="bool")


def _number(*flags: str, metavar: str, help: str) -> Option:
    return Option(flags, help, "Options", metavar=metavar, annotation="int | None")


def _text(*flags: str, metavar: str, help: str) -> Option:
    return Option(flags, help, "Options", metavar=metavar, annotation="str | None")


def _state(choices: tuple[str, ...], help: str) -> Option:
    annotation = f"Literal[{', '.join(map(repr, choices))}] | None"
    return Option(("--state",), help, "Options", metavar="STATE", annotation=annotation)


_JSON = _flag("--json", help="Print JSON.")
_USER = _text("-u", "--user", metavar="USER", help="Only jobs of this user.")
_YOUR_NAMES = _text(
    "-n", "--name", metavar="PATTERN", help="Your jobs with such names, as 'sweep*'."
)
_ALL_YOURS = _flag("-a", "--all", help="All your jobs that wait or run.")

OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "run": OPTIONS_OF_RUN,
    "status": {
        "json": _JSON,
        "queue": _text(
            "--queue", metavar="N",
            help="Show the first N waiting jobs, or all; default: 20, as far as they fit.",
        ),
        "watch": _text(
            "--watch", metavar="[SPAN]",
            help="Refresh in place every 2s (Slurm: 10s) or SPAN, until Ctrl-C or q.",
        ),
    },
    "list": {
        "everything": _flag("-a", "--all", help="Include ended jobs."),
        "user": _USER,
        "state": _state(STATES, "Only jobs in this state, or with this end: queued, failed, lost."),
        "limit": _text(
            "--limit", metavar="N", help="At most N jobs, or all; default: 100 on a terminal."
        ),
        "last": _text("--last", metavar="N", help="The last N jobs, ended ones included."),
        "since": _text(
            "--since", metavar="SPAN", help="Include jobs that ended in the last 12h, 30d."
        ),
        "name": _text("-n", "--name", metavar="PATTERN", help="Only jobs with such a name."),
        "json": _JSON,
    },
    "show": {
        "name": _YOUR_NAMES,
        "every": _ALL_YOURS,
        "plot": _flag("--plot", help="With charts of its memory over time."),
        "json": _flag("--json", help='Print JSON: the job, or {"jobs": [...]} for several.'),
    },
    "cancel": {
        "name": _YOUR_NAMES,
        "every": _ALL_YOURS,
        "user": _text(
            "-u", "--user", metavar="USER",
            help="Jobs of this user, all or with --name; for admins.",
        ),
        "grace": _text(
            "--grace", metavar="SPAN",
            help="Time between SIGTERM and SIGKILL, if that is shorter than the job's.",
        ),
    },
    "attach": {
        "name": _YOUR_NAMES,
        "watch": _flag("--watch", "--read-only", help="Only show output; send no input."),
        "detach_keys": OPTIONS_OF_RUN["detach_keys"],
    },
    "logs": {
        "name": _text("--name", metavar="PATTERN", help="Your jobs with such names, as 'sweep*'."),
        "every": _ALL_YOURS,
        "follow": _flag("-f", "--follow", help="Continue until the job has ended."),
        "tail": _number(
            "-n", "--tail", metavar="N", help="Only the last N lines of each stream."
        ),
        "stdout": _flag("--stdout", help="Only standard output."),
        "stderr": _flag("--stderr", help="Only standard error."),
    },
    "wait": {
        "name": _YOUR_NAMES,
        "every": _ALL_YOURS,
        "first": _flag("--any", help="Wait for one of them, and exit as it did."),
        "timeout": _text("--timeout", metavar="SPAN", help="Exit with 75 after this time."),
    },
    "extend": {"name": _YOUR_NAMES, "every": _ALL_YOURS},
    "history": {
        "user": _USER,
        "since": _text("--since", metavar="SPAN", help="All that ended in the last 30d, 12h."),
        "state": _state(ENDS, "Only jobs with this end: failed, cancelled, lost."),
        "name": _text(
            "-n", "--name", metavar="PATTERN", help="Only jobs with such names, as 'sweep*'."
        ),
        "limit": _text(
            "--limit", metavar="N",
            help="The latest N jobs, or all; default: 50, and all with --since or --csv.",
        ),
        "as_csv": _flag("--csv", help="Print a trace that gpulease replay reads."),
        "json": _JSON,
    },
}  # fmt: skip
"""By verb and parameter."""
_ON_JOBS = ("attach", "cancel", "logs", "show", "wait")
WORDS = {"run": "command", "extend": "words", **dict.fromkeys(_ON_JOBS, "jobs")}
"""The parameter of the words that are no options. Of `run`, options end there."""
