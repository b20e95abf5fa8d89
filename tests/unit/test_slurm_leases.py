"""Leases for jobs of Slurm: granted at once or refused, and ended by the epilog."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon_stand_in import views
from fakes import (
    ALICE,
    BOB,
    HOLDER,
    NOON,
    FakeClock,
    FakeFinder,
    FakeSlurm,
    G,
    MemoryStore,
    order,
    reading,
)
from gpulease.domain.gpu import Fault, GpuUuid, JobId, ProcessReading
from gpulease.domain.health import GpuAvailability
from gpulease.domain.idle import IdlePolicy, Release
from gpulease.domain.job import CommandFingerprint, Exit, Holder, Job, Outcome, SlurmJob
from gpulease.domain.lease import State
from gpulease.domain.overuse import OverusePolicy
from gpulease.drawing.words import named
from gpulease.errors import NoRoomNow, NotAllowed, SlurmFailed, WrongState
from gpulease.service.adoption import Adoption, adopt, find_uses
from gpulease.service.editing import refuse_unless_queued
from gpulease.service.idleness import IdleWatch
from gpulease.service.jobs import extend, requeue, take_back_grants
from gpulease.service.observation import Observation
from gpulease.service.overuse import OveruseWatch
from gpulease.service.ports import Policy, SlurmPolicy
from gpulease.service.queue_state import QueueState
from gpulease.service.scheduler import planned, reconcile
from gpulease.service.slurm_gpus import gpus_of_slurm, local_gpus, refuse_closed_queue
from gpulease.slurm.allocations import NodeAllocation, SlurmRefusal
from gpulease.slurm.node.leases import SlurmLeases, SlurmRequest, latest
from gpulease.units import MIB

from .test_scheduler import World, at_once, play

SHARD = 256 * MIB
SLURM = SlurmPolicy(SHARD)


def request(number: int = 17, restarts: int = 0, **more: Any) -> SlurmRequest:
    return SlurmRequest(SlurmJob(number, "n1", restarts), ALICE, **more)


class Node(World):
    """The daemon of a node among fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.gpus.sizes = {"GPU-a": 8 * G, "GPU-b": 8 * G}
        self.slurm = FakeSlurm()
        self.policy = Policy(slurm=SLURM)
        self.epilogs: list[int] = []
        self.exits: list[Exit | None] = []
        self.leaves_processes = False
        self.tasks: dict[int, int] = {}
        """Running jobs of Slurm by the pids of their tasks."""
        self.leases = SlurmLeases(
            self.scheduler, self.finder, self.clock, at_once, self.slurm, self.ended, self.limit,
            self.describe,
        )  # fmt: skip
        self.leases.ends_within_s = 0.0

    async def limit(self, job: Job) -> None:
        """Set no limit: no driver."""

    async def describe(self, number: int, pid: int) -> SlurmRequest | None:
        return request(number, is_running=True) if self.tasks.get(pid) == number else None

    async def ended(self, job: Job, exit_: Exit | None) -> None:
        self.epilogs.append(job.id)
        self.exits.append(exit_)
        if not self.leaves_processes:
            self.launcher.exits(job.id)

    async def grant(self, shards: int = 8, number: int = 17, gpu: int = 0) -> Job:
        self.slurm.give(number, shards, gpu)
        return await self.leases.grant(request(number))

    async def refusal(self, shards: int = 8, number: int = 17, gpu: int = 0) -> str:
        with pytest.raises(SlurmRefusal) as refused:
            await self.grant(shards, number, gpu)
        assert self.store.live() == ()
        return str(refused.value)


def leases(job: Job) -> list[tuple[str, int]]:
    return [(each.gpu, each.memory) for each in job.leases]


@play
async def test_shards_are_memory_of_the_gpu_that_slurm_chose(node: Node) -> None:
    job = await node.grant(12, gpu=1)
    assert leases(job) == [("GPU-b", 3 * G)]
    assert (job.state, job.slurm, job.owner) == (State.GRANTED, SlurmJob(17, "n1"), ALICE)
    assert (job.kind, job.has_shim, job.claim.exclusive) == ("slurm", False, False)


@play
async def test_a_task_without_a_lease_gets_it_and_only_its_own(node: Node) -> None:
    """slurmd may skip the prolog of a job that was queued again."""

    node.slurm.give(17, 8, 0)
    assert await node.leases.of_task(17, 500) is None
    node.tasks = {500: 17, 501: 17}
    assert await node.leases.of_task(18, 500) is None
    first, second = await asyncio.gather(*(node.leases.of_task(17, pid) for pid in (500, 501)))
    assert first is not None
    assert second is not None
    assert first.id == second.id
    assert leases(first) == [("GPU-a", 2 * G)]


