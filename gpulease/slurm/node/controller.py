"""Asks Slurm about jobs; refuses those that do not fit here, for Slurm to queue them again.

A node that refuses a job is excluded from its nodes. When no other one is left, that was a round:
the job waits for a while, and all of its nodes are asked again. After three rounds it is held.

The state is in the job's AdminComment, which only admins and nodes write, so that it is common to
all nodes and survives their daemons.

Rounds with a refusal because of other leases do not count, since leases end: Slurm 22.05 may assign
a GPU twice, as shards and whole.

An excluded node is allowed again after a while: other nodes may not suit the job, which would then
wait without end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpulease.domain.job import Exit, SlurmJob, one_line
from gpulease.errors import SlurmFailed
from gpulease.record import replace
from gpulease.slurm import commands
from gpulease.slurm.allocations import NodeAllocation, SlurmRefusal, allocation_on, element_of
from gpulease.slurm.annotations import MOST_ROUNDS, Note, note_in, with_note
from gpulease.slurm.records import ending, is_batch

_log = logging.getLogger(__name__)

RunSlurm = Callable[..., Awaitable[str]]
"""Like `run_slurm` below."""
_THREADS = ThreadPoolExecutor(8, "slurm")
_UNKNOWN = "Slurm does not know job"

_EXIT = "--Format=JobID:|,RestartCnt:|,exit_code:"
_EXIT_WITHIN_S = 2.0
"""The lease ends afterwards, and the epilog waits for 5 s."""
_FIELDS = "--Format=JobID:|,State:|,ReqNodes:|,Partition:|,BatchFlag:|,admin_comment:"
"""Without what the user chooses."""


async def run_slurm(*argv: str, deadline: float = commands.DEADLINE_S) -> str:
    """Run a command such as ("scontrol", "show", "node") in a thread, and return its output.

    Raises:
        SlurmFailed: it is not installed, failed, or took longer than `deadline` seconds.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, commands.run_slurm, argv, deadline)


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


