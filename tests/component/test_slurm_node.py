"""What the daemon of a node does with Slurm: a Slurm of plain values, and real processes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from fake_slurm import FakeJob, FakeSlurm

from fakes import NOON, FakeClock, order
from gpulease.domain.enforcement import EnforcementLevel
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Exit, Job, Outcome, SlurmJob
from gpulease.domain.lease import Lease
from gpulease.errors import SlurmFailed
from gpulease.host.processes import MARKER, ProcessTable
from gpulease.record import replace as with_
from gpulease.service.ports import WorkerExited, WorkerStarted
from gpulease.shim.process_tree import Entry
from gpulease.slurm.annotations import GpuSummary, NodeSummary, Note, decode, note_in, with_note
from gpulease.slurm.node.controller import SlurmController, run_slurm
from gpulease.slurm.node.jobs import SlurmEnforcement, SlurmJobs
from gpulease.slurm.node.leases import SlurmRequest
from gpulease.slurm.node.processes import SlurmProcesses
from gpulease.slurm.node.publication import PublicationPace, SlurmPublication
from gpulease.slurm.node.reconciliation import SlurmReconciliation
from process_rig import run, wait_until

JOB = SlurmJob(17, "n1")


def leased(number: int = 17, restarts: int = 0) -> Job:
    return replace(order().queued(JobId(1), NOON), slurm=SlurmJob(number, "n1", restarts))


# Commands.


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(SlurmFailed, match="refused `sh -c echo why >&2; exit 1`: why"):
        run(run_slurm("sh", "-c", "echo why >&2; exit 1"))
    with pytest.raises(SlurmFailed, match="not installed"):
        run(run_slurm("no-such-command"))


def test_a_command_that_hangs_is_killed(tmp_path: Path) -> None:
    with pytest.raises(SlurmFailed, match="did not answer"):
        run(run_slurm("sh", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 100", deadline=0.2))
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists())


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [("768", Exit(3)), ("0:15", Exit(signal=15)), ("127", Exit()), ("4294967294", Exit())],
)  # fmt: skip
def test_slurm_says_how_a_job_ended(exit_code: str, expected: Exit) -> None:
    slurm = FakeSlurm()
    slurm.jobs[17] = FakeJob("17", "COMPLETING", exit_code=exit_code)
    assert run(SlurmController(slurm).exit_of(JOB)) == expected
    slurm.jobs[17].restarts = 1
    assert run(SlurmController(slurm).exit_of(JOB)) == Exit()
    slurm.is_away = True
    assert run(SlurmController(slurm).exit_of(JOB)) is None


# Refusals.


def refuse(
    slurm: FakeSlurm, node: str = "n1", *, counts: bool = True, wait_here_s: int = 0
) -> FakeJob:
    """Refuse job 17 and wait until everything about it was done; or until a pause of 60 s."""

    async def scenario() -> None:
        refusals = SlurmController(slurm, look_again_s=0, wait_here_s=wait_here_s)
        await refusals.refuse(replace(JOB, node=node), "GPU 1 is drained", counts=counts)
        for _ in range(100):
            await asyncio.sleep(0)
        await refusals.close()

    run(scenario())
    return slurm.jobs[17]


def shown(job: FakeJob) -> str:
    """Return the note of a job as people see it."""
    return str(note_in(job.comment))


def test_a_refused_job_is_queued_again_and_its_owner_reads_why() -> None:
    slurm = FakeSlurm("n2")
    slurm.jobs[17] = FakeJob("17_3")
    job = refuse(slurm)
    assert shown(job) == "refused 1 time (n1): n1: GPU 1 is drained"
    assert (job.actions, job.start) == (["requeue"], "now")
    updates = [" ".join(each) for each in slurm.commands if each[1] == "update"]
    assert "scontrol update jobid=17_3 excnodelist=n1 starttime=now" in updates
    # Other nodes may not suit it: after a while this one may have it again.
    assert job.excluded == ""


@pytest.mark.parametrize(("others", "wanted"), [((), ""), (("n2",), "n1")])
def test_a_job_that_can_only_run_here_waits_for_this_node(
    others: tuple[str, ...], wanted: str
) -> None:
    slurm = FakeSlurm(*others)
    slurm.jobs[17] = FakeJob("17", wanted=wanted)
    job = refuse(slurm, wait_here_s=60)
    assert (job.start, job.excluded) == ("now+60", "")


def test_a_job_is_held_after_three_rounds_of_all_nodes() -> None:
    slurm = FakeSlurm("n2", "n3")
    job = slurm.jobs[17] = FakeJob("17", excluded="n9")
    seen = []
    for node in ["n1", "n2", "n3"] * 3:
        job.state, job.start = "RUNNING", ""
        refuse(slurm, node=node, wait_here_s=60)
        seen.append((shown(job).partition(": ")[0], job.start, job.excluded))
    assert seen[:4] == [
        ("refused 1 time (n1)", "now", "n9,n1"),
        ("refused 2 times (n1 n2)", "now", "n9,n1,n2"),
        ("refused 3 times (n1 n2 n3; by all nodes 1 of 3 times)", "now+60", "n9"),
        ("refused 4 times (n1; by all nodes 1 of 3 times)", "now", "n9,n1"),
    ]
    assert seen[-1] == ("refused 9 times (n1 n2 n3; by all nodes 3 of 3 times)", "", "n9")
    assert job.actions == ["requeue"] * 8 + ["requeuehold"]


def test_a_job_that_an_admin_releases_has_three_more_rounds() -> None:
    slurm = FakeSlurm()
    held = with_note("", Note("n1: GPU 0 is drained", refused=9, nodes="n1", rounds=3))
    slurm.jobs[17] = FakeJob("17", comment=held)
    job = refuse(slurm)
    assert "refused 10 times (n1; by all nodes 1 of 3 times)" in shown(job)
    assert job.actions == ["requeue"]


def test_rounds_with_leases_in_the_way_never_hold_a_job() -> None:
    slurm = FakeSlurm("n2")
    job = slurm.jobs[17] = FakeJob("17")
    for _ in range(9):
        for node in ("n1", "n2"):
            job.state = "RUNNING"
            refuse(slurm, node=node, counts=node == "n2", wait_here_s=60)
    assert shown(job).startswith("refused 18 times (n1 n2; waits for leases): n2: ")
    assert set(job.actions) == {"requeue"}
    job.state = "RUNNING"
    assert "(n1)" in shown(refuse(slurm))


def test_a_daemon_takes_up_what_the_one_before_has_left() -> None:
    slurm = FakeSlurm("n2", "n3")
    note = with_note("", Note("n1: GPU 0 is drained", refused=2, nodes="n2 n1"))
    slurm.jobs = {
        17: FakeJob("17", "PENDING", comment=note, excluded="n9,n1,n2"),
        18: FakeJob("18", "PENDING", comment=note.replace("n2 n1", "n1 n2"), excluded="n1,n2"),
        19: FakeJob("19", "PENDING", excluded="n1"),
    }

    async def scenario() -> None:
        refusals = SlurmController(slurm, wait_here_s=0)
        await refusals.take_up("n1")
        await asyncio.gather(*refusals._tasks)

    run(scenario())
    assert [job.excluded for job in slurm.jobs.values()] == ["n9", "n1,n2", "n1"]


def test_only_batch_jobs_are_queued_again() -> None:
    slurm = FakeSlurm("n2")
    slurm.jobs[17] = FakeJob("17", is_batch=False)
    job = refuse(slurm)
    assert job.actions == []
    assert "GPU 1 is drained" in job.comment


def test_a_job_that_slurm_forgot_is_not_refused() -> None:
    run(SlurmController(FakeSlurm()).refuse(JOB, "why"))


# Reconciliation.


class Node:
    """A node with leases, and with jobs that have a slurmstepd or processes."""

    def __init__(self) -> None:
        self.slurm = FakeSlurm()
        self.leases = [leased()]
        self.steps: set[int] = set()
        self.processes: set[int] = set()
        self.lost: list[JobId] = []
        self.granted: list[SlurmRequest] = []
        self.taken_up: list[str] = []
        self.name: str | None = "n1"
        self.reconciliation = SlurmReconciliation(
            lambda: self.leases, self, self.grant, self.lose, lambda: self.name, self.take_up,
            self.slurm,
        )  # fmt: skip

    def with_steps(self, jobs: Collection[int]) -> set[int]:
        return set(self.steps)

    def of_job(self, job: int) -> set[Entry]:
        return {Entry(1, 1, 1, 1, False, 1)} if job in self.processes else set()

    async def grant(self, job: SlurmRequest) -> None:
        self.granted.append(job)

    async def take_up(self, node: str) -> None:
        self.taken_up.append(node)

    async def lose(self, job: Job) -> None:
        self.lost.append(job.id)

    def look(self, times: int = 10) -> "Node":
        async def scenario() -> None:
            for _ in range(times):
                await self.reconciliation.look()

        run(scenario())
        return self


def test_a_lease_without_a_job_ends() -> None:
    assert Node().look().lost


@pytest.mark.parametrize(
    "job", [
        FakeJob("17", state="COMPLETED"),
        FakeJob("17", state="PENDING", nodes=""),
        FakeJob("17", nodes="n2"),
        FakeJob("17", restarts=1),
    ],
)  # fmt: skip
def test_a_lease_ends_when_its_job_has_left_this_node(job: FakeJob) -> None:
    node = Node()
    node.slurm.jobs[17] = job
    assert node.look().lost


def test_a_lease_stays_while_the_job_or_its_processes_are_there_or_slurm_is_away() -> None:
    there, busy, away = Node(), Node(), Node()
    there.slurm.jobs[17] = FakeJob("17", nodes="n[1-3]")
    busy.processes = {17}
    away.slurm.is_away = True
    for node in (there, busy, away):
        assert not node.look().lost


def test_slurm_is_not_asked_about_jobs_with_a_step() -> None:
    node = Node()
    node.steps = {17}
    node.look(1).slurm.commands.clear()
    assert not node.look(20).slurm.commands


def test_a_job_without_a_lease_gets_one_once() -> None:
    node = Node()
    node.leases = []
    node.slurm.jobs = {5: FakeJob("5"), 6: FakeJob("6", state="PENDING", nodes="")}
    node.steps = {5}
    node.look()
    assert [each.job for each in node.granted] == [SlurmJob(5, "n1")]
    assert node.granted[0].owner.uid == 47201
    node.leases, node.steps = [leased(5)], {5, 7}
    node.slurm.jobs[7] = FakeJob("7", restarts=2)
    node.look()
    assert [each.job for each in node.granted[1:]] == [SlurmJob(7, "n1", 2)]


def test_jobs_refused_before_are_taken_up_once_slurm_answers() -> None:
    node = Node()
    node.slurm.is_away = True
    assert not node.look().taken_up
    node.slurm.is_away = False
    assert node.look().taken_up == ["n1"]


# Following and stopping.


class Jobs:
    """The launcher of Slurm's jobs, with real processes."""

    def __init__(self) -> None:
        self.slurm = FakeSlurm()
        self.slurm.jobs[17] = FakeJob("17_3")
        self.lifted: list[JobId] = []
        self.launcher = SlurmJobs(
            FakeClock(), ProcessTable(), SlurmProcesses(), lambda job: f"here/{job}",
            lambda: ("watch",), self.lift, lambda: timedelta(seconds=0.1), self.slurm,
        )  # fmt: skip
        self.news: list[object] = []

    async def lift(self, job: Job) -> None:
        self.lifted.append(job.id)

    async def follow(self, job: Job) -> None:
        async for each in self.launcher.follow(job):
            self.news.append(each)