@play
async def test_a_task_whose_lease_does_not_fit_is_refused_as_in_the_prolog(node: Node) -> None:
    node.slurm.give(17, 33, 0)
    node.tasks = {500: 17}
    assert await node.leases.of_task(17, 500) is None
    assert "does not fit" in (node.leases.why_refused(17) or "")
    assert len(node.slurm.refused) == 1
    assert await node.leases.of_task(17, 500) is None
    assert len(node.slurm.refused) == 1


@play
async def test_whole_gpus_are_exclusive(node: Node) -> None:
    node.slurm.give(17, 0, 0, 1)
    job = await node.leases.grant(request())
    assert leases(job) == [("GPU-a", 8 * G), ("GPU-b", 8 * G)]
    assert job.claim.exclusive


@play
async def test_the_lease_is_followed_and_the_epilog_ends_it(node: Node) -> None:
    job = await node.grant()
    node.leases.ends_within_s = 5.0
    await node.leases.end(17)
    ended = node.job(job.id)
    assert (ended.state, ended.outcome) == (State.ENDED, Outcome.EXITED)
    assert node.leases.of(17) is None
    await node.leases.end(17)
    assert node.epilogs == [job.id]


@play
async def test_slurm_is_asked_how_a_job_ended_that_has_no_exit_code(node: Node) -> None:
    node.slurm.exits[17] = Exit(signal=15)
    for code in (Exit(0), Exit(3)):
        await node.grant()
        await node.leases.end(17, code)
    assert node.exits == [Exit(signal=15), Exit(3)]


@play
async def test_memory_counts_while_processes_are_left_after_the_epilog(node: Node) -> None:
    node.leaves_processes = True
    job = await node.grant(32)
    await node.leases.end(17)
    assert node.leases.of(17) == node.store.job(job.id)
    with pytest.raises(SlurmRefusal, match="job 17 of Slurm holds"):
        await node.grant(0, number=18)


@play
async def test_a_request_that_is_repeated_gets_the_same_lease(node: Node) -> None:
    node.slurm.give(17, 20)
    several = (node.leases.grant(request()) for _ in range(5))
    found = {job.id for job in await asyncio.gather(*several)}
    assert len(found) == 1
    assert len(node.store.live()) == 1
    asked = node.slurm.asked
    again = await node.leases.grant(request())
    assert ({again.id}, node.slurm.asked) == (found, asked)


@play
async def test_a_job_that_slurm_starts_again_gets_another_lease(node: Node) -> None:
    node.leases.ends_within_s = 5.0
    first = await node.grant(32)
    second = await node.leases.grant(request(restarts=1))
    assert first.id != second.id
    assert node.epilogs == [first.id]
    assert [job.id for job in node.store.holding()] == [second.id]


@play
async def test_a_lease_is_not_handed_to_another_user_whose_job_has_the_same_id(node: Node) -> None:
    node.leases.ends_within_s = 5.0
    first = await node.grant(32)
    second = await node.leases.grant(replace(request(), owner=BOB))
    assert (first.owner, second.owner) == (ALICE, BOB)
    assert [job.id for job in node.store.holding()] == [second.id]


@play
async def test_memory_of_strangers_refuses_a_job(node: Node) -> None:
    node.gpus.unmanaged["GPU-a"] = 3 * G
    assert await node.refusal(24) == "6G does not fit on GPU 0: 3G is used outside any lease"
    assert (await node.grant(20)).state is State.GRANTED


@play
async def test_the_memory_of_a_job_that_has_just_ended_is_waited_for(node: Node) -> None:
    node.gpus.unmanaged["GPU-a"] = 8 * G
    node.scheduler.supervisor.freed_at = NOON
    waiting = asyncio.create_task(node.grant())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    node.gpus.unmanaged.clear()
    assert (await waiting).state is State.GRANTED
    node.gpus.unmanaged["GPU-b"] = 8 * G
    node.clock.forward(seconds=3)
    with pytest.raises(SlurmRefusal):
        await node.grant(number=18, gpu=1)


