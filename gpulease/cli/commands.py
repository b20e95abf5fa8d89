"""The verbs of `gpulease`, and the options before them.

The module of a verb is imported when the verb is used, so that `gpulease status` does not load what
only `gpulease doctor` needs.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer

from gpulease.build import described
from gpulease.cli.help_page import SHORT
from gpulease.cli.options import SocketOption
from gpulease.cli.render import print_stderr, print_stdout
from gpulease.cli.typer_extensions import ALL_OPTIONS, Command, VerbGroup
from gpulease.cli.verbs import VERBS
from gpulease.errors import EXIT_USAGE, BadUsage

_LIST = "gpulease list lists jobs, gpulease status shows GPUs and the queue"
_STATUS = "gpulease status shows GPUs, leases and the queue"
_CANCEL = "gpulease cancel ends jobs and releases leases"
_RESERVE = "gpulease reserve sets GPUs apart for a time, and shows what is reserved"
_RUN = "gpulease run runs a command, with -d in the background"
_SHOW = "gpulease show describes a job, gpulease doctor this machine"
_HOLD = "gpulease hold leases memory for this shell, gpulease run for a command"
_REPORT = "gpulease report compares what was asked for and used, gpulease history has past jobs"
_SUGGESTIONS = {
    **dict.fromkeys(("sacct", "sreport", "usage", "stats"), _REPORT),
    **dict.fromkeys(("ps", "queue", "jobs", "ls", "squeue"), _LIST),
    **dict.fromkeys(("smi", "gpus", "free", "nvidia-smi", "stat", "sinfo"), _STATUS),
    **dict.fromkeys(("htop", "nvtop", "nvitop", "gpustat"), "gpulease top shows the machine live"),
    **dict.fromkeys(("kill", "stop", "rm", "del", "scancel", "release", "end"), _CANCEL),
    **dict.fromkeys(("start", "submit", "exec", "srun", "sbatch", "launch"), _RUN),
    **dict.fromkeys(("info", "inspect", "describe", "check"), _SHOW),
    "seff": "gpulease show compares what a job asked for with what it used",
    **dict.fromkeys(("lease", "alloc", "salloc"), _HOLD),
    **dict.fromkeys(("reservation", "reservations", "windows", "calendar"), _RESERVE),
    **dict.fromkeys(("log", "tail", "output", "cat"), "gpulease logs prints the output of a job"),
    **dict.fromkeys(("cordon", "disable"), "gpulease drain stops granting leases on a GPU"),
    **dict.fromkeys(("uncordon", "undrain", "enable"), "gpulease resume grants leases again"),
    **dict.fromkeys(
        ("jupyter", "notebook", "kernelspec", "ipykernel"),
        "gpulease kernel installs Jupyter kernels that run as jobs",
    ),
    **dict.fromkeys(("graph", "chart", "draw"), "gpulease plot draws memory over time"),
    **dict.fromkeys(("fg", "reattach"), "gpulease attach connects to a running job"),
}
"""The words of other tools, each with what to use here."""


class _Verbs(VerbGroup):
    verbs = tuple(VERBS)

    def build(self, verb: str) -> Any:
        return _command(verb)

    def refuse(self, word: str) -> None:
        if (hint := _hint_for(word)) is not None:
            raise BadUsage(f"cannot understand the command: no verb named {word!r}", hint)


def _hint_for(word: str) -> str | None:
    if hint := _SUGGESTIONS.get(word.lower()):
        return hint
    if word.endswith(".py") or "/" in word:
        return f"to run it: gpulease run {word}"
    near = get_close_matches(word.lower(), VERBS, n=1)
    return f"did you mean gpulease {near[0]}?" if near else None


def _command(verb: str) -> Any:
    module = import_module(f"gpulease.cli.{VERBS[verb].module or verb}")
    typer_app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # `gpulease run --mem 4G train.py --epochs 3` passes the epochs on.
    settings = {"allow_interspersed_args": False} if verb == "run" else None
    register = typer_app.command(
        verb,
        cls=getattr(module, "COMMANDS", {}).get(verb, Command),
        short_help=VERBS[verb].summary,
        context_settings=settings,
    )
    register(getattr(module, verb))
    return typer.main.get_command(typer_app)


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def gpulease(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    socket: SocketOption = None,
) -> None:
    """Share GPUs by memory: run jobs under leases, and queue those that do not fit."""
    if version:
        print_stdout(f"gpulease {described()}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print_stderr(ctx.get_help())
        raise typer.Exit(EXIT_USAGE)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    Raises:
        GpuleaseError: the command failed.
        typer.TyperException: the line cannot be understood.
        Killed: a signal ends this process.
    """
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    wanted = None
    if list(arguments[1:]) == ["--help-all"] and arguments[0] in SHORT:
        arguments, wanted = [arguments[0], "--help"], ALL_OPTIONS
    command = typer.main.get_command(app)
    result = command.main(
        args=list(arguments), prog_name="gpulease", standalone_mode=False, obj=wanted
    )
    return result if isinstance(result, int) else 0
