"""`gpulease run`: lease GPU memory, wait for it, run a command, and exit as the command does.

`gpulease.options` has the options; `run_job` does the work.
"""

from typing import Annotated, Any

import typer

from gpulease.cli.options import SocketOption, named_socket, takes_its_options
from gpulease.cli.run_job import run_job
from gpulease.cli.typer_extensions import CommandWithDefaults, was_typed
from gpulease.options import run_options

COMMANDS = {"run": CommandWithDefaults}


@takes_its_options
def run(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="The command and its arguments; a .py script or .ipynb notebook uses your python.",
            show_default=False,
        ),
    ] = None,
    *,
    socket: SocketOption = None,
    **typed: Any,
) -> int:
    """Lease GPU memory, wait until it is free, and run COMMAND as you.

    COMMAND gets your python, directory, environment and terminal. Options of gpulease
    come before COMMAND; everything after it belongs to COMMAND.

    Without --mem, a script gets what it used before, or else the daemon's default.
    A script may have options in its first comments, as "# gpulease: --mem 4G".
    Inside a job, or in a shell that holds a lease, COMMAND runs within that lease.
    Ctrl-\\ and then d detach: the job continues, gpulease attach connects again.

    \b
    Examples:
      gpulease run --mem 4G train.py --epochs 3
      gpulease run --mem 40% --gpus 2 --time 4h -- torchrun train.py
      gpulease run --mem 8G --processes 2 serve.py
      gpulease run --mem 8G -d --name sweep-7 bash sweep.sh
      gpulease run --mem 4G train.ipynb --output results.ipynb
      gpulease run --mem 4G -- docker run --rm IMAGE python train.py
      gpulease run --mem 4G --time 4h --signal USR1@2m train.py
      gpulease run --mem 4G --array 0-99%8 train.py
      gpulease run --mem 4G --after 17 evaluate.py
      gpulease run --mem 4G --shell
      gpulease run --mem 4G --dry-run train.py
      gpulease run --mem 4G --slurm "--partition=a100 --nodelist=gpu2" train.py

    \b
    Exit code: that of COMMAND, or
        2  an option or its value is wrong
       75  gave up waiting (--no-wait, --wait), or would wait (--dry-run)
       97  with --strict: a framework cannot be limited to the lease, or a
           process sets CUDA_VISIBLE_DEVICES to a GPU outside it
      124  a limit ended the job: its time, its lease, or idleness
      125  gpulease failed, or the daemon refused the request
      126  COMMAND cannot be executed
      127  COMMAND was not found
      128+N  signal N ended COMMAND
    """
    must = was_typed(ctx, "snapshot")
    return run_job(run_options(typed), command or [], named_socket(ctx, socket), must_copy=must)
