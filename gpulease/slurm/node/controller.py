"""Asks Slurm about a job; the port `SlurmController`."""

import asyncio

from gpulease.domain.job import Exit, SlurmJob
from gpulease.errors import SlurmFailed
from gpulease.service.ports import SlurmAllocation, SlurmRefusal
from gpulease.slurm.allocations import JobIsOver, Unclear, allocation_on, element_of
from gpulease.slurm.node.commands import RunSlurm, is_unknown_job, list_job, run_slurm
from gpulease.slurm.node.refusals import SlurmRefusals
from gpulease.slurm.records import ending

_EXIT = "--Format=JobID:|,RestartCnt:|,exit_code:"
_EXIT_WITHIN_S = 2.0
"""The lease ends afterwards, and the epilog waits for 5 s."""


class SlurmCommands:
    """Asks slurmctld with Slurm's own commands."""

    def __init__(self, run: RunSlurm = run_slurm) -> None:
        self._run = run
        self._refusals = SlurmRefusals(run)

    async def allocation(self, job: SlurmJob) -> SlurmAllocation:
        """Return what a job has on its node.

        Raises:
            SlurmRefusal: it is over, or what Slurm says of it is ambiguous.
            SlurmFailed: Slurm does not answer.
        """
        try:
            text = await self._show(str(job.id))
            if (element := element_of(text, job.id)) is not None:
                text = await self._show(element)
        except SlurmFailed as error:
            if is_unknown_job(error):
                raise SlurmRefusal(error.message, is_over=True) from error
            raise
        try:
            found = allocation_on(text, job.id, job.node)
        except JobIsOver as error:
            raise SlurmRefusal(str(error), is_over=True) from error
        except Unclear as error:
            raise SlurmRefusal(str(error)) from error
        return SlurmAllocation(found.name, found.is_batch, found.gpus, found.shards)

    async def _show(self, job: str) -> str:
        return await self._run("scontrol", "show", "job", "-d", job)

    async def exit_of(self, job: SlurmJob) -> Exit | None:
        """Return how a job that is ending ended, which is unknown if it is queued again.

        None if Slurm does not answer soon.
        """
        try:
            async with asyncio.timeout(_EXIT_WITHIN_S):
                restarts, _, status = (await list_job(self._run, job.id, _EXIT)).partition("|")
        except (SlurmFailed, TimeoutError):
            return None
        found = ending(status.strip())
        if restarts != str(job.restarts) or found is None:
            return Exit()
        code, signal = found
        return Exit(signal=signal) if signal else Exit(code)

    async def refuse(self, job: SlurmJob, why: str, *, counts: bool = True) -> None:
        """Have Slurm queue a batch job again, for another node; it is held after three rounds.

        Raises:
            SlurmFailed: Slurm does not answer.
        """
        await self._refusals.refuse(job, why, counts=counts)

    async def take_up(self, node: str) -> None:
        """Allow nodes again that a daemon of this node, which ran before, would have allowed.

        Raises:
            SlurmFailed: Slurm does not answer.
        """
        await self._refusals.take_up(node)

    async def close(self) -> None:
        """Stop waiting for what Slurm carries out."""
        await self._refusals.close()
