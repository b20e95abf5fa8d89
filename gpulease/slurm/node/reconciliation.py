"""Compares the leases of Slurm's jobs with the jobs: no lease without a job, no job without one.

Most looks read /proc alone. A job whose slurmstepd runs here is there. slurmctld is asked about
other jobs only, one by one and rarely: a list of all jobs from each node would be a load for it.
While it does not answer, no lease ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gpulease.domain.job import Job, SlurmJob
from gpulease.errors import SlurmFailed
from gpulease.server.auth import Caller
from gpulease.service.log_once import LogOnce
from gpulease.slurm.allocations import includes
from gpulease.slurm.node.controller import RunSlurm, is_unknown_job, list_job, run_slurm
from gpulease.slurm.node.leases import SlurmRequest
from gpulease.slurm.node.processes import SlurmProcesses

_log = logging.getLogger(__name__)

_FIELDS = "--Format=JobID:|,State:|,UserID:|,GroupID:|,RestartCnt:|,NodeList:"
_HERE = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "CONFIGURING", "SIGNALING",
                   "RESIZING", "STAGE_OUT", "SPECIAL_EXIT"})  # fmt: skip
"""The states of a job that may have processes on its nodes."""
_RUNS = frozenset({"RUNNING", "SUSPENDED"})
_ASK_AFTER = 3
"""Looks between two questions about the same lease."""


@dataclass(frozen=True, slots=True)
class _Listed:
    state: str
    uid: int
    gid: int
    restarts: int
    nodes: str


Lease = Callable[[SlurmRequest], Awaitable[None]]
"""Grants a lease to a job that runs without one. Raises SlurmFailed if Slurm does not answer."""


class SlurmReconciliation:
    """Looks every few seconds."""

    def __init__(
        self,
        holding: Callable[[], Sequence[Job]],
        processes: SlurmProcesses,
        lease: Lease,
        lost: Callable[[Job], Awaitable[None]],
        node: Callable[[], str | None],
        take_up: Callable[[str], Awaitable[None]],
        run: RunSlurm = run_slurm,
    ) -> None:
        """`lost` ends a lease without a job; `node` is this one, None without Slurm.

        `take_up` is called once, for jobs that a daemon of this node refused before.
        """
        self._holding = holding
        self._processes = processes
        self._lease = lease
        self._lost = lost
        self._node = node
        self._take_up = take_up
        self._run = run
        self._has_listed = False
        """Slurm has listed the jobs here once, and those refused here, since the start."""
        self._without_step: dict[int, int] = {}
        """For how many looks a lease has had no slurmstepd, by Slurm's number."""
        self._dealt_with: set[int] = set()
        """Jobs without a lease that need none, or do not fit."""
        self._complaints = LogOnce(_log)

    async def look(self) -> None:
        """Compare once."""
        node = self._node()
        leases = self._leases()
        if node is None or (not leases and self._has_listed):
            return
        try:
            there = await asyncio.to_thread(self._processes.with_steps, leases.keys())
            await self._check_leases(leases, there)
            await self._check_jobs(node, leases, there)
        except SlurmFailed as error:
            self._complaints.say("slurm", f"cannot compare leases with Slurm: {error}")
        else:
            self._complaints.passed("slurm")

    def _leases(self) -> dict[int, Job]:
        """Return the leases by Slurm's numbers."""
        return {job.slurm.id: job for job in self._holding() if job.slurm is not None}

    async def _check_leases(self, leases: Mapping[int, Job], there: Collection[int]) -> None:
        """End the leases whose jobs are gone."""
        missing = leases.keys() - there
        self._without_step = {each: self._without_step.get(each, 0) + 1 for each in missing}
        for number, looks in self._without_step.items():
            if looks % _ASK_AFTER == 0:
                await self._check_lease(leases[number])

    async def _check_lease(self, job: Job) -> None:
        assert job.slurm is not None, "it is a job of Slurm"
        listed, run = await self._ask(job.slurm.id), job.slurm
        if (
            listed is not None
            and listed.state in _HERE
            and includes(listed.nodes, run.node)
            and listed.restarts == run.restarts
        ):
            return
        if await asyncio.to_thread(self._processes.of_job, job.slurm.id):
            return
        _log.info("job %s of Slurm is gone; its lease, job %s, ends", job.slurm.id, job.id)
        await self._lost(job)

    async def _check_jobs(self, node: str, leases: Mapping[int, Job], there: set[int]) -> None:
        """Grant leases to jobs that run without one."""
        candidates = set(there)
        if not self._has_listed:
            listed = await self._run(
                "squeue", "--noheader", "--array", f"--nodelist={node}",
                f"--states={','.join(sorted(_RUNS))}", "--format=%A",
            )  # fmt: skip
            candidates |= {int(line) for line in listed.split() if line.isdecimal()}
        self._dealt_with &= there
        for number in candidates - leases.keys() - self._dealt_with:
            running = await self.running(number, node)
            # Its prolog may have asked meanwhile.
            if running is not None and number not in self._leases():
                await self._lease(running)
            self._dealt_with.add(number)
        if not self._has_listed:
            await self._take_up(node)
        self._has_listed = True

    async def running(self, number: int, node: str) -> SlurmRequest | None:
        """Return a job that runs on this node, as Slurm describes it; None if it does not.

        Raises:
            SlurmFailed: it does not answer.
        """
        listed = await self._ask(number)
        if listed is None or listed.state not in _RUNS or not includes(listed.nodes, node):
            return None
        owner = Caller(0, listed.uid, listed.gid).owner
        return SlurmRequest(SlurmJob(number, node, listed.restarts), owner, is_running=True)

    async def _ask(self, number: int) -> _Listed | None:
        """Return what Slurm says of a job; None if it does not know it.

        Raises:
            SlurmFailed: it does not answer.
        """
        try:
            fields = (await list_job(self._run, number, _FIELDS)).split("|")
        except SlurmFailed as error:
            if is_unknown_job(error):
                return None
            raise
        state, uid, gid, restarts, nodes = fields
        return _Listed(state, int(uid), int(gid), int(restarts), nodes.strip())
