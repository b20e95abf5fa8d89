"""The daemon of a node and a real Slurm: leases begin and end with jobs, whatever is killed."""

from collections.abc import Iterator

import pytest

from daemon_rig import wait_for
from gpulease.slurm.records import parse_records
from gpulease.units import GIB
from gpulease.wire.jobs import JobView

from .cluster import Cluster
from .leased_cluster import leases, leasing
from .machine import has_cgroups

_HOLD = "h = bytearray({size}); h[::4096] = b'x' * len(h[::4096]); import time; time.sleep(300)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with leasing(("n1", "n2")) as made:
        yield made


def lease_of(cluster: Cluster, job: int, node: str = "n1") -> JobView:
    return wait_for(f"job {job} has a lease", lambda: leases(cluster.nodes[node]).get(job))


def has_ended(cluster: Cluster, job: int) -> bool:
    return job not in leases(cluster.nodes["n1"])


def test_a_job_has_a_lease_while_it_runs(idle: Cluster) -> None:
    job = idle.sbatch("sleep 2; exit 3", "--gres=shard:16", "--nodelist=n1")
    idle.wait_until(job, "RUNNING")
    lease = lease_of(idle, job)
    assert (lease.user, lease.leases[0].memory) == ("alice", 4 * GIB)
    wait_for("its lease ends", lambda: has_ended(idle, job))
    ended = idle.nodes["n1"].client().job(lease.id)
    assert (ended.outcome, ended.exit_status) == ("exited", 3)


def test_memory_of_a_job_counts_as_its_own(idle: Cluster) -> None:
    """Also without the marker in its environment: its slurmstepd says whose it is."""
    size = GIB // 2
    script = f'exec env -u GPULEASE_WORKER python -c "{_HOLD.format(size=size)}"'
    job = idle.sbatch(script, "--gres=shard:16", "--nodelist=n1")
    idle.wait_until(job, "RUNNING")
    number = lease_of(idle, job).id

    def counts() -> bool:
        status = idle.nodes["n1"].client().status()
        mine = [each for gpu in status.gpus for each in gpu.processes if each.job == number]
        return any((each.memory or 0) >= size for each in mine)

    wait_for("it counts", counts)
    assert all(gpu.memory.unmanaged == 0 for gpu in idle.nodes["n1"].client().status().gpus)


def test_processes_that_slurm_leaves_behind_are_killed(idle: Cluster) -> None:
    script = "setsid sh -c 'trap : TERM; while :; do sleep 1; done' >/dev/null 2>&1 & sleep 0.5"
    job = idle.sbatch(script, "--gres=shard:16", "--nodelist=n1")
    idle.wait_until(job, "COMPLETED")
    wait_for("its lease ends", lambda: has_ended(idle, job))
    left = idle.run("pgrep", "-u", "alice", "-f", "trap : TERM", node="n1", check=False)
    assert not left.stdout


def test_a_refused_batch_job_runs_on_another_node(idle: Cluster) -> None:
    strangers = [idle.nodes["n1"].stranger(GIB, gpu) for gpu in (0, 1)]
    try:
        job = idle.sbatch("sleep 300", "--gres=shard:96", "--exclude=n2", "--hold")
        idle.scontrol("update", f"jobid={job}", "excnodelist=")
        idle.scontrol("update", "nodename=n2", "state=drain", "reason=test")
        idle.scontrol("release", str(job))
        wait_for(
            "it is refused",
            lambda: '"refused":1' in idle.scontrol("show", "job", str(job)),
        )
        idle.scontrol("update", "nodename=n2", "state=undrain")
        shown = idle.wait_until(job, "RUNNING")
        assert shown["NodeList"] == "n2"
        lease_of(idle, job, "n2")
    finally:
        for each in strangers:
            each.communicate()


def test_an_element_of_an_array_is_refused_alone(idle: Cluster) -> None:
    stranger = idle.nodes["n1"].stranger(GIB, 0)
    try:
        job = idle.sbatch("sleep 300", "--array=1-2", "--gres=shard:96", "--nodelist=n1")

        def states() -> list[str]:
            listed = idle.run("squeue", "-h", "-r", "-j", str(job), "-o", "%T").stdout
            return sorted(listed.split())

        wait_for("one runs and one waits", lambda: states() == ["PENDING", "RUNNING"])
    finally:
        stranger.communicate()