def test_a_lease_ends_when_slurm_says_so() -> None:
    jobs = Jobs()

    async def scenario() -> None:
        following = asyncio.create_task(jobs.follow(leased()))
        await asyncio.sleep(0)
        await jobs.launcher.ended(leased(), Exit(3))
        await jobs.launcher.lost(leased())
        await following

    run(scenario())
    started, exited = jobs.news
    assert isinstance(started, WorkerStarted)
    assert isinstance(exited, WorkerExited)
    assert started.levels == ("watch",)
    assert (exited.outcome, exited.exit) == (Outcome.EXITED, Exit(3))
    assert jobs.lifted == [1]


def of_this_user() -> Job:
    return replace(leased(), owner=replace(leased().owner, uid=os.getuid()))


def marked(job: int = 1) -> "subprocess.Popen[bytes]":
    """Start a process of a job that ignores SIGTERM."""
    program = "import signal, time; signal.signal(15, lambda *_: 0); print(1, flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program + "while 1: time.sleep(9)"],
        env={MARKER: f"here/{job}"}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_processes_that_are_left_end_before_the_lease() -> None:
    jobs, mine = Jobs(), of_this_user()
    with marked() as left, marked(2) as other:

        async def scenario() -> None:
            following = asyncio.create_task(jobs.follow(mine))
            await asyncio.sleep(0)
            await jobs.launcher.ended(mine, None)
            await asyncio.to_thread(left.wait)
            await following

        run(scenario())
        assert left.returncode == -9
        assert other.poll() is None
        other.kill()


