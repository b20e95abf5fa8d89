"""Asks Slurm about a job; the port `SlurmController`."""

from gpulease.domain.job import SlurmJob
from gpulease.host.slurm_commands import RunSlurm, run_slurm
from gpulease.host.slurm_refusals import SlurmRefusals
from gpulease.service.ports import SlurmAllocation
from gpulease.slurm.allocations import allocation_on, element_of


class SlurmCommands:
    """Asks slurmctld with Slurm's own commands."""

    def __init__(self, run: RunSlurm = run_slurm) -> None:
        self._run = run
        self._refusals = SlurmRefusals(run)

    async def allocation(self, job: SlurmJob) -> SlurmAllocation:
        """Return what a job has on its node.

        Raises:
            SlurmFailed: Slurm does not answer, or what it says of this node is ambiguous.
        """
        text = await self._run("scontrol", "show", "job", "-d", str(job.id))
        if (element := element_of(text, job.id)) is not None:
            text = await self._run("scontrol", "show", "job", "-d", element)
        found = allocation_on(text, job.id, job.node)
        return SlurmAllocation(found.name, found.is_batch, found.gpus, found.shards)

    async def refuse(self, job: SlurmJob, why: str) -> None:
        """Have Slurm queue a batch job again, for another node; it is held after three times.

        Raises:
            SlurmFailed: Slurm does not answer.
        """
        await self._refusals.refuse(job, why)

    async def close(self) -> None:
        """Stop waiting for what Slurm carries out."""
        await self._refusals.close()
