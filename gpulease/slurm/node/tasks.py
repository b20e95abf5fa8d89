"""The environment of a task of Slurm: what its job was submitted with, and the lines for Slurm."""

import os
from collections.abc import Mapping

import msgspec

from gpulease.domain.job import Invocation
from gpulease.errors import BadValue
from gpulease.server.context import read_body
from gpulease.server.validation import options_of
from gpulease.wire.requests import SlurmCommandRequest, WorkerOptionsRequest

COMMAND_VARIABLE = "GPULEASE_SLURM"
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_MOST_DETAIL = 200


def command_in(environment: Mapping[str, str], number: int) -> SlurmCommandRequest:
    """Return what `gpulease run` has handed to a job; nothing for one submitted otherwise.

    Raises:
        BadValue: somebody has changed it.
    """
    text = environment.get(COMMAND_VARIABLE, "{}")
    try:
        command = read_body(SlurmCommandRequest, os.fsencode(text))
    except BadValue as error:
        raise BadValue(
            f"cannot read the variable {COMMAND_VARIABLE}: {str(error.__cause__)[:_MOST_DETAIL]}",
            "gpulease run sets it; without it, the job has no options for frameworks",
        ) from error
    return command if command.job in (None, number) else SlurmCommandRequest()


def bound(command: SlurmCommandRequest, number: int) -> Mapping[str, str]:
    """Return the variable for the later steps of a job, with the options alone; none for defaults.

    It names the job, so that it has no effect in another one that inherits it.
    """
    if command.options == WorkerOptionsRequest():
        return {}
    kept = SlurmCommandRequest(options=command.options, job=number)
    return {COMMAND_VARIABLE: msgspec.json.encode(kept).decode()}


def invocation_of_task(
    command: SlurmCommandRequest, environment: Mapping[str, str], gpus: int = 1, of: int = 1
) -> Invocation:
    """Return a task as an invocation.

    The tasks of a step on this node start together, and have equal parts of the lease. If Slurm
    binds each of them to `gpus` of the lease's GPUs, which are `of`, fewer tasks share a GPU.
    """
    options = options_of(command.options)
    processes = command.options.processes or tasks_here(environment)
    if processes > 1:
        options = {**options, "processes": -(-processes * gpus // of)}
    return Invocation((), "/", environment, options=options)


def tasks_here(environment: Mapping[str, str]) -> int:
    """Return how many tasks of a step run on this node: 1 or 2 for "2(x3),1"; 1 if unknown."""
    node = environment.get("SLURM_NODEID", "")
    place = int(node) if node.isdecimal() and len(node) < 10 else 0
    for part in environment.get(_TASKS, "").split(","):
        count, _, nodes = part.partition("(x")
        repeated = nodes.rstrip(")") or "1"
        if not (count.isdecimal() and repeated.isdecimal() and len(part) < 20):
            return 1
        if place < int(repeated):
            return int(count)
        place -= int(repeated)
    return 1


def task_prolog_lines(before: Mapping[str, str], after: Mapping[str, str]) -> bytes:
    """Return the changes of an environment as Slurm reads them from a task prolog.

    A line ends a value there, so a changed variable with a line break, which only PYTHONPATH can
    have, keeps its former value.
    """
    lines = [
        f"export {name}={value}\n"
        for name, value in after.items()
        if before.get(name) != value and "\n" not in value
    ]
    lines += [f"unset {name}\n" for name in before if name not in after]
    return os.fsencode("".join(lines))
