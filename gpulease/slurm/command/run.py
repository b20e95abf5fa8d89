"""`gpulease run` on a cluster: what is asked of Slurm; `submission` hands it over."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from gpulease.cli.job_selection import LAST
from gpulease.cli.render import print_stderr, print_stdout
from gpulease.cli.request import RunOptions
from gpulease.light_json import encode, indent
from gpulease.locations import SYSTEM_CONFIG
from gpulease.slurm.command.capacity import read_capacity
from gpulease.slurm.command.size import Size, size_of
from gpulease.slurm.command.slurm_options import (
    dependency,
    is_number,
    passed_options,
    slurm_options,
    split_condition,
)
from gpulease.slurm.command.submission import (
    batch_line,
    batch_script,
    become_srun,
    immediate,
    in_background,
    srun_line,
    submit_batch,
)
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


def run_on_cluster(request: SubmitRequest, options: RunOptions) -> int:
    """Run a command as a job of Slurm: become srun, or submit it with -d and return.

    Raises:
        GpuleaseError: an option has no counterpart, or Slurm does not accept the job.
    """
    shard, default = read_sizes(SYSTEM_CONFIG)
    capacity = read_capacity(shard)
    size = size_of(options, request, capacity, default)
    words = slurm_options(options, request, size.gres)
    words += _dependencies(options)
    if request.wait is not None:
        words.append(immediate(request.wait))
    words += passed_options(options.slurm)
    argv = [from_wire(word) for word in request.argv]
    if options.dry:
        _show(_line(request, options, words, argv), size, json=options.json)
        return 0
    _say_size(size, argv)
    line, variables = _line(request, options, words, argv), _variables(request)
    if not options.detach:
        become_srun(line, variables)
    print_stdout(submit_batch(line, batch_script(argv, from_wire(request.cwd)), variables))
    return 0


def _line(
    request: SubmitRequest, options: RunOptions, words: Sequence[str], argv: Sequence[str]
) -> list[str]:
    """Return the command line of srun or sbatch."""
    if options.detach:
        line = batch_line(words, is_array=options.array is not None)
        return [*line, "--wrap", shlex.join(argv)] if options.dry else line
    away = in_background()
    pty = request.terminal is not None and not away
    no_input = ["--input=none"] if away else []
    return srun_line([*no_input, *words], argv, from_wire(request.cwd), pty=pty)


def read_sizes(system: str) -> tuple[int | None, int | Share]:
    """Return the size of a shard and the default of jobs, by the settings of the machine.

    Only these are read: all settings would take longer than the rest of the command. The file may
    be for its admins only.

    Raises:
        BadConfiguration: the file or one of the two cannot be used.
    """
    if not os.access(system, os.R_OK):
        return None, DEFAULT_MEMORY
    from pathlib import Path

    from gpulease.setting_parsers import Mistakes, read_toml

    file = Path(system)
    content, mistakes = read_toml(file), Mistakes(file)
    slurm, shard, default = content.get("slurm"), None, DEFAULT_MEMORY
    if isinstance(slurm, dict) and "shard" in slurm:
        shard = mistakes.parse("slurm.shard", slurm["shard"], parse_size)
    if "default_memory" in content:
        default = mistakes.parse("default_memory", content["default_memory"], parse_memory)
    mistakes.raise_if_any()
    return shard, default


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
    asked = [word for each in options.after for word in each.split(",")]
    if not asked:
        return []
    jobs = [split_condition(word)[0] for word in asked]
    numbers = {} if all(map(is_number, jobs)) else _own_jobs()
    words = ["--dependency=" + ",".join(dependency(word, numbers) for word in asked)]
    # srun has no such option: DependencyParameters in slurm.conf does this for all jobs.
    return [*words, "--kill-on-invalid-dep=yes"] if options.detach else words


def _own_jobs() -> dict[str, str]:
    """Return the ids of the caller's newest jobs by name, and of the newest as "last"."""
    from gpulease.slurm.command.jobs import own_jobs

    found: dict[str, str] = {}
    for row in own_jobs(ended=True):
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


def _say_size(size: Size, argv: Sequence[str]) -> None:
    if size.reason is None:
        return
    print_stderr(f"gpulease: the job leases {size.text}, {size.reason}; see --mem")
    if "--mem" in argv:
        print_stderr("gpulease: --mem after the command was passed to the command")