def test_a_job_is_stopped_by_slurm_and_what_is_left_is_killed() -> None:
    jobs, mine = Jobs(), of_this_user()
    jobs.slurm.jobs[17].comment = with_note("project x; ", Note("n1: y", refused=1, nodes="n1"))
    over = replace(mine, detail="over\nits lease\n\nhint: ask")
    with marked() as left:

        async def scenario() -> None:
            stopping = jobs.launcher.stop(over, "over_lease")
            await asyncio.gather(stopping, asyncio.to_thread(left.wait))

        run(scenario())
    job = jobs.slurm.jobs[17]
    assert job.actions == ["scancel"]
    note = Note("n1: over its lease; ask", stopped="over_lease")
    assert job.comment == with_note("project x; ", note)


def test_a_job_is_stopped_without_slurmctld() -> None:
    jobs, mine = Jobs(), of_this_user()
    jobs.slurm.is_away = True
    with marked() as left:

        async def scenario() -> None:
            stopping = jobs.launcher.stop(mine, "over_lease")
            await asyncio.gather(stopping, asyncio.to_thread(left.wait))

        run(scenario())


def test_a_notice_reaches_the_element_of_an_array() -> None:
    jobs = Jobs()
    run(jobs.launcher.notify(leased(), "over\nit"))
    assert jobs.slurm.commands[-1] == ("scontrol", "notify", "17_3", "gpulease: over it")