@play
async def test_a_gpu_out_of_service_refuses_a_job_at_once(node: Node) -> None:
    node.scheduler.supervisor.freed_at = NOON
    node.store.standing[GpuUuid("GPU-a")] = GpuAvailability(drain="maintenance")
    assert "maintenance" in await node.refusal()
    node.store.standing.clear()
    node.gpus.broken["GPU-a"] = reading("GPU-a", fault=Fault.UNREADABLE, used=None)
    assert "cannot be read" in await node.refusal()
    assert "a GPU is missing" in await node.refusal(gpu=2)


@play
async def test_a_refused_job_is_sent_elsewhere_and_its_task_prolog_finds_out_why(
    node: Node,
) -> None:
    node.slurm.give(17, 8)
    await node.leases.refuse(request(), SlurmRefusal("no room"))
    assert node.slurm.refused == [(SlurmJob(17, "n1"), "no room")]
    assert node.leases.why_refused(17) == "no room"
    await node.leases.grant(request(restarts=1))
    assert node.leases.why_refused(17) is None


@play
async def test_a_job_that_is_over_is_not_sent_elsewhere(node: Node) -> None:
    await node.leases.refuse(request(), SlurmRefusal("it is COMPLETING", is_over=True))
    assert not node.slurm.refused
    assert node.leases.why_refused(17) == "it is COMPLETING"


@play
async def test_a_job_to_which_slurm_assigns_no_gpu_gets_none(node: Node) -> None:
    node.slurm.allocations[17] = NodeAllocation("train.py", True, (), 0)
    with pytest.raises(SlurmRefusal, match="names no GPU"):
        await node.leases.grant(request())
    assert node.store.live() == ()


@play
async def test_a_whole_gpu_with_shards_in_use_is_refused_with_what_to_ask_for(node: Node) -> None:
    await node.grant(1)
    node.slurm.give(18, 0, 0)
    with pytest.raises(SlurmRefusal, match=r"ask for all shards .*--gres=shard:32$") as refused:
        await node.leases.grant(request(18))
    assert refused.value.by_leases


@play
async def test_nothing_is_granted_while_slurm_does_not_say_what_a_job_has(node: Node) -> None:
    node.slurm.is_away = True
    with pytest.raises(SlurmFailed):
        await node.leases.grant(request())
    assert node.store.live() == ()


@play
async def test_a_job_that_runs_already_gets_a_lease_for_what_it_holds(node: Node) -> None:
    node.gpus.processes["GPU-a"] = {5: 7 * G}
    node.finder.jobs[5] = JobId(0)
    node.slurm.give(17, 30)
    with pytest.raises(SlurmRefusal):
        await node.leases.grant(request())
    job = await node.leases.grant(request(is_running=True))
    assert leases(job) == [("GPU-a", 30 * SHARD)]


@play
async def test_the_first_task_says_what_the_job_runs(node: Node) -> None:
    job = await node.grant()
    alike = CommandFingerprint("a", "b")
    said = await node.leases.describe(job, "python train.py", alike)
    assert (said.command, said.usage.fingerprint) == ("python train.py", alike)
    assert said.leases == job.leases
    writes = node.store.writes
    await node.leases.describe(said, "python train.py", alike)
    assert node.store.writes == writes


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), max_size=12))
def test_the_leases_of_a_gpu_never_exceed_it(wanted: list[tuple[int, int]]) -> None:
    async def scenario(node: Node) -> None:
        for number, (shards, gpu) in enumerate(wanted, 1):
            node.slurm.give(number, shards, gpu)
        numbers = range(1, len(wanted) + 1)
        several = (node.leases.grant(request(number)) for number in numbers)
        await asyncio.gather(*several, return_exceptions=True)
        held = [lease for job in node.store.holding() for lease in job.leases]
        for uuid in ("GPU-a", "GPU-b"):
            assert sum(each.memory for each in held if each.gpu == uuid) <= 8 * G

    play(scenario)()


# Which GPUs are whose.


def test_slurm_numbers_gpus_by_their_device_files_without_the_local_ones() -> None:
    gpus = [
        reading("GPU-a", 0, minor=3),
        reading("GPU-b", 1, minor=0),
        reading("GPU-c", 2, minor=1),
        reading("MIG-d", 2, parent=GpuUuid("GPU-c"), mig_index=0),
    ]
    assert [each.uuid for each in gpus_of_slurm(gpus, SLURM)] == ["GPU-b", "GPU-c", "GPU-a"]
    some = SlurmPolicy(SHARD, ("1", "gpu-c"))
    assert [each.uuid for each in gpus_of_slurm(gpus, some)] == ["GPU-a"]
    assert local_gpus(gpus, some) == {"GPU-b", "GPU-c", "MIG-d"}


