"""`gpulease run` on a cluster: it becomes srun, or with -d has sbatch take a script."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpulease.cli.caller import is_ours
from gpulease.cli.job_selection import LAST
from gpulease.cli.render import print_stderr, print_stdout
from gpulease.drawing.words import clean
from gpulease.errors import EXIT_GAVE_UP, EXIT_OWN_FAILURE, SlurmFailed
from gpulease.light_json import encode, indent
from gpulease.locations import SYSTEM_CONFIG
from gpulease.options import RunOptions
from gpulease.slurm.annotations import read_nodes
from gpulease.slurm.command.request import (
    Size,
    capacity_of,
    dependency,
    passed_options,
    refuse_out_of_range,
    size_of,
    slurm_options,
)
from gpulease.slurm.commands import DEADLINE_S, become, call
from gpulease.slurm.records import is_number
from gpulease.units import GIB, Share, parse_memory, parse_size
from gpulease.wire.text import from_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.wire.requests import SubmitRequest

_COMMAND = "GPULEASE_SLURM"
"""What the daemon of the node reads: the command, and options for the frameworks."""
_LARGEST_COMMAND = 64 * 1024
"""Bytes: of a longer command, only the options are passed."""
DEFAULT_MEMORY: int | Share = 4 * GIB
_OUTER_JOB = "SLURM_JOB_ID"
_KEPT = frozenset({"SLURM_CONF"})
_KEPT_FOR_S = 30 * 24 * 3600
_EXIT_CODES = {
    "SLURM_EXIT_ERROR": str(EXIT_OWN_FAILURE),
    "SLURM_EXIT_IMMEDIATE": str(EXIT_GAVE_UP),
}
"""What srun exits with if it starts no job, in place of 1."""

# bash, since dash removes variables that it cannot name, such as exported functions.
_BASH = "/bin/bash"
_ENTER = """\
cd -- {cwd} || {{ echo "gpulease: this directory is not on $SLURMD_NODENAME" >&2; exit 125; }}
"""
"""Slurm would run the command in /tmp."""
_BATCH = f"#!{_BASH}\n{_ENTER}exec -- {{command}}\n"
_FOREGROUND = f"""\
{_ENTER.format(cwd='"$1"')}shift
unset {" ".join(_EXIT_CODES)}
[ "$SLURM_PROCID" != 0 ] ||
echo "gpulease: job $SLURM_JOB_ID started on $SLURMD_NODENAME, GPU $SLURM_STEP_GPUS" >&2
exec -- "$@"
"""


def run_on_cluster(request: SubmitRequest, options: RunOptions) -> int:
    """Run a command as a job of Slurm: become srun, or submit it with -d and return.

    Raises:
        GpuleaseError: an option has no counterpart, or Slurm does not accept the job.
    """
    refuse_out_of_range(request)
    shard, default = read_sizes(SYSTEM_CONFIG)
    size = size_of(options, request, capacity_of(read_nodes(), shard), default)
    words = slurm_options(options, request, size.gres)
    words += _dependencies(options)
    if request.wait is not None:
        words.append(immediate(request.wait))
    words += passed_options(options.slurm)
    argv = [from_wire(word) for word in request.argv]
    if options.dry:
        _show(_line(request, options, words, argv), size, json=options.json)
        return 0
    if size.reason is not None:
        print_stderr(f"gpulease: the job leases {size.text}, {size.reason}; see --mem")
        if "--mem" in argv:
            print_stderr("gpulease: --mem after the command was passed to the command")
    line, variables = _line(request, options, words, argv), _variables(request)
    if not options.detach:
        become(line, {**variables, **_EXIT_CODES})
    print_stdout(submit_batch(line, batch_script(argv, from_wire(request.cwd)), variables))
    return 0


def _line(
    request: SubmitRequest, options: RunOptions, words: Sequence[str], argv: Sequence[str]
) -> list[str]:
    """Return the command line of srun or sbatch."""
    if options.detach:
        outputs = _outputs("%j" if options.array is None else "%A_%a")
        line = ["sbatch", "--parsable", "--open-mode=append", *outputs, *words]
        return [*line, "--wrap", shlex.join(argv)] if options.dry else line
    # The kernel stops a process in the background of a shell as soon as it reads the terminal.
    away = os.isatty(0) and not is_ours(0)
    pty = request.terminal is not None and not away
    # Without a status, srun passes the first SIGINT on.
    line = ["srun", "--disable-status", *(["--pty"] if pty else [])]
    line += [*(["--input=none"] if away else []), *words]
    return [*line, "--", _BASH, "-c", _FOREGROUND, "gpulease", from_wire(request.cwd), *argv]


def read_sizes(system: str) -> tuple[int | None, int | Share]:
    """Return the size of a shard and the default of jobs, by the settings of the machine.

    Only these are read: all settings would take longer than the rest of the command. The file may
    be for its admins only.

    Raises:
        BadConfiguration: the file or one of the two cannot be used.
    """
    if not os.access(system, os.R_OK):
        return None, DEFAULT_MEMORY
    from gpulease.setting_parsers import read_keys

    found = read_keys(Path(system), {"slurm.shard": parse_size, "default_memory": parse_memory})
    return found.get("slurm.shard"), found.get("default_memory", DEFAULT_MEMORY)


def _variables(request: SubmitRequest) -> dict[str, str]:
    """Return the environment of the job; one of Slurm around this command is left."""
    variables = {from_wire(key): from_wire(value) for key, value in request.environment.items()}
    if _OUTER_JOB in variables:
        variables = {
            key: value
            for key, value in variables.items()
            if key in _KEPT or not key.startswith("SLURM_")
        }
    command = {"argv": request.argv, "cwd": request.cwd, "options": request.options}
    if len(text := encode(command).decode()) > _LARGEST_COMMAND:
        text = encode({**command, "argv": []}).decode()
    return variables | {_COMMAND: text}


def _dependencies(options: RunOptions) -> list[str]:
    if not options.after:
        return []
    from gpulease.cli.resolved_options import conditions

    asked = conditions(options.after)
    numbers = {} if all(is_number(job) for job, _ in asked) else _own_jobs()
    words = ["--dependency=" + ",".join(dependency(*each, numbers) for each in asked)]
    # srun has no such option: DependencyParameters in slurm.conf does this for all jobs.
    return [*words, "--kill-on-invalid-dep=yes"] if options.detach else words


def _own_jobs() -> dict[str, str]:
    """Return the ids of the caller's newest jobs by name, and of the newest as "last"."""
    from gpulease.slurm.command.jobs import jobs_of

    found: dict[str, str] = {}
    for row in jobs_of(ended=True):
        number = row.get("arrayjobid", row["jobid"])
        found |= {row.get("name", ""): number, LAST: number}
    return found


