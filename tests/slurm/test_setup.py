"""`gpulease-setup slurm` on nodes of a cluster, and its hook under slurmd."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_rig import wait_for
from gpulease.config import SYSTEM_SOCKET
from gpulease.slurm.allocations import gres_in
from gpulease.slurm.setup.node_files import NAME, hook_text

from .cluster import Cluster, running
from .machine import has_cgroups
from .slurm_files import NodeSpec, Settings

_SETTINGS = 'cluster = "slurm"\n'


NODES = (
    NodeSpec("n1", "2x24G", settings=_SETTINGS),
    NodeSpec("n2", "1x24G,1x48G,1x24G", settings=_SETTINGS),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = Settings(slurm_lines="MessageTimeout=10", cgroup=has_cgroups())
    with running(NODES, settings) as made:
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


def test_a_machine_that_is_no_node_is_not_checked(idle: Cluster) -> None:
    done = idle.run("gpulease-setup", "slurm", "--check", user="root", check=False)
    assert "Slurm knows no node login" in done.stderr
    assert "sinfo -N" in done.stderr
    assert done.returncode != 0


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


def test_settings_that_are_not_in_use_or_wrong_are_found(idle: Cluster) -> None:
    node = idle.nodes["n1"]

    def check() -> str:
        words = ("gpulease-setup", "slurm", "--check")
        done = idle.run(*words, user="root", node="n1", check=False)
        assert done.returncode != 0
        return done.stdout + done.stderr

    refused = idle.run("gpulease-setup", "slurm", "--check", node="n1", check=False)
    assert "sudo gpulease-setup slurm --check" in refused.stderr
    node.kill_daemon()
    node.start_daemon("")
    node.path("/etc/gpulease/config.toml").write_text(_SETTINGS)
    said = check().splitlines()
    reload = next(at for at, line in enumerate(said) if "systemctl reload gpuleased" in line)
    assert said[reload - 1].startswith("FAILURE hook: ")
    node.kill_daemon()
    node.start_daemon(f'{_SETTINGS}[slurm]\nlocal_gpus = "5"\n')
    assert "local_gpus names 5" in check()
    missing = "local_gpus: this machine has no GPU 5"
    wait_for("the daemon says so", lambda: missing in node.machine.log("gpuleased"))
    node.kill_daemon()
    node.start_daemon(_SETTINGS)


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_whole_gpu_is_one_without_shards_in_use(idle: Cluster, node: str) -> None:
    """And while there is none, the job waits in Slurm and is not refused."""
    there = f"--nodelist={node}"
    sizes = sorted(idle.nodes[node].spec.described.shards, reverse=True)
    shared = [idle.sbatch("sleep 300", f"--gres=shard:{size - 1}", there) for size in sizes]
    for job in shared:
        idle.wait_until(job, "RUNNING")
    whole = idle.sbatch("sleep 300", "--gres=gpu:1", there)
    wait_for("Slurm looks at it", lambda: idle.job(whole)["Reason"] == "Resources")
    freed, _ = gres_in(idle.job(shared[-1])["GRES"])
    idle.run("scancel", str(shared[-1]))
    assert gres_in(idle.wait_until(whole, "RUNNING")["GRES"]) == (freed, 0)
    assert "AdminComment" not in idle.job(whole)
    beside = idle.sbatch("sleep 300", f"--gres=shard:{sizes[-1]}", there)
    wait_for("it waits", lambda: idle.job(beside)["Reason"] in ("Resources", "Priority"))


def test_a_task_has_the_gpu_that_its_device_rules_allow(idle: Cluster) -> None:
    """With ConstrainDevices, Slurm numbers the GPUs of each task from 0."""
    show = "echo $SLURM_PROCID $CUDA_VISIBLE_DEVICES"
    words = ("srun", "--nodelist=n1", "--gres=gpu:2", "--ntasks=2", "--gpus-per-task=1")
    done = idle.run(*words, "sh", "-c", show)
    gpus = [idle.nodes["n1"].uuid(each) for each in (0, 1)]
    assert sorted(done.stdout.splitlines()) == [f"{at} {gpu}" for at, gpu in enumerate(gpus)]


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


def test_the_hook_is_installed_where_the_admin_says(idle: Cluster) -> None:
    folder = Path("/etc/slurm/prolog.d")
    idle.run("mkdir", str(folder), user="root", node="n1")
    done = idle.run("gpulease-setup", "slurm", "--install", str(folder), user="root", node="n1")
    assert done.stdout == f"installed {folder}/{NAME}\n"
    assert idle.nodes["n1"].path(f"{folder}/{NAME}").read_text() == hook_text(SYSTEM_SOCKET)