def test_the_queue_has_the_local_gpus_alone() -> None:
    seen = Observation((reading("GPU-a", 0), reading("GPU-b", 1)), {}, NOON)
    policy = Policy(slurm=SlurmPolicy(SHARD, ("1",)))
    store = MemoryStore()
    with store.write() as tx:
        first, second = (tx.add(order(6 * G), NOON) for _ in range(2))
    decided = reconcile(store, seen, policy, FakeClock())
    assert [leases(job) for job in store.holding()] == [[("GPU-b", 6 * G)]]
    [slurms] = [each for each in decided.reason(second).refusal.obstacles if each.gpu == "GPU-a"]
    assert slurms.why == "Slurm assigns it"
    assert [gpu.uuid for gpu in QueueState(store).empty(seen, policy, NOON)] == ["GPU-b"]
    assert first.id == store.holding()[0].id


def test_without_local_gpus_the_queue_is_closed() -> None:
    with pytest.raises(NotAllowed, match="Slurm assigns the GPUs"):
        refuse_closed_queue(SLURM, "submit")
    refuse_closed_queue(SlurmPolicy(SHARD, ("0",)), "submit")
    refuse_closed_queue(None, "submit")


# What else differs from other jobs.


@play
async def test_verbs_that_are_slurms_are_refused_with_its_command(node: Node) -> None:
    job = await node.grant()
    with pytest.raises(WrongState) as refused:
        requeue(node.store, job.id, "alice", node.clock)
    assert refused.value.hint == "scontrol requeue 17"
    with pytest.raises(WrongState) as refused:
        extend(node.store, job.id, timedelta(hours=1), "alice", node.clock)
    assert "scontrol update jobid=17" in (refused.value.hint or "")
    with pytest.raises(WrongState, match="Slurm runs it"):
        refuse_unless_queued(job, "edit")


@play
async def test_a_stop_is_the_reason_for_the_end_and_goes_to_slurm(node: Node) -> None:
    node.leases.ends_within_s = 5.0
    job = await node.grant()
    while node.store.job(job.id) != node.leases.of(17) or job.state is State.GRANTED:
        await asyncio.sleep(0)
        job = node.leases.of(17) or job
    await node.scheduler.cancel(job.id, "root")
    await asyncio.sleep(0)
    await node.leases.end(17)
    assert node.launcher.stopped == [job.id]
    ended = node.job(job.id)
    assert (ended.outcome, ended.detail) == (Outcome.CANCELLED, "cancelled by root")


@play
async def test_a_reboot_does_not_queue_it(node: Node) -> None:
    job = await node.grant()
    assert take_back_grants(node.store, lambda _: False, node.clock) == 0
    assert node.leases.of(17) is not None
    assert latest([replace(job, id=JobId(2)), job], 17) == replace(job, id=JobId(2))
    assert latest([job], 18) is None


@play
async def test_a_lease_of_slurm_is_never_elastic(node: Node) -> None:
    watch = OveruseWatch(lambda _: OverusePolicy(elastic=True))
    job = await node.grant()
    assert not watch.policy(job).elastic
    assert watch.policy(replace(job, slurm=None)).elastic


@play
async def test_an_idle_lease_of_slurm_is_not_released(node: Node) -> None:
    watch = IdleWatch(lambda _: IdlePolicy(Release.RELEASE))
    job = await node.grant()
    assert watch.policy(job).release is Release.WARN
    assert watch.policy(replace(job, slurm=None)).release is Release.RELEASE


def test_a_process_on_a_gpu_of_slurm_is_not_adopted() -> None:
    used = ProcessReading(HOLDER.pid, G)
    seen = Observation(
        (reading("GPU-a", 0, used=G, processes=(used,)), reading("GPU-b", 1)), {}, NOON
    )
    store, finder = MemoryStore(), FakeFinder({HOLDER.pid: JobId(0)})
    policy = Policy(slurm=SlurmPolicy(SHARD, ("1",)))
    wanted = replace(order(G), holder=Holder(HOLDER, None, adopted=True))
    adoption = Adoption(wanted, find_uses(wanted, seen, finder), "alice", True, finder)
    with pytest.raises(NoRoomNow, match="Slurm assigns it"), store.write() as tx:
        decided = planned(tx, seen, policy, NOON, None, QueueState(store))
        adopt(tx, adoption, decided, seen, policy, NOON)


def test_listings_name_the_job_of_slurm() -> None:
    shown = views.running(3, kind="slurm", slurm_job=17, name="train.py")
    assert named(shown) == "train.py (Slurm)"