def _show(line: Sequence[str], size: Size, *, json: bool) -> None:
    if json:
        shown = {"command": line, "size": size.text, "sized": size.reason}
        print_stdout(indent(encode(shown)))
        return
    print_stdout(shlex.join(line))
    if size.reason:
        print_stderr(f"gpulease: {size.text}, {size.reason}")


def immediate(wait: float) -> str:
    """Return the option of srun for a time that a job may wait, in seconds."""
    # To srun, 1 means that the job starts at once or not at all.
    return f"--immediate={max(2, math.ceil(wait))}" if wait else "--immediate"


def batch_script(argv: Sequence[str], cwd: str) -> str:
    """Return a script that becomes `argv`."""
    return _BATCH.format(cwd=shlex.quote(cwd), command=shlex.join(argv))


def submit_batch(line: Sequence[str], script: str, variables: Mapping[str, str]) -> str:
    """Submit a script, and return the id of the job.

    Raises:
        SlurmFailed: Slurm does not accept it.
    """
    done = call(line, variables, 3 * DEADLINE_S, script)
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        said = [each.removeprefix("sbatch: ").removeprefix("error: ") for each in lines]
        raise SlurmFailed(f"cannot submit the job: {clean('; '.join(said)) or 'sbatch failed'}")
    # With several clusters, the name of the cluster follows.
    return done.stdout.strip().split(";")[0]


def _outputs(job: str) -> list[str]:
    """Return where Slurm writes the output: into the home that nodes share, if that can be.

    Files of long ago are removed there.
    """
    from gpulease.slurm.command.logs import output_directory

    try:
        folder = output_directory()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied", str(folder))
    except OSError as error:
        print_stderr(
            "gpulease: the output goes to slurm-JOB.out in this directory: "
            f"your home cannot be written: {error.strerror}"
        )
        return []
    oldest = time.time() - _KEPT_FOR_S
    for entry in os.scandir(folder):
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < oldest:
                Path(entry.path).unlink()
    name = str(folder).replace("%", "%%")
    return [f"--output={name}/{job}.out", f"--error={name}/{job}.err"]
