"""Refuses Slurm jobs that do not fit on this node: Slurm queues them again, for other nodes.

The count of refusals is in the job's AdminComment, which only admins and nodes write, so that it is
common to all nodes and survives their daemons. The third refusal holds the job.

Refusals because of other leases do not count, since leases end: Slurm 22.05 may assign a GPU twice,
as shards and whole.

An excluded node is allowed again after a while: other nodes may not suit the job, which would then
wait without end.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpulease.domain.job import SlurmJob, one_line
from gpulease.errors import SlurmFailed
from gpulease.host.slurm_commands import RunSlurm, is_unknown_job, list_job
from gpulease.slurm.notes import with_note

_log = logging.getLogger(__name__)

_MOST = 3
"""The refusal that holds the job."""
_REFUSED = re.compile(r"gpulease: refused ([0-9]{1,3}) times? \(([^()]*)\): ")
_FIELDS = "--Format=JobID:|,State:|,ReqNodes:|,Partition:|,BatchFlag:|,admin_comment:"
"""Without what the user chooses."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What Slurm says about a job, none of which its owner can forge."""

    label: str
    """What commands call it."""
    comment: str
    state: str
    wants_nodes: bool
    """It asks for nodes by name."""
    partitions: str
    is_batch: bool
    excluded: Sequence[str]

    @property
    def refused_by(self) -> tuple[int, list[str]]:
        """How often it was refused, and by which nodes."""
        found = _REFUSED.search(self.comment)
        return (int(found[1]), found[2].split()) if found else (0, [])


class SlurmRefusals:
    """Sends jobs elsewhere; closed at the end of the daemon."""

    def __init__(
        self,
        run: RunSlurm,
        *,
        look_again_s: float = 1.0,
        most_looks: int = 120,
        wait_here_s: int = 60,
    ) -> None:
        """`wait_here_s`: seconds until a node is asked again, where no other one may do."""
        self._run = run
        self._look_again_s = look_again_s
        self._most_looks = most_looks
        self._wait_here_s = wait_here_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def refuse(self, job: SlurmJob, why: str, *, counts: bool = True) -> None:
        """Note `why` for the owner of a job, and have Slurm queue it again if it can.

        Slurm queues only batch jobs again, and not those of `sbatch --no-requeue`.

        Raises:
            SlurmFailed: Slurm does not answer.
        """
        try:
            asked = await self._ask(job.id)
        except SlurmFailed as error:
            if is_unknown_job(error):
                return
            raise
        count, nodes = asked.refused_by
        refusing = list(dict.fromkeys([*nodes, job.node]))
        if counts:
            count, nodes = count + 1, refusing
        is_held = counts and count >= _MOST
        comment = f"{_counted(count, nodes)}{job.node}: {one_line(why)}"
        await self._update(asked.label, f"admincomment={with_note(asked.comment, comment)}")
        if not asked.is_batch:
            return
        how = "requeuehold" if is_held else "requeue"
        try:
            await self._run("scontrol", how, asked.label)
        except SlurmFailed as error:
            _log.warning("cannot send Slurm job %s elsewhere, it fails: %s", job.id, error)
            return
        task = asyncio.create_task(self._when_pending(job, refusing, is_held=is_held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop waiting for jobs to be queued again; Slurm starts them after its own delay."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _when_pending(self, job: SlurmJob, nodes: Sequence[str], *, is_held: bool) -> None:
        """Let Slurm start the job at once elsewhere, or here later; by itself it waits for minutes.

        Slurm takes these changes only while the job is pending.
        """
        try:
            if await self._until_pending(job.id) is None:
                return
            # slurmd may report only now that it has not launched the job. Slurm 22.05 would take
            # that for the end of the next run.
            await asyncio.sleep(2 * self._look_again_s)
            if (asked := await self._until_pending(job.id)) is None:
                return
            elsewhere = not is_held and await self._may_run_elsewhere(asked, job.node)
            others = [each for each in asked.excluded if each not in nodes]
            excluded = ",".join([*others, *nodes] if elsewhere else others)
            when = "now" if elsewhere else f"now+{self._wait_here_s}"
            start = [] if is_held else [f"starttime={when}"]
            await self._update(asked.label, f"excnodelist={excluded}", *start)
            if elsewhere:
                await asyncio.sleep(self._wait_here_s)
                await self._allow_again(job)
        except SlurmFailed as error:
            _log.info("Slurm job %s starts after Slurm's own delay: %s", job.id, error)

    async def _until_pending(self, job: int) -> _Asked | None:
        for _ in range(self._most_looks):
            if (asked := await self._ask(job)).state == "PENDING":
                return asked
            await asyncio.sleep(self._look_again_s)
        return None

    async def _allow_again(self, job: SlurmJob) -> None:
        """Take this node off the excluded ones of a job that still waits."""
        asked = await self._ask(job.id)
        if asked.state == "PENDING" and job.node in asked.excluded:
            kept = [each for each in asked.excluded if each != job.node]
            await self._update(asked.label, f"excnodelist={','.join(kept)}")

    async def _ask(self, job: int) -> _Asked:
        """Ask about a job.

        Raises:
            SlurmFailed: there is no such job, or Slurm does not answer.
        """
        about = (await list_job(self._run, job, _FIELDS)).split("|", 4)
        label, _, nodes = (await list_job(self._run, job, "--format=%A|%i|%x")).partition("|")
        state, wanted, partitions, batch, comment = ("" if it == "(null)" else it for it in about)
        excluded = await self._expand(nodes)
        return _Asked(label, comment, state, bool(wanted), partitions, batch == "1", excluded)

    async def _may_run_elsewhere(self, asked: _Asked, node: str) -> bool:
        """Return whether another node with GPUs is left in the partitions of a job."""
        if asked.wants_nodes:
            return False
        listed = await self._run(
            "sinfo", "--noheader", "--Node", f"--partition={asked.partitions}", "--format=%N|%G"
        )
        rows = (line.partition("|") for line in listed.splitlines())
        there = {name for name, _, gres in rows if "gpu" in gres or "shard" in gres}
        return bool(there - {node} - set(asked.excluded))

    async def _expand(self, hostlist: str) -> list[str]:
        if not hostlist or "(null)" in hostlist:
            return []
        if "[" not in hostlist:
            return hostlist.split(",")
        return (await self._run("scontrol", "show", "hostnames", hostlist)).split()

    async def _update(self, label: str, *changes: str) -> None:
        await self._run("scontrol", "update", f"jobid={label}", *changes)


def _counted(count: int, nodes: Sequence[str]) -> str:
    """Return how often a job was refused, and by which nodes, as `_REFUSED` reads it."""
    times = "time" if count == 1 else "times"
    return f"refused {count} {times} ({' '.join(nodes)}): " if count else "waits: "
