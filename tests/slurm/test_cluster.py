"""The cluster that the other tests use is one: Slurm places jobs, and nodes are apart."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_rig import wait_for
from gpulease.slurm.allocations import gres_in

from .cluster import Cluster, running
from .machine import has_cgroups
from .node import Node
from .slurm_files import Hooks, NodeSpec, Settings

GIB = 1024**3

_PROLOG = """#!/bin/sh
{ id -un; hostname; echo "$SLURM_JOB_ID $SLURM_JOB_UID"; } >/run/prolog.$SLURM_JOB_ID
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = Settings(hooks=Hooks(prolog="/etc/slurm/prolog", epilog="/etc/slurm/epilog"))
    with running(settings=settings, files={"prolog": _PROLOG, "epilog": "#!/bin/sh\n"}) as made:
        yield made


@pytest.fixture
def idle(cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster, and leave it without jobs."""
    yield cluster
    cluster.scontrol("update", "partition=main", "state=up")
    cluster.run("scancel", "--user=alice", user="root")
    cluster.wait_until_idle()


def place(cluster: Cluster, job: int) -> tuple[str, str]:
    """Return the node and the GRES of a running job."""
    shown = cluster.wait_until(job, "RUNNING")
    return shown["NodeList"], shown["GRES"]


def unmanaged(node: Node, gpu: int) -> int:
    """Return the bytes of a GPU that processes outside any lease use."""
    return node.client().status().gpus[gpu].memory.unmanaged or 0


def test_shards_of_a_job_are_on_one_gpu(idle: Cluster) -> None:
    jobs = [idle.sbatch("sleep 300", "--gres=shard:80") for _ in range(6)]
    places = {place(idle, job) for job in jobs}
    assert len(places) == 6
    assert {node for node, _ in places} == {"n1", "n2", "n3"}


def test_the_prolog_runs_on_the_node_as_root(idle: Cluster) -> None:
    job = idle.sbatch("sleep 300", "--gres=shard:16", "--nodelist=n2")
    idle.wait_until(job, "RUNNING")
    written = idle.nodes["n2"].path(f"/run/prolog.{job}")
    # Slurm shows a job as running while its prolog runs.
    wait_for("the prolog has ended", lambda: len(written.read_text().splitlines()) == 3)
    user, host, about = written.read_text().splitlines()
    assert (user, host) == ("root", "n2")
    assert about == f"{job} 47201"


def test_commands_run_as_users_with_a_shared_home(idle: Cluster) -> None:
    idle.run("srun", "--nodelist=n3", "sh", "-c", "hostname >where; id -un >>where")
    assert (idle.home / "alice/where").read_text() == "n3\nalice\n"
    assert idle.run("cat", "where", node="n1").stdout == "n3\nalice\n"


def test_each_node_has_a_daemon_at_the_normal_place(idle: Cluster) -> None:
    for name, node in idle.nodes.items():
        assert node.client().status().host == name
        asked = idle.run("gpulease", "run", "--mem", "1G", "hostname", node=name)
        assert asked.stdout == f"{name}\n"


def test_strangers_use_the_memory_of_one_node(idle: Cluster) -> None:
    first, second = idle.nodes["n1"], idle.nodes["n2"]
    stranger = first.stranger(GIB // 2, gpu=1)
    try:
        wait_for("it counts", lambda: unmanaged(first, 1) > GIB // 2)
        assert unmanaged(second, 1) == 0
    finally:
        stranger.communicate()


def test_a_crashed_node_returns() -> None:
    with running([NodeSpec("n1")], Settings(slurm_lines="SlurmdTimeout=3")) as made:
        node = made.nodes["n1"]
        boot = node.path("/proc/sys/kernel/random/boot_id").read_text()
        node.crash()
        wait_for("Slurm notices", lambda: made.states()["n1"].startswith("down"))
        node.start()
        assert node.path("/proc/sys/kernel/random/boot_id").read_text() != boot
        made.wait_until_idle()
        assert made.run("srun", "--nodelist=n1", "hostname").stdout == "n1\n"


def test_killed_daemons_return(idle: Cluster) -> None:
    job = idle.sbatch("sleep 300", "--gres=shard:16", "--nodelist=n1")
    idle.wait_until(job, "RUNNING")
    idle.wait_until_saved(job)
    node = idle.nodes["n1"]
    node.kill_daemon()
    node.kill_slurmd()
    idle.kill_controller()
    idle.start_controller()
    node.start_slurmd()
    node.start_daemon()
    wait_for("the node is back", lambda: idle.states()["n1"] == "mixed")
    assert idle.job(job)["JobState"] == "RUNNING"


def test_signals_reach_a_command_on_the_login_machine(idle: Cluster) -> None:
    process = idle.open("sh", "-c", "echo up; exec sleep 300", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == -signal.SIGINT


def test_a_terminal_passes_through_srun(idle: Cluster) -> None:
    terminal = idle.terminal("srun", "--nodelist=n2", "--pty", "sh")
    terminal.read_until("$ ")
    terminal.type(b"hostname; tty; exit 7\r")
    assert terminal.finish() == 7
    assert "n2" in terminal.shown
    assert "/dev/pts/" in terminal.shown


def test_nodes_may_have_gpus_of_their_own_sizes() -> None:
    with running([NodeSpec("n1", "1x8G"), NodeSpec("n2", "4x24G")]) as made:
        assert made.run("srun", "--gres=shard:33", "hostname").stdout == "n2\n"
        assert len(made.nodes["n2"].client().status().gpus) == 4


def test_gpus_of_a_node_may_have_different_sizes() -> None:
    with running([NodeSpec("n1", "1x8G,2x24G")]) as made:
        jobs = [made.sbatch("sleep 300", f"--gres=shard:{shards}") for shards in (96, 33, 32)]
        found = [gres_in(place(made, job)[1]) for job in jobs]
        assert found == [((1,), 96), ((2,), 33), ((0,), 32)]
        waits = made.sbatch("true", "--gres=shard:64")
        assert made.job(waits)["JobState"] == "PENDING"


@pytest.mark.skipif(not has_cgroups(), reason="this machine has no cgroups of version 1")
def test_jobs_may_be_in_cgroups_of_their_node() -> None:
    settings = Settings(cgroup=True)
    with running([NodeSpec("n1"), NodeSpec("n2")], settings) as made:
        words = ("sh", "-c", "cat /proc/self/cgroup; true >/dev/nvidia1")
        said = made.run("srun", "--nodelist=n2", "--gres=shard:16", *words, check=False)
        assert "freezer:/slurm_n2/uid_47201/job_1/step_0\n" in said.stdout
        assert "Operation not permitted" in said.stderr or "Permission denied" in said.stderr
        job = made.sbatch("sleep 300 & sleep 300", "--nodelist=n1")
        made.wait_until(job, "RUNNING")
        group = made.nodes["n1"].path(f"/sys/fs/cgroup/freezer/slurm_n1/uid_47201/job_{job}")
        wait_for("it is there", group.exists)
        assert not made.nodes["n2"].path("/sys/fs/cgroup/freezer/slurm_n1").exists()


_KILLED = """
import os, signal
from slurm.cluster import running
from slurm.slurm_files import NodeSpec
with running([NodeSpec("n1")]) as made:
    print(made.directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_cluster_ends_with_a_killed_test() -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED], cwd="/", env={**os.environ, "PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    wait_for("the directory is gone", lambda: not Path(done.stdout.strip()).exists())
