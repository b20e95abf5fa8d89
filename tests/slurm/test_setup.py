"""`gpulease-setup slurm` on nodes of a cluster, and its hook under slurmd."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon_rig import wait_for
from gpulease.config import SYSTEM_SOCKET, Settings
from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.gpu.simulated import parse_simulation
from gpulease.setup.slurm_hook import NAME, hook_text
from gpulease.setup.slurm_node import SlurmNode, node_of

from .cluster import Cluster, running
from .machine import has_cgroups
from .slurm_files import Hooks, NodeSpec
from .slurm_files import Settings as SlurmSettings

_HOOK = f"/etc/slurm/{NAME}"
_SETTINGS = 'cluster = "slurm"\n'
_WAIT_S = 15
"""For the daemon, in the hook."""


def described(gpus: str, name: str) -> SlurmNode:
    """Return a node as gpulease-setup describes it."""
    made = enumerate(parse_simulation(gpus))
    readings = [GpuReading(GpuUuid(str(at)), at, it.model, total=it.size) for at, it in made]
    return node_of(Settings(slurm={"node": name}), readings, simulated=True)


@dataclass(frozen=True)
class DescribedNode(NodeSpec):
    """A node with the Gres= that gpulease-setup prints."""

    @property
    def gres(self) -> str:
        return described(self.gpus, self.name).gres


NODES = (
    DescribedNode("n1", "2x24G", settings=_SETTINGS),
    DescribedNode("n2", "1x24G,1x48G,1x24G", settings=_SETTINGS),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    lines = [line for node in NODES for line in described(node.gpus, node.name).gres_conf()]
    settings = SlurmSettings(
        hooks=Hooks(_HOOK, _HOOK, _HOOK), gres_lines="\n".join(dict.fromkeys(lines)) + "\n",
        cgroup=has_cgroups(), slurm_lines="MessageTimeout=10",
    )  # fmt: skip
    with running(NODES, settings, {NAME: hook_text(SYSTEM_SOCKET)}) as made:
        yield made


@pytest.fixture
def idle(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    for node in cluster.nodes.values():
        if not node.machine.is_running("gpuleased"):
            node.start_daemon()
    cluster.run("scancel", "--user=alice", user="root")
    cluster.wait_until_idle()


def test_a_node_with_the_printed_lines_passes_all_checks(idle: Cluster) -> None:
    for name in idle.nodes:
        done = idle.run("gpulease-setup", "slurm", "--check", user="root", node=name, check=False)
        states = {line.split()[0] for line in done.stdout.splitlines() if line[0] != " "}
        assert "FAILURE" not in states, done.stdout
        assert done.returncode == 0
        if has_cgroups():
            assert states == {"ok"}, done.stdout


def test_the_printed_lines_are_those_of_this_cluster(idle: Cluster) -> None:
    printed = idle.run("gpulease-setup", "slurm", user="root", node="n2").stdout.splitlines()
    gres_conf = (idle.directory / "slurm/gres.conf").read_text().splitlines()
    for_node = [line for line in gres_conf if line.startswith("NodeName=n2 ")]
    assert [line for line in printed if line.startswith("NodeName=n2 Name=")] == for_node
    gres = idle.nodes["n2"].spec.gres
    assert any(line.endswith(f" Gres={gres}") for line in printed)


def test_slurm_counts_the_shards_of_each_size(idle: Cluster) -> None:
    """And a lease is on the GPU that Slurm means."""
    node = idle.nodes["n2"]
    jobs = {
        shards: idle.sbatch("sleep 300", "--nodelist=n2", f"--gres=shard:{shards}")
        for shards in (192, 96, 95)
    }

    def leases() -> dict[int | None, str] | None:
        shown = {it.slurm_job: it.leases[0].gpu for it in node.client().status().jobs}
        return shown if set(jobs.values()) <= set(shown) else None

    held = wait_for("each job has its lease", leases)
    assert held[jobs[192]] == node.uuid(1)
    assert {held[jobs[shards]] for shards in (96, 95)} == {node.uuid(0), node.uuid(2)}


def test_a_job_waits_for_a_daemon_that_restarts(idle: Cluster) -> None:
    node = idle.nodes["n1"]
    node.kill_daemon()
    process = idle.open("srun", "--nodelist=n1", "--gres=shard:16", "printenv", "GPULEASE_MEMORY")
    time.sleep(1)
    node.start_daemon()
    assert process.wait(_WAIT_S) == 0
    assert "drain" not in idle.states()["n1"]


def test_a_daemon_that_hangs_fails_srun_with_a_word_about_the_prolog(idle: Cluster) -> None:
    node = idle.nodes["n1"]
    daemon = node.machine.daemon("gpuleased")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        done = idle.run("srun", "--nodelist=n1", "--gres=shard:16", "true", check=False)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        # nsenter(1) stops with its child.
        daemon.popen.send_signal(signal.SIGCONT)
    assert "prolog failed" in done.stderr
    assert "no answer from gpuleased" in node.machine.log("slurmd")
    wait_for("the job ends", lambda: idle.states()["n1"] == "drained")
    idle.scontrol("update", "nodename=n1", "state=resume")


def test_a_node_without_a_daemon_is_drained_and_its_job_queued_again(idle: Cluster) -> None:
    node = idle.nodes["n1"]
    node.kill_daemon()
    job = idle.sbatch("sleep 300", "--nodelist=n1", "--gres=shard:16")
    wait_for("Slurm drains the node", lambda: idle.states()["n1"].startswith("drain"))
    idle.wait_until(job, "PENDING")
    assert "no answer from gpuleased" in node.machine.log("slurmd")
    node.start_daemon()
    idle.scontrol("update", "nodename=n1", "state=resume")
    idle.scontrol("update", f"jobid={job}", "starttime=now")
    idle.wait_until(job, "RUNNING")


def test_jobs_without_gpus_need_no_daemon(idle: Cluster) -> None:
    node = idle.nodes["n1"]
    node.kill_daemon()
    assert idle.run("srun", "--nodelist=n1", "hostname").stdout == "n1\n"
    node.start_daemon()


def test_the_hook_is_installed_where_the_admin_says(idle: Cluster) -> None:
    folder = Path("/etc/slurm/prolog.d")
    idle.run("mkdir", str(folder), user="root", node="n1")
    done = idle.run("gpulease-setup", "slurm", "--install", str(folder), user="root", node="n1")
    assert done.stdout == f"installed {folder}/{NAME}\n"
    assert idle.nodes["n1"].path(f"{folder}/{NAME}").read_text() == hook_text(SYSTEM_SOCKET)