# Publishing.

GOOD = GpuSummary(0, "GPU-a", "A", "available", leased=0)
BAD = with_(GOOD, index=1, state="drained", detail="XID 79")


class Publishing:
    def __init__(self, *gpus: GpuSummary) -> None:
        self.slurm = FakeSlurm()
        self.gpus = gpus
        self.publication = SlurmPublication(
            lambda: NodeSummary(0, 256, self.gpus), lambda: "n1", self.slurm, lambda: 1234.56
        )

    def publish(self, *gpus: GpuSummary) -> Mapping[str, str]:
        self.gpus = gpus or self.gpus
        run(self.publication.publish())
        return self.slurm.node


def test_a_change_of_leases_is_published_at_the_next_look() -> None:
    pace = PublicationPace()
    held: list[set[int]] = [set(), {1}, {1}, {2}, set(), set(), set(), set()]
    due = [pace.is_due(frozenset(each), looks_in_period=3) for each in held]
    assert due == [False, True, False, True, True, False, False, True]


def test_gpus_are_published_when_they_change_and_now_and_then() -> None:
    node = Publishing(GOOD)
    assert decode(node.publish()["Extra"]) == NodeSummary(1234.6, 256, (GOOD,))

    def publications(times: int) -> int:
        node.slurm.commands.clear()
        for _ in range(times):
            node.publish()
        return len(node.slurm.commands)

    assert publications(8) == 2
    node.publish(with_(GOOD, leased=5))
    assert decode(node.slurm.node["Extra"]) == NodeSummary(1234.6, 256, node.gpus)


def test_a_drained_gpu_is_a_comment_of_the_node() -> None:
    node = Publishing(GOOD, BAD)
    assert node.publish()["Comment"] == "gpulease: GPU 1: XID 79"
    assert node.slurm.node["State"] == "IDLE"
    assert node.publish(GOOD)["Comment"] == ""


