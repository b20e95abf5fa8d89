"""The options and arguments of everyday verbs, each once; those of `run` are in `gpulease.options`.

The declarations for typer, the quick parser and completion are derived from them. Those of the
other verbs are in `further_options`.
"""

from __future__ import annotations

from gpulease.options import OPTIONS as OPTIONS_OF_RUN
from gpulease.options import Option
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENDS = (
    "ended", "exited", "failed", "signaled", "released", "cancelled", "time-limit", "over-lease",
    "idle", "gave-up", "preempted", "requeued", "dependency-failed", "launch-failed", "lost",
)  # fmt: skip
"""How a job ended; `failed` is any end without success."""
STATES = ("queued", "granted", "active", "suspended", "releasing", *ENDS)
"""A state, or how a job ended."""


def flag(*flags: str, help: str, panel: str = "Options") -> Option:
    """Return an option without a value."""
    return Option(flags, help, panel, default=False, annotation="bool")


def number(*flags: str, metavar: str, help: str, panel: str = "Options") -> Option:
    """Return an option with a whole number."""
    return Option(flags, help, panel, metavar=metavar, annotation="int | None")


def text(
    *flags: str, metavar: str, help: str, panel: str = "Options", default: str | None = None
) -> Option:
    """Return an option with any value."""
    kind = "str | None" if default is None else "str"
    return Option(flags, help, panel, metavar=metavar, annotation=kind, default=default)


def choice(
    flag: str,
    choices: Sequence[str],
    *,
    help: str,
    metavar: str | None = None,
    default: str | None = None,
) -> Option:
    """Return an option with one of some values."""
    kind = f"Literal[{', '.join(map(repr, choices))}]" + (" | None" if default is None else "")
    return Option((flag,), help, "Options", metavar=metavar, annotation=kind, default=default)


JSON = flag("--json", help="Print JSON.")
USER = text("-u", "--user", metavar="USER", help="Only jobs of this user.")
YOUR_NAMES = text("-n", "--name", metavar="PATTERN", help="Your jobs with such names, as 'sweep*'.")
ALL_YOURS = flag("-a", "--all", help="All your jobs that wait or run.")

OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "run": OPTIONS_OF_RUN,
    "status": {
        "json": JSON,
        "queue": text(
            "--queue", metavar="N",
            help="Show the first N waiting jobs, or all; default: 20, as far as they fit.",
        ),
        "topology": flag("--topology", help="Show the links between GPUs, and their sockets."),
        "watch": text(
            "--watch", metavar="[SPAN]",
            help="Refresh in place every 2s (Slurm: 10s) or SPAN, until Ctrl-C or q.",
        ),
    },
    "list": {
        "everything": flag("-a", "--all", help="Include ended jobs."),
        "user": USER,
        "state": choice(
            "--state", STATES, metavar="STATE",
            help="Only jobs in this state, or with this end: queued, failed, lost.",
        ),
        "limit": text(
            "--limit", metavar="N", help="At most N jobs, or all; default: 100 on a terminal."
        ),
        "last": text("--last", metavar="N", help="The last N jobs, ended ones included."),
        "since": text(
            "--since", metavar="SPAN", help="Include jobs that ended in the last 12h, 30d."
        ),
        "name": text("-n", "--name", metavar="PATTERN", help="Only jobs with such a name."),
        "json": JSON,
    },
    "show": {
        "name": YOUR_NAMES,
        "every": ALL_YOURS,
        "plot": flag("--plot", help="With charts of its memory over time."),
        "json": flag("--json", help='Print JSON: the job, or {"jobs": [...]} for several.'),
    },
    "cancel": {
        "name": YOUR_NAMES,
        "every": ALL_YOURS,
        "user": text(
            "-u", "--user", metavar="USER",
            help="Jobs of this user, all or with --name; for admins.",
        ),
        "grace": text(
            "--grace", metavar="SPAN",
            help="Time between SIGTERM and SIGKILL, if that is shorter than the job's.",
        ),
    },
    "attach": {
        "name": YOUR_NAMES,
        "watch": flag("--watch", "--read-only", help="Only show output; send no input."),
        "detach_keys": OPTIONS_OF_RUN["detach_keys"],
    },
    "logs": {
        "name": text("--name", metavar="PATTERN", help="Your jobs with such names, as 'sweep*'."),
        "every": ALL_YOURS,
        "follow": flag("-f", "--follow", help="Continue until the job has ended."),
        "tail": number(
            "-n", "--tail", metavar="N", help="Only the last N lines of each stream."
        ),
        "stdout": flag("--stdout", help="Only standard output."),
        "stderr": flag("--stderr", help="Only standard error."),
    },
    "wait": {
        "name": YOUR_NAMES,
        "every": ALL_YOURS,
        "first": flag("--any", help="Wait for one of them, and exit as it did."),
        "timeout": text("--timeout", metavar="SPAN", help="Exit with 75 after this time."),
    },
    "extend": {"name": YOUR_NAMES, "every": ALL_YOURS},
    "history": {
        "user": USER,
        "since": text("--since", metavar="SPAN", help="All that ended in the last 30d, 12h."),
        "state": choice(
            "--state", ENDS, metavar="STATE",
            help="Only jobs with this end: failed, cancelled, lost.",
        ),
        "name": text(
            "-n", "--name", metavar="PATTERN", help="Only jobs with such names, as 'sweep*'."
        ),
        "limit": text(
            "--limit", metavar="N",
            help="The latest N jobs, or all; default: 50, and all with --since or --csv.",
        ),
        "as_csv": flag("--csv", help="Print a trace that gpulease replay reads."),
        "json": JSON,
    },
}  # fmt: skip
"""By verb and parameter."""


@record(frozen=True)
class Argument:
    """The words of a line that are no options."""

    name: str
    """Of the parameter."""
    metavar: str
    is_list: bool = True
    is_required: bool = False
    choices: tuple[str, ...] = ()


JOBS = Argument("jobs", "JOB")
ARGUMENTS: Mapping[str, tuple[Argument, ...]] = {
    "run": (Argument("command", "COMMAND"),),
    "extend": (Argument("words", "JOB", is_required=True),),
    **dict.fromkeys(("attach", "cancel", "logs", "show", "wait"), (JOBS,)),
}
"""By verb, in their order. Of `run`, options end at the first."""
