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
from gpulease.cli.connect import SocketOption
from gpulease.cli.render import print_stderr, print_stdout
from gpulease.cli.typer_extensions import Command, VerbGroup
from gpulease.errors import EXIT_USAGE, BadUsage

VERBS = {
    "run": "Run a command on leased GPU memory.",
    "hold": "Lease GPU memory for this shell.",
    "adopt": "Lease the memory that a running process uses.",
    "status": "Show GPUs, leases and the queue.",
    "top": "Watch GPUs, jobs and the queue live.",
    "list": "List jobs.",
    "show": "Show jobs in detail.",
    "logs": "Print the output of jobs.",
    "attach": "Connect this terminal to a job.",
    "edit": "Change what waiting jobs ask for.",
    "move": "Change the order of waiting jobs.",
    "wait": "Wait for the end of jobs.",
    "cancel": "End jobs, and release leases.",
    "requeue": "Stop jobs, and queue them again.",
    "extend": "Change the time limits of jobs.",
    "keep": "Protect idle leases from being released.",
    "drain": "Stop granting leases on GPUs.",
    "resume": "Grant leases on GPUs again.",
    "history": "List past jobs; export them as CSV.",
    "plot": "Draw the memory of a job or a GPU over time.",
    "pause": "Start no more jobs.",
    "unpause": "Start jobs again.",
    "reserve": "Set GPUs apart for a time.",
    "notify": "Show and test the receivers of notifications.",
    "report": "Compare what jobs asked for and used.",
    "replay": "Try the scheduler on recorded jobs.",
    "doctor": "Diagnose problems and suggest fixes.",
    "kernel": "Install Jupyter kernels that run as jobs.",
    "completion": "Print completion for your shell.",
}
"""Each is the function of that name in the module of that name, or of `_MODULES`; the help keeps
their order."""

_MODULES = {
    **dict.fromkeys(("edit", "move", "cancel", "requeue", "extend", "keep"), "job_verbs"),
    **dict.fromkeys(("drain", "resume", "pause", "unpause", "reserve"), "admin_verbs"),
    **dict.fromkeys(("status", "list", "history", "show"), "show_verbs"),
    **dict.fromkeys(("attach", "logs", "wait"), "follow_verbs"),
    "adopt": "hold",
}

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
    module = import_module(f"gpulease.cli.{_MODULES.get(verb, verb)}")
    typer_app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # `gpulease run --mem 4G train.py --epochs 3` passes the epochs on.
    settings = {"allow_interspersed_args": False} if verb == "run" else None
    register = typer_app.command(
        verb,
        cls=getattr(module, "COMMANDS", {}).get(verb, Command),
        short_help=VERBS[verb],
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
    """Share GPUs by memory: run jobs under leases, and queue those that do not fit.

    \b
    Examples:
      gpulease run --mem 4G train.py --epochs 3
      gpulease status
      gpulease run --help
    """
    if version:
        print_stdout(f"gpulease {described()}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print_stderr(ctx.get_help())
        raise typer.Exit(EXIT_USAGE)


def parameters(verb: str) -> list[Any]:
    """Return the options and arguments of a verb, for completion; "" is what precedes the verb."""
    if verb and verb not in VERBS:
        return []
    command = _command(verb) if verb else typer.main.get_command(app)
    context = typer.Context(command, info_name=verb, help_option_names=["-h", "--help"])
    return [param for param in command.get_params(context) if not getattr(param, "hidden", False)]


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    Raises:
        GpuleaseError: the command failed.
        typer.TyperException: the line cannot be understood.
        Killed: a signal ends this process.
    """
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    command = typer.main.get_command(app)
    result = command.main(args=list(arguments), prog_name="gpulease", standalone_mode=False)
    return result if isinstance(result, int) else 0
