"""The options and arguments of the verbs that are no everyday ones, as in `everyday_options`."""

from __future__ import annotations

from gpulease.cli.everyday_options import (
    ALL_YOURS,
    JOBS,
    JSON,
    YOUR_NAMES,
    Argument,
    choice,
    flag,
    number,
    text,
)
from gpulease.options import OPTIONS as OPTIONS_OF_RUN
from gpulease.options import Option
from gpulease.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SHELLS = ("bash", "zsh", "fish")


def _changed(option: Option, help: str | None, panel: str = "Options") -> Option:
    """Return an option of `run` as a verb has it that changes a job: what is not given is None."""
    has_opposite = (
        option.is_flag and "/" not in option.flags[-1] and not option.long.startswith("--no-")
    )
    last = f"{option.long}/--no-{option.long[2:]}"
    flags = (*option.flags[:-1], last) if has_opposite else option.flags
    kind = option.annotation.removesuffix(" | None")
    if option.clears and kind == "int":
        kind = "str"  # as is the word that takes the number away
    return replace(
        option, flags=flags, help=help or "", panel=panel, default=None, annotation=f"{kind} | None"
    )  # fmt: skip


_NOT_OF_AGAIN = frozenset({
    "array", "dry", "grid", "json", "new_lease", "no_defaults", "no_script_options", "shell",
    "slurm", "snapshot", "snapshot_dir",
})  # fmt: skip
"""Options of `run` about how the command is found, or about what is no single new job."""


def _list(*flags: str, metavar: str, help: str) -> Option:
    return Option(flags, help, "Options", default=(), metavar=metavar, annotation="Sequence[str]")


_WHY = text("--why", metavar="TEXT", help="The reason, shown to all users.")

OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "hold": {
        **{name: each for name, each in OPTIONS_OF_RUN.items() if each.holds},
        "lasts": text(
            "--for", metavar="SPAN", help="Release after this time: 90s, 30m, 4h.",
            panel="Resources",
        ),
        "pid": number(
            "--pid", metavar="PID", help="Hold until this process ends.", panel="Resources"
        ),
        "shell": choice(
            "--shell", ("sh", "fish", "csh"), help="The syntax to print; default: your shell's."
        ),
        "as_json": flag("--json", help="Print the lease as JSON."),
    },
    "adopt": {
        "mem": text(
            "--mem", metavar="SIZE", help="More than it holds now, on each of its GPUs."
        ),
        "lasts": text("--for", "--time", metavar="SPAN", help="Release after this time."),
        "name": OPTIONS_OF_RUN["name"],
        "as_json": flag("--json", help="Print the lease as JSON."),
    },
    "top": {
        "every": text(
            "--every", metavar="SPAN", help="Time between two looks; default: 2s.", default="2s"
        ),
        "mouse": flag("--mouse", help="Select rows and scroll with the mouse."),
    },
    "web": {
        "open": flag("--open", help="Open a browser on this machine, in place of ssh."),
        "host": _list(
            "--host", metavar="NAME", help="The name of a proxy that browsers use; repeatable."
        ),
    },
    "edit": {
        name: _changed(each, each.edits) for name, each in OPTIONS_OF_RUN.items() if each.edits
    },
    "again": {
        name: _changed(each, each.help, each.panel)
        for name, each in OPTIONS_OF_RUN.items() if name not in _NOT_OF_AGAIN
    },
    "move": {
        "before": text("--before", metavar="JOB", help="Start before this job."),
        "first": flag("--first", help="Start before your other jobs."),
    },
    "requeue": {"name": YOUR_NAMES, "every": ALL_YOURS},
    "keep": {
        "name": YOUR_NAMES,
        "every": ALL_YOURS,
        "span": text(
            "--for", metavar="SPAN", help="For how long, at most a day; default: 1h.", default="1h"
        ),
    },
    "drain": {"why": _WHY},
    "resume": {},
    "plot": {
        "gpu": text("--gpu", metavar="GPU", help="A GPU in place of a job: its index or UUID."),
        "since": text(
            "--since", metavar="SPAN", help="With --gpu: the last 7d, 2h; default: 24h."
        ),
        "by": choice("--by", ("user",), metavar="user", help="With --gpu: what each user used."),
        "out": text("--out", metavar="FILE", help="Draw into a file: use.svg or use.png."),
        "json": flag("--json", help="Print the series as JSON."),
    },
    "pause": {"why": _WHY},
    "unpause": {},
    "reserve": {
        "gpus": text("--gpus", metavar="N|all", help="So many GPUs, whichever."),
        "gpu": _list("--gpu", metavar="GPU", help="This GPU: an index or a UUID; repeatable."),
        "begin": text(
            "--from", metavar="WHEN", help="22:00, 'fri 18:00', '2026-12-04 18:00', +2h."
        ),
        "span": text("--for", metavar="SPAN", help="How long: 12h, 1d, 30m."),
        "every": text(
            "--every", metavar="CRON", help="Recur: minute hour day month weekday."
        ),
        "user": _list(
            "-u", "--user", metavar="USER", help="For jobs of this user; repeatable."
        ),
        "group": _list("--group", metavar="GROUP", help="For jobs of this group; repeatable."),
        "lift_limits": flag(
            "--lift-limits", help="Limits do not hold back its users' jobs then."
        ),
        "name": text(
            "--name", metavar="NAME", help="Default: that of the first user or group."
        ),
        "cancel": text("--cancel", metavar="NAME", help="Remove a window."),
        "shows": flag("--list", help="Show the windows; the default."),
        "json": JSON,
    },
    "notify": {
        "is_test": flag("--test", help="Send a test message, and show what happens."),
        "as_json": JSON,
    },
    "report": {
        "user": text("-u", "--user", metavar="USER", help="Jobs of this user; default: you."),
        "everyone": flag("-a", "--all", help="Jobs of all users."),
        "since": text(
            "--since", metavar="SPAN", help="Only jobs that ended in the last 7d, 12h, or run."
        ),
        "by": choice(
            "--by", ("user", "group", "week", "month"), default="user",
            help="What jobs are summed up by; default: user.",
        ),
        "shares": flag(
            "--shares", help="The users of the queue: use, share, waits, and whose turn it is."
        ),
        "as_csv": flag("--csv", help="Print CSV."),
        "json": JSON,
    },
    "replay": {
        "servers": text(
            "--servers", metavar="SERVERS",
            help="What they run on: 6x8x24G, or several kinds: 6x8x24G,2x4x80G.",
        ),
        "policy": choice(
            "--policy", ("fair", "easy", "fifo"), default="fair",
            help="The order of the queue; default: fair.",
        ),
        "whole_gpus": flag("--whole-gpus", help="Give each job whole GPUs, whatever it asks for."),
        "contention": choice(
            "--contention", ("none", "pairs", "curve", "slices"),
            help="How much jobs on a GPU slow each other down: not; by 7% for each other job, as "
            "measured; by the sum of their utilizations, as a curve through measured pairs; or n "
            "jobs to 1/n each, the worst case; default: none.",
            default="none",
        ),
        "placement": choice(
            "--placement", ("best", "spread"), default="best",
            help="Which GPU a job gets: the fullest that fits (the default), or the emptiest.",
        ),
        "out": text("--out", metavar="FILE.csv", help="Write when and where each job ran."),
        "skip_too_large": flag("--skip-too-large", help="Leave out jobs that fit on no server."),
        "json": JSON,
    },
    "doctor": {
        "json": JSON,
        "prove": flag("--prove", help="Run jobs that try to exceed their leases."),
    },
    "kernel": {
        "mem": text("--mem", metavar="SIZE", help="Memory on each GPU: 4G, 40%, 4G..10G."),
        "time": OPTIONS_OF_RUN["time"],
        "idle": text(
            "--idle", metavar="SPAN", help="End a kernel after this time without cells."
        ),
        "name": text("--name", metavar="NAME", help="Default: gpulease-SIZE."),
        "display_name": text("--display-name", metavar="TEXT", help="The name in menus."),
        "prefix": text("--prefix", metavar="DIR", help="Use DIR/share/jupyter/kernels."),
        "sys_prefix": flag("--sys-prefix", help="Use the environment of your python."),
    },
    "completion": {},
}  # fmt: skip
"""By verb and parameter."""
ARGUMENTS: Mapping[str, tuple[Argument, ...]] = {
    **dict.fromkeys(("edit", "move", "again", "requeue", "keep"), (JOBS,)),
    "drain": (Argument("gpus", "GPU", is_required=True),),
    "resume": (Argument("gpus", "GPU"),),
    "adopt": (Argument("pid", "PID", is_list=False, is_required=True),),
    "plot": (Argument("job", "JOB", is_list=False),),
    "replay": (Argument("trace", "TRACE", is_list=False, is_required=True),),
    "kernel": (
        Argument(
            "action",
            "ACTION",
            is_list=False,
            is_required=True,
            choices=("install", "list", "remove"),
        ),
        Argument("names", "WORD"),
    ),
    "completion": (Argument("shell", "SHELL", is_list=False, is_required=True, choices=SHELLS),),
}