def test_the_comment_of_an_admin_is_not_changed() -> None:
    node = Publishing(GOOD, BAD)
    node.slurm.node["Comment"] = "rack 7"
    assert node.publish()["Comment"] == "rack 7"


def test_a_node_without_gpus_is_drained_and_resumed() -> None:
    node = Publishing(BAD, with_(GOOD, local=True))
    assert node.publish()["State"] == "IDLE+DRAIN"
    assert node.slurm.node["Reason"] == "gpulease: GPU 1: XID 79"
    assert node.publish(GOOD)["State"] == "IDLE"


def test_a_node_that_an_admin_drained_stays_drained() -> None:
    node = Publishing(BAD)
    node.slurm.node |= {"State": "IDLE+DRAIN", "Reason": "new fan"}
    node.publish()
    assert node.publish(GOOD)["State"] == "IDLE+DRAIN"
    assert node.slurm.node["Reason"] == "new fan"


def test_a_failure_to_publish_is_logged_once_and_repaired(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Publishing(BAD)
    node.publish()
    node.slurm.is_away = True
    for _ in range(9):
        node.publish()
    assert [each.levelname for each in caplog.records].count("WARNING") == 1
    assert node.publication.failure
    node.slurm.is_away, node.slurm.node = False, {"State": "IDLE"}
    assert "Extra" in node.publish()
    assert "Comment" in node.slurm.node
    assert node.publication.failure is None


# Enforcement.


def enforcement(slurm: FakeSlurm) -> SlurmEnforcement:
    async def note(*_: object) -> None:
        raise AssertionError("no limit was set")

    return SlurmEnforcement(lambda: ("watch",), lambda: None, note, slurm)


@pytest.mark.parametrize(
    ("config", "has_rules"),
    [
        ("TaskPlugin = task/affinity,task/cgroup\nConstrainDevices        = yes\n", True),
        ("TaskPlugin = task/affinity\nConstrainDevices        = yes\n", False),
        ("TaskPlugin = task/cgroup\nConstrainDevices        = no\n", False),
    ],
)
def test_device_rules_are_claimed_where_slurm_has_them(config: str, has_rules: bool) -> None:
    slurm = FakeSlurm()
    slurm.config = config
    held = enforcement(slurm)
    assert held.levels() == ("watch",)
    run(held.ask())
    assert (EnforcementLevel.DEVICES in held.levels()) is has_rules


class Limiter:
    """Sets every limit."""

    def __init__(self) -> None:
        self.limits: dict[tuple[GpuUuid, Path], int] = {}

    def why_unavailable(self, gpu: GpuUuid, cgroup: Path) -> str | None:
        return None

    def set_limit(self, gpu: GpuUuid, cgroup: Path, memory: int) -> int:
        self.limits[gpu, cgroup] = memory
        return memory

    def current_limit(self, gpu: GpuUuid, cgroup: Path) -> int | None:
        return self.limits.get((gpu, cgroup))

    def remove_limit(self, gpu: GpuUuid, cgroup: Path) -> None:
        self.limits.pop((gpu, cgroup), None)


def test_the_driver_limits_the_cgroup_of_a_job() -> None:
    limiter, noted = Limiter(), list[Mapping[GpuUuid, int | None]]()
    directories: dict[int, Path] = {}

    async def note(job: JobId, limits: Mapping[GpuUuid, int | None], said: str) -> None:
        noted.append(limits)

    gpu = GpuUuid("GPU-a")
    job = replace(leased(), leases=(Lease(gpu, 4096, NOON),))
    held = SlurmEnforcement(
        lambda: (), lambda: limiter, note, FakeSlurm(), directory=directories.get
    )
    run(held.limit(job))
    assert not limiter.limits, "its first step has not started"
    directory = directories[17] = Path("/sys/fs/cgroup/system.slice/n1_slurmstepd.scope/job_17")
    run(held.limit(job))
    assert limiter.limits == {(gpu, directory): 4096}
    assert noted == [{gpu: 4096}]