class SlurmController:
    """Asks Slurm about jobs, and sends them elsewhere; closed at the end of the daemon."""

    def __init__(
        self,
        run: RunSlurm = run_slurm,
        *,
        look_again_s: float = 1.0,
        most_looks: int = 120,
        wait_here_s: int = 60,
    ) -> None:
        """`wait_here_s`: seconds until nodes that refused a job are asked again."""
        self._run = run
        self._look_again_s = look_again_s
        self._most_looks = most_looks
        self._wait_here_s = wait_here_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def allocation(self, job: SlurmJob) -> NodeAllocation:
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
        return allocation_on(text, job.id, job.node)

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
        """Note `why` for the owner of a job, and have Slurm queue it again if it can.

        Slurm queues only batch jobs again, and not those of `sbatch --no-requeue`. A round with a
        refusal that does not count never holds the job. Returns before Slurm has carried it out.

        Raises:
            SlurmFailed: Slurm does not answer.
        """
        try:
            asked = await self._ask(job.id)
        except SlurmFailed as error:
            if is_unknown_job(error):
                return
            raise
        now = _after_one_more(asked, job.node, f"{job.node}: {one_line(why)}", counts=counts)
        elsewhere = not asked.is_batch or await self._may_run_elsewhere(asked, job.node)
        if not (elsewhere or now.for_leases):
            now = replace(now, rounds=now.rounds + 1)
        await self._update(asked.label, f"admincomment={with_note(asked.comment, now)}")
        if not asked.is_batch:
            return
        is_held = now.rounds >= MOST_ROUNDS
        try:
            await self._run("scontrol", "requeuehold" if is_held else "requeue", asked.label)
        except SlurmFailed as error:
            _log.warning("cannot send Slurm job %s elsewhere, it fails: %s", job.id, error)
            return
        self._begin(self._when_pending(job.id, now, elsewhere=elsewhere, is_held=is_held))

    async def take_up(self, node: str) -> None:
        """Allow nodes again that a daemon of this node, which ran before, would have allowed.

        Raises:
            SlurmFailed: Slurm does not answer.
        """
        listed = await self._run(
            "squeue", "--noheader", "--array", "--states=PENDING", "--Format=JobID:|,admin_comment:"
        )
        for line in listed.splitlines():
            number, _, comment = line.partition("|")
            note = note_in(comment)
            if number.isdecimal() and note is not None and note.refused_by[-1:] == [node]:
                self._begin(self._allow_again(int(number), note))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        async def logged() -> None:
            try:
                await work
            except SlurmFailed as error:
                _log.info("a refused job of Slurm starts after Slurm's own delay: %s", error)

        task = asyncio.create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop waiting for jobs to be queued again; Slurm starts them after its own delay."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _when_pending(self, job: int, note: Note, *, elsewhere: bool, is_held: bool) -> None:
        """Let Slurm start the job at once elsewhere, or here later; by itself it waits for minutes.

        Slurm takes these changes only while the job is pending.
        """
        if await self._until_pending(job) is None:
            return
        # slurmd may report only now that it has not launched the job. Slurm 22.05 would take that
        # for the end of the next run.
        await asyncio.sleep(2 * self._look_again_s)
        if (asked := await self._until_pending(job)) is None:
            return
        others = [each for each in asked.excluded if each not in note.refused_by]
        excluded = ",".join([*others, *note.refused_by] if elsewhere else others)
        when = "now" if elsewhere else f"now+{self._wait_here_s}"
        start = [] if is_held else [f"starttime={when}"]
        await self._update(asked.label, f"excnodelist={excluded}", *start)
        if elsewhere:
            await self._allow_again(job, note)

    async def _until_pending(self, job: int) -> _Asked | None:
        for _ in range(self._most_looks):
            if (asked := await self._ask(job)).state == "PENDING":
                return asked
            await asyncio.sleep(self._look_again_s)
        return None

    async def _allow_again(self, job: int, note: Note) -> None:
        """Let all nodes have a job that still waits; the node that refused it last does that."""
        await asyncio.sleep(self._wait_here_s)
        asked = await self._ask(job)
        if asked.state == "PENDING" and note_in(asked.comment) == note:
            kept = [each for each in asked.excluded if each not in note.refused_by]
            await self._update(asked.label, f"excnodelist={','.join(kept)}")

    async def _ask(self, job: int) -> _Asked:
        """Ask about a job.

        Raises:
            SlurmFailed: there is no such job, or Slurm does not answer.
        """
        about = (await list_job(self._run, job, _FIELDS)).split("|", 4)
        label, _, nodes = (await list_job(self._run, job, "--format=%A|%i|%x")).partition("|")
        state, wanted, partitions, batch, comment = ("" if it == "(null)" else it for it in about)
        if not nodes or "(null)" in nodes:
            excluded = []
        elif "[" not in nodes:
            excluded = nodes.split(",")
        else:
            excluded = (await self._run("scontrol", "show", "hostnames", nodes)).split()
        return _Asked(label, comment, state, bool(wanted), partitions, is_batch(batch), excluded)

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

    async def _update(self, label: str, *changes: str) -> None:
        await self._run("scontrol", "update", f"jobid={label}", *changes)


def _after_one_more(asked: _Asked, node: str, why: str, *, counts: bool) -> Note:
    """Return the note after one more refusal. Nodes that are not excluded are of former rounds."""
    before = note_in(asked.comment) or Note()
    same = [each for each in before.refused_by if each in asked.excluded and each != node]
    return Note(
        why,
        refused=before.refused + 1,
        nodes=" ".join([*same, node]),
        # From 3 on, an admin has released a job that was held.
        rounds=before.rounds if before.rounds < MOST_ROUNDS else 0,
        for_leases=not counts or (before.for_leases and bool(same)),
    )
