"""Jobs of plain Slurm users have leases: nothing but Slurm's own commands is used here."""

import json
from collections.abc import Iterator

import pytest

from daemon_rig import wait_for
from gpulease.slurm.setup.node_files import NAME

from .cluster import Cluster
from .leased_cluster import CONFIG, leases, leasing, where

GIB = 1024**3
_SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
_OLD_SCRIPT = """
#SBATCH --gres=shard:16
#SBATCH --output=old.out
python -c '{show}'
srun python -c '{show}'
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with leasing() as made:
        yield made


def test_srun_has_the_environment_of_a_lease(idle: Cluster) -> None:
    words = ("srun", "--nodelist=n2", "--gres=shard:16", "python", "-c", _SHOW)
    found = json.loads(idle.run(*words, env={"PYTHONPATH": "/mine"}).stdout)
    hooks, *others = found["PYTHONPATH"].split(":")
    assert hooks.endswith("/hooks")
    assert others == ["/mine"]
    assert found["GPULEASE_MEMORY"] == str(4 * GIB)
    uuids = {gpu.uuid for gpu in idle.nodes["n2"].client().status().gpus}
    assert found["CUDA_VISIBLE_DEVICES"] in uuids


def test_an_old_batch_file_has_it_in_each_step(idle: Cluster) -> None:
    job = idle.sbatch(_OLD_SCRIPT.format(show=_SHOW))
    idle.wait_until(job, "COMPLETED")
    batch, step = map(json.loads, (idle.home / "alice/old.out").read_text().splitlines())
    for found in (batch, step):
        assert found["GPULEASE_MEMORY"] == str(4 * GIB)
        assert found["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
        assert found["PYTHONPATH"].endswith("/hooks")


def test_a_whole_gpu_is_exclusive(idle: Cluster) -> None:
    job = idle.sbatch("sleep 300", "--gres=gpu:2", "--nodelist=n1")
    idle.wait_until(job, "RUNNING")
    held = wait_for("it has a lease", lambda: leases(idle.nodes["n1"]).get(job))
    assert held.claim.exclusive
    assert [lease.memory for lease in held.leases] == [24 * GIB, 24 * GIB]


@pytest.mark.parametrize("binding", ["--gpus-per-task=1", "--gpu-bind=map_gpu:0,1"])
def test_each_task_has_the_gpu_to_which_slurm_binds_it(idle: Cluster, binding: str) -> None:
    words = ("srun", "--nodelist=n1", "--gres=gpu:2", "--ntasks=2", binding)
    done = idle.run(*words, "sh", "-c", "echo $SLURM_PROCID $CUDA_VISIBLE_DEVICES")
    gpus = [idle.nodes["n1"].uuid(each) for each in (0, 1)]
    assert sorted(done.stdout.splitlines()) == [f"{at} {gpu}" for at, gpu in enumerate(gpus)]


def test_tasks_that_slurm_binds_to_no_gpu_share_the_lease(idle: Cluster) -> None:
    words = ("srun", "--nodelist=n1", "--gres=gpu:2", "--ntasks=2", "--gpu-bind=none")
    done = idle.run(*words, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    both = ",".join(idle.nodes["n1"].uuid(each) for each in (0, 1))
    assert done.stdout.splitlines() == [both] * 2


def test_a_command_within_a_task_may_use_all_of_its_gpu(idle: Cluster) -> None:
    words = ("srun", "--nodelist=n1", "--gres=gpu:2", "--ntasks=2", "--gpus-per-task=1")
    show = ("sh", "-c", "echo $XLA_PYTHON_CLIENT_MEM_FRACTION")
    done = idle.run(*words, "gpulease", "run", *show)
    assert done.stdout == idle.run(*words, *show).stdout


def test_a_job_without_gpus_is_not_changed(idle: Cluster) -> None:
    found = json.loads(idle.run("srun", "--nodelist=n1", "python", "-c", _SHOW).stdout)
    assert not [name for name in found if name.startswith("GPULEASE") or name == "PYTHONPATH"]
    job = idle.sbatch("sleep 300", "--nodelist=n1")
    idle.wait_until(job, "RUNNING")
    assert not where(idle, job)


def test_the_components_of_a_heterogeneous_job_have_leases(idle: Cluster) -> None:
    show = ("sh", "-c", "echo $SLURM_PROCID $GPULEASE_MEMORY")
    second = (":", "--gres=shard:2", *show)
    done = idle.run("srun", "--gres=shard:4", *show, *second)
    assert sorted(done.stdout.splitlines()) == [f"0 {GIB}", f"1 {GIB // 2}"]


def test_jobs_that_are_submitted_inside_another_have_their_own_environment(idle: Cluster) -> None:
    """They inherit the variables of a step with two tasks, and of `gpulease run --processes`."""
    inner = f"sbatch --wait --nodelist=n2 --output=%s.json %s --wrap='python -c \"{_SHOW}\"'"
    lines = (inner % ("gpu", "--gres=shard:4"), inner % ("cpu", ""))
    script = f"test $SLURM_PROCID = 1 || {{ {lines[0]} && {lines[1]}; }}"
    handed = json.dumps({"argv": ["outer"], "cwd": "/", "options": {"processes": 2}})
    outer = ("srun", "--nodelist=n1", "--gres=shard:8", "--ntasks=2", "sh", "-c", script)
    idle.run(*outer, env={"GPULEASE_SLURM": handed})
    gpu = json.loads((idle.home / "alice/gpu.json").read_text())
    hook = json.loads(gpu["GPULEASE_HOOK"])
    assert gpu["GPULEASE_MEMORY"] == str(GIB)
    assert (hook["options"]["processes"], hook["ranks"]["SLURM_STEP_TASKS_PER_NODE"]) == (
        None,
        None,
    )
    assert not {"GPULEASE_SLURM", "SLURM_STEP_TASKS_PER_NODE"} & gpu.keys()
    assert json.loads((idle.home / "alice/cpu.json").read_text())["SLURM_JOB_ID"]


def test_jobs_avoid_a_drained_gpu(idle: Cluster) -> None:
    idle.run("gpulease", "drain", "0", "--why", "dust", user="root", node="n1")
    jobs = [idle.sbatch("sleep 300", "--gres=shard:96") for _ in range(4)]
    for job in jobs:
        wait_for(f"job {job} has a lease", lambda job=job: where(idle, job))
    gpus = idle.nodes["n1"].client().status().gpus
    assert gpus[0].memory.leased == 0
    idle.run("scancel", "--user=alice", user="root")
    idle.wait_until_idle()
    done = idle.run("srun", "--nodelist=n1", "--gres=gpu:2", "true", check=False)
    assert done.returncode != 0
    assert "dust" in done.stdout + done.stderr
    idle.run("gpulease", "resume", "0", user="root", node="n1")


@pytest.fixture
def without_prologs(idle: Cluster) -> Iterator[Cluster]:
    """Return a cluster whose slurmd skips prologs, as 22.05 may where a job was queued again."""
    hook = idle.directory / "slurm" / NAME
    before = hook.read_text()
    skip = "my $context = $ENV{SLURM_SCRIPT_CONTEXT} // '';\n"
    assert skip in before
    idle.install(NAME, before.replace(skip, f"{skip}exit 0 if $context eq 'prolog_slurmd';\n"))
    yield idle
    idle.install(NAME, before)


def test_the_first_task_gets_the_lease_where_there_was_no_prolog(without_prologs: Cluster) -> None:
    words = ("srun", "--nodelist=n1", "--gres=shard:16", "--ntasks=3")
    done = without_prologs.run(*words, "sh", "-c", "echo $GPULEASE_MEMORY $GPULEASE_JOB")
    assert len(set(done.stdout.splitlines())) == 1
    assert done.stdout.startswith(f"{4 * GIB} ")
    stranger = without_prologs.nodes["n1"].stranger(GIB, 0)
    try:
        job = without_prologs.sbatch("sleep 300", "--gres=shard:96", "--exclude=n2,n3")

        def is_refused() -> bool:
            return '"refused":1' in without_prologs.scontrol("show", "job", str(job))

        wait_for("the same checks hold", is_refused)
    finally:
        stranger.communicate()


def test_a_job_cancelled_in_its_prolog_gets_no_lease(idle: Cluster) -> None:
    node = idle.nodes["n2"]
    node.kill_daemon()
    job = idle.sbatch("sleep 300", "--gres=shard:16", "--nodelist=n2")
    wait_for("it is in its prolog", lambda: idle.job(job)["JobState"] != "PENDING")
    idle.run("scancel", str(job))
    node.start_daemon()
    idle.wait_until_idle()
    assert f"job {job} of Slurm gets no lease" in node.machine.log("gpuleased")
    assert idle.job(job)["JobState"] == "CANCELLED"


def test_a_node_whose_daemon_does_not_know_of_slurm_is_drained(idle: Cluster) -> None:
    node = idle.nodes["n1"]
    node.kill_daemon()
    node.start_daemon(CONFIG.replace('"slurm"', '"none"'))
    job = idle.sbatch("sleep 300", "--gres=shard:16", "--nodelist=n1")
    wait_for("Slurm drains it", lambda: idle.states()["n1"].startswith("drain"))
    assert idle.wait_until(job, "PENDING")["Restarts"] == "1"
    idle.run("scancel", str(job))
    node.kill_daemon()
    node.start_daemon(CONFIG)
    idle.scontrol("update", "nodename=n1", "state=resume")


def test_a_job_that_all_nodes_refuse_waits_and_is_not_held(idle: Cluster) -> None:
    strangers = [
        node.stranger(GIB, gpu) for node in (idle.nodes["n1"], idle.nodes["n2"]) for gpu in (0, 1)
    ]
    job = idle.sbatch("sleep 300", "--gres=shard:96", "--exclude=n3")

    def is_refused() -> bool:
        return '"rounds":1' in idle.scontrol("show", "job", str(job))

    wait_for("all nodes have refused it", is_refused)
    for each in strangers:
        each.communicate()
    wait_for("it waits", lambda: idle.job(job)["Reason"] == "BeginTime")
    wait_for("no other node is excluded", lambda: idle.job(job)["ExcNodeList"] == "n3")
    idle.scontrol("update", f"jobid={job}", "starttime=now")
    idle.wait_until(job, "RUNNING")


def test_a_job_that_lost_its_node_is_queued_again_after_a_refusal() -> None:
    with leasing(["n1", "n2"], slurm_lines="SlurmdTimeout=3") as made:
        node = made.nodes["n1"]
        job = made.sbatch("sleep 300", "--gres=shard:96", "--exclude=n2")
        wait_for("it has a lease", lambda: where(made, job) == ["n1"])
        made.wait_until_saved(job)
        node.crash()
        node.start()
        strangers = [node.stranger(GIB, gpu) for gpu in (0, 1)]
        wait_for("it is queued again", lambda: made.job(job)["Restarts"] == "1")
        wait_for("n1 refuses it", lambda: '"refused":1' in made.scontrol("show", "job", str(job)))
        assert made.wait_until(job, "PENDING", "FAILED")["JobState"] == "PENDING"
        for each in strangers:
            each.communicate()