def test_a_job_outlives_the_daemon_and_gets_its_lease_back(idle: Cluster) -> None:
    node = idle.nodes["n1"]
    job = idle.sbatch("sleep 300", "--gres=shard:16", "--nodelist=n1")
    idle.wait_until(job, "RUNNING")
    before = lease_of(idle, job).id
    node.kill_daemon()
    node.start_daemon()
    assert lease_of(idle, job).id == before
    node.kill_daemon()
    idle.run("scancel", str(job))
    idle.wait_until(job, "CANCELLED")
    node.start_daemon()
    wait_for("its lease ends", lambda: has_ended(idle, job))


def test_a_job_that_began_without_a_daemon_gets_a_lease(idle: Cluster) -> None:
    node = idle.nodes["n1"]
    started = idle.home / "alice/started"
    job = idle.sbatch("touch started; sleep 300", "--gres=shard:16", "--nodelist=n1")
    wait_for("it runs", started.exists)
    node.kill_daemon()
    for each in node.path("/var/lib/gpulease").glob("gpulease.db*"):
        each.unlink()
    node.start_daemon()
    assert lease_of(idle, job).user == "alice"


def test_leases_stay_while_slurmctld_is_away(idle: Cluster) -> None:
    job = idle.sbatch("sleep 300", "--gres=shard:16", "--nodelist=n1")
    idle.wait_until(job, "RUNNING")
    lease_of(idle, job)
    idle.wait_until_saved(job)
    idle.kill_controller()
    try:
        node = idle.nodes["n1"]
        node.kill_daemon()
        node.start_daemon()
        asked = "cannot compare leases with Slurm"
        wait_for("it has asked Slurm", lambda: asked in node.machine.log("gpuleased"))
        lease_of(idle, job)
    finally:
        idle.start_controller()
    idle.wait_until(job, "RUNNING")


def test_drained_gpus_are_reported_and_all_of_them_drain_the_node(idle: Cluster) -> None:
    def shown() -> dict[str, str]:
        return dict(parse_records(idle.scontrol("-o", "show", "node", "n1"))[0])

    def gpulease_(*argv: str) -> None:
        idle.run("gpulease", *argv, user="root", node="n1")

    gpulease_("drain", "1", "--why", "fan broken")
    wait_for(
        "the comment", lambda: "GPU 1: drained by root: fan broken" in shown().get("Comment", "")
    )
    assert "DRAIN" not in shown()["State"]
    gpulease_("drain", "0")
    wait_for("the node is drained", lambda: "DRAIN" in shown()["State"])
    assert shown()["Reason"].startswith("gpulease: GPU 0: drained by root")
    gpulease_("resume", "0")
    wait_for("it is resumed", lambda: "DRAIN" not in shown()["State"])
    gpulease_("resume", "1")
    wait_for("no comment is left", lambda: not shown().get("Comment"))


@pytest.mark.skipif(not has_cgroups(), reason="this machine has no cgroups of version 1")
def test_processes_are_found_by_slurms_cgroup() -> None:
    """Also one whose parents are gone, and that has dropped its marker."""
    with leasing(["n1"], cgroup=True) as made:
        code = _HOLD.format(size=GIB // 2)
        script = f'(env -u GPULEASE_WORKER setsid python -c "{code}" &) ; sleep 300'
        job = made.sbatch(script, "--gres=shard:16")
        number = lease_of(made, job).id

        def counts() -> bool:
            gpus = made.nodes["n1"].client().status().gpus
            mine = [each for gpu in gpus for each in gpu.processes if each.job == number]
            return any((each.memory or 0) >= GIB // 2 for each in mine)

        wait_for("it counts", counts)
        wait_for("device rules are known", lambda: "devices" in _levels(made))


def _levels(cluster: Cluster) -> list[str]:
    job = cluster.sbatch("sleep 300", "--gres=shard:16")
    levels = lease_of(cluster, job).leases[0].enforced_by
    cluster.run("scancel", str(job), user="root")
    return levels
