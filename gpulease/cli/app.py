"""The `gpulease` command: which verb is meant, and how it leaves.

A verb's module is imported when the verb is used, so that `gpulease status` does not wait for what
`gpulease doctor` needs. Errors become a message and an exit code here and nowhere else.
"""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpulease import __version__
from gpulease.cli.connect import SocketOption
from gpulease.cli.render import complain, forgive_encodings, say, show
from gpulease.errors import EXIT_USAGE, GpuleaseError

VERBS = {
    "run": "Run a command on leased GPU memory.",
    "status": "Show GPUs, leases, and who waits.",
    "list": "List jobs.",
    "show": "Show all about a job.",
    "logs": "Print the output of a job.",
    "cancel": "End jobs.",
    "doctor": "Find what is wrong, and its mend.",
}
"""Each is the function of its own name in the module of its own name, in the order of the help."""

_RUN_SETTINGS = {"allow_interspersed_args": False}
"""`gpulease run --mem 4G train.py --epochs 3` passes the epochs on."""
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class _Verbs(TyperGroup):
    """The verbs, each built when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _verb(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS and (near := get_close_matches(args[0], VERBS, n=1)):
            ctx.fail(f"there is no {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


def _verb(name: str) -> Any:
    function = getattr(import_module(f"gpulease.cli.{name}"), name)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = _RUN_SETTINGS if name == "run" else None
    alone.command(name, short_help=VERBS[name], context_settings=settings)(function)
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Verbs,
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
        show(f"gpulease {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        raise typer.Exit(EXIT_USAGE)


def main() -> None:
    """Run the command of this process, and leave with its exit code."""
    _open_closed_streams()
    forgive_encodings()
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; what goes wrong has been said by then."""
    if list(arguments) == ["--version"]:
        show(f"gpulease {__version__}")
        return 0
    try:
        return _invoke(arguments)
    except GpuleaseError as error:
        complain(error)
        return error.exit_code
    except typer.TyperException as error:
        return _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter would complain once more as it flushes on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _invoke(arguments: Sequence[str]) -> int:
    result = typer.main.get_command(app).main(
        args=list(arguments), prog_name="gpulease", standalone_mode=False
    )
    return result if isinstance(result, int) else 0


def _misused(error: typer.TyperException) -> int:
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "gpulease"
    message = error.format_message().rstrip(".")
    say(f"cannot understand the command: {message}\n\nhint: {path} --help")
    return error.exit_code


def _open_closed_streams() -> None:
    # With `>&-` the next file that is opened would become stdout, and a socket be written to as
    # such. /dev/null the wrong way round keeps the place and refuses as a closed stream would.
    for handle, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, mode)
