"""Runs Slurm's commands for the daemon: its event loop goes on, and a hanging command is killed."""

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gpulease.errors import SlurmFailed
from gpulease.slurm.commands import (
    DEADLINE_S,
    checked_output,
    no_answer,
    not_installed,
    slurm_environment,
)

RunSlurm = Callable[..., Awaitable[str]]
"""Like `run_slurm` below."""
_UNKNOWN = "Slurm does not know job"


async def run_slurm(*argv: str, deadline: float = DEADLINE_S) -> str:
    """Run a command such as ("scontrol", "show", "node"), and return its output.

    Raises:
        SlurmFailed: it is not installed, failed, or took longer than `deadline` seconds.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=slurm_environment(os.environ)
        )
    except FileNotFoundError:
        raise not_installed(argv) from None
    try:
        async with asyncio.timeout(deadline):
            output, errors = await process.communicate()
    except TimeoutError:
        _kill(process)
        await process.communicate()
        raise no_answer(argv, deadline) from None
    finally:
        _kill(process)
    return checked_output(argv, process.returncode, _text(output), _text(errors))


def _kill(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


def _text(output: bytes) -> str:
    return output.decode("utf-8", "surrogateescape")


async def list_job(run: RunSlurm, job: int, *format_: str) -> str:
    """Return what squeue says of one job in a format, which begins with the number and a bar.

    The number of an array stands for all of its jobs, so squeue may list others too.

    Raises:
        SlurmFailed: Slurm does not answer, or does not know the job.
    """
    listed = await run("squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", *format_)
    start = f"{job}|"
    for line in listed.splitlines():
        if line.startswith(start):
            return line.removeprefix(start)
    raise SlurmFailed(f"{_UNKNOWN} {job}")


async def label_of(run: RunSlurm, job: int) -> str:
    """Return what commands call a job: 17_3 for an element of an array.

    The first element to be submitted has the number of the array, which as an argument means all of
    them.

    Raises:
        SlurmFailed: Slurm does not answer, or does not know the job.
    """
    return await list_job(run, job, "--format=%A|%i")


def is_unknown_job(error: SlurmFailed) -> bool:
    """Return whether Slurm has answered that there is no such job."""
    return any(each in error.message for each in ("Invalid job id", _UNKNOWN))
