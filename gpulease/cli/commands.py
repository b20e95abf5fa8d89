"""The verbs of `gpulease`, and the options before them.

A verb's module is imported when the verb is used, so that `gpulease status` does not wait for what
`gpulease doctor` needs.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer

from gpulease.build import described
from gpulease.cli.command_spec import Verb, verb_of
from gpulease.cli.connect import SocketOption
from gpulease.cli.render import say, show
from gpulease.cli.signals import EndedByInterrupt
from gpulease.cli.typer_parsers import QuickCommand, QuickGroup
from gpulease.errors import EXIT_USAGE

VERBS = {
    "run": "Run a command on leased GPU memory.",
    "hold": "Hold GPU memory for this shell.",
    "status": "Show GPUs, leases, and who waits.",
    "list": "List jobs.",
    "show": "Show all about a job.",
    "logs": "Print the output of a job.",
    "attach": "Come back to a running job.",
    "cancel": "End jobs.",
    "extend": "Give jobs more time, or less.",
    "drain": "Grant nothing more on a GPU.",
    "resume": "Grant on a GPU again.",
    "keep": "Keep a lease that is idle on purpose.",
    "report": "Tell what jobs asked for and used.",
    "doctor": "Find what is wrong, and its mend.",
    "completion": "Make your shell complete all this.",
}
"""Each is the function of its own name in the module of its own name, in the order of the help."""

_JOBS = "'list' lists jobs, and 'status' shows GPUs and who waits"
_GPUS = "'status' shows GPUs, leases and who waits"
_END = "'cancel' ends jobs and gives leases back"
_RUN = "'run' runs a command, and with -d in the background"
_ABOUT = "'show' tells all about a job, and 'doctor' about this machine"
_LEASE = "'hold' leases memory for this shell, and 'run' for a command"
_USE = "'report' tells what was asked for and used, and 'list --all' shows past jobs"
_POINTERS = {
    **dict.fromkeys(("sacct", "sreport", "usage", "history", "stats"), _USE),
    **dict.fromkeys(("ps", "queue", "jobs", "ls", "squeue"), _JOBS),
    **dict.fromkeys(("top", "smi", "gpus", "free", "nvidia-smi", "stat", "sinfo"), _GPUS),
    **dict.fromkeys(("kill", "stop", "rm", "del", "scancel", "release", "end"), _END),
    **dict.fromkeys(("start", "submit", "exec", "srun", "sbatch", "launch"), _RUN),
    **dict.fromkeys(("info", "inspect", "describe", "check"), _ABOUT),
    **dict.fromkeys(("lease", "alloc", "salloc", "reserve"), _LEASE),
    **dict.fromkeys(("log", "tail", "output", "cat"), "'logs' prints what a job has written"),
    **dict.fromkeys(("cordon", "disable"), "'drain' grants nothing more on a GPU"),
    **dict.fromkeys(("uncordon", "undrain", "enable"), "'resume' grants on a GPU again"),
    **dict.fromkeys(("wait", "fg", "reattach"), "'attach' comes back to a job that runs"),
}
"""What people who come from other tools type first."""

_RUN_SETTINGS = {"allow_interspersed_args": False}
"""`gpulease run --mem 4G train.py --epochs 3` passes the epochs on."""


class _Verbs(QuickGroup):
    """The verbs, each built when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _verb(cmd_name) if cmd_name in VERBS else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Typer would make an exit code of it, which no shell takes for a Ctrl-C.
            raise EndedByInterrupt(ctrl_c_typed=False) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS:
            if meant := _POINTERS.get(args[0].lower()):
                ctx.fail(f"there is no {args[0]!r} here; {meant}")
            if args[0].endswith(".py") or "/" in args[0]:
                ctx.fail(f"there is no verb {args[0]!r}; to run it: gpulease run {args[0]}")
            if near := get_close_matches(args[0], VERBS, n=1):
                ctx.fail(f"there is no {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


def _verb(name: str) -> Any:
    module = import_module(f"gpulease.cli.{name}")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = _RUN_SETTINGS if name == "run" else None
    register = alone.command(
        name,
        cls=getattr(module, "Command", QuickCommand),
        short_help=VERBS[name],
        context_settings=settings,
    )
    register(getattr(module, name))
    return typer.main.get_command(alone)


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
    """Lease GPU memory: say how much a script gets, and it runs where so much is free.

    \b
    Examples:
      gpulease run --mem 4G train.py --epochs 3
      gpulease status
      gpulease run --help
    """
    if version:
        show(f"gpulease {described()}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        raise typer.Exit(EXIT_USAGE)


def grammar() -> tuple[Verb, ...]:
    """Return what may be written on a line: first what stands before the verb, then each verb."""
    before = verb_of("", "", typer.main.get_command(app))
    return (before, *(verb_of(name, said, _verb(name)) for name, said in VERBS.items()))


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line; what it returns is the exit code.

    Raises:
        GpuleaseError: what went wrong.
        typer.TyperException: the line could not be understood.
        Killed: a signal ends this process.
    """
    command = typer.main.get_command(app)
    result = command.main(args=list(arguments), prog_name="gpulease", standalone_mode=False)
    return result if isinstance(result, int) else 0
