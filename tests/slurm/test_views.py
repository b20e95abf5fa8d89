"""The everyday verbs act on the jobs of Slurm, from a machine without a gpuleased."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from daemon_rig import wait_for

from .cluster import Cluster, running
from .slurm_files import NodeSpec

GIB = 1024**3
SLURM = 'cluster = "slurm"\n[slurm]\npublish_every = "1s"\n'
HOSTILE = "a\nJobId=1 JobName=b\n     Nodes=n2 CPU_IDs=0 Mem=0 GRES=shard:1(IDX:7)\r\n\x1b[31m|é"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    nodes = [
        NodeSpec("n1", settings=SLURM),
        NodeSpec("n2", "1x24G", settings=SLURM),
        NodeSpec("n3", "1x8G"),
    ]
    with running(nodes) as made:
        wait_for("nodes publish", lambda: [len(it["gpus"]) for it in nodes_of(made)] == [2, 1, 0])
        yield made


def ask(cluster: Cluster, *words: str, user: str = "alice", status: int = 0) -> str:
    """Return what a command printed, with its messages if it is expected to fail."""
    slurm = {"GPULEASE_CLUSTER": "slurm"}
    done = cluster.run("gpulease", *words, user=user, env=slurm, check=False)
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    return done.stderr if status else done.stdout


def read(cluster: Cluster, *words: str) -> Any:
    return json.loads(ask(cluster, *words, "--json"))


def nodes_of(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(cluster, "status")["nodes"]
    return found


def started(cluster: Cluster, script: str, *options: str, user: str = "alice") -> int:
    job = cluster.sbatch(script, *options, user=user)
    cluster.wait_until(job, "RUNNING")
    return job


def test_status_shows_the_gpus_of_all_nodes_and_the_jobs_on_them(idle: Cluster) -> None:
    job = started(idle, "sleep 300", "--gres=shard:64", "--nodelist=n2", "--job-name=train")
    waits = idle.sbatch("true", "--gres=shard:64", "--nodelist=n2")

    def leased() -> bool:
        return bool(nodes_of(idle)[1]["gpus"][0]["memory"]["leased"] == 16 * GIB)

    wait_for("the lease is published", leased)
    wait_for("it is considered", lambda: idle.job(waits)["Reason"] == "Resources")
    shown = read(idle, "status")
    first, second, third = shown["nodes"]
    assert [gpu["memory"]["total"] for gpu in first["gpus"]] == [24 * GIB, 24 * GIB]
    assert second["gpus"][0]["memory"]["headroom"] == 8 * GIB
    assert (third["at"], third["gpus"]) == (None, [])
    by_id = {job["id"]: job for job in shown["jobs"]}
    assert by_id[job]["state"] == "active"
    assert by_id[job]["leases"] == [{"node": "n2", "gpu": "0", "memory": 16 * GIB}]
    assert (by_id[waits]["state"], by_id[waits]["slurm_reason"]) == ("queued", "Resources")
    assert shown["waiting"] == 1
    text = ask(idle, "status")
    assert "n3: gpulease has published nothing there" in text
    assert re.search(rf"{job}  alice  train +n2 +0 +16G", text)


def test_what_strangers_use_is_shown(idle: Cluster) -> None:
    stranger = idle.nodes["n2"].stranger(GIB)
    try:
        wait_for("it is", lambda: nodes_of(idle)[1]["gpus"][0]["memory"]["unmanaged"] > GIB // 2)
    finally:
        stranger.communicate()


def test_a_node_without_news_is_unknown(idle: Cluster) -> None:
    node = idle.nodes["n2"]
    node.kill_daemon()
    try:
        wait_for("the summary is old", lambda: nodes_of(idle)[1]["is_old"])
        shown = nodes_of(idle)[1]["gpus"][0]
        assert shown["state"] == "unknown"
        assert shown["memory"]["used"] is None
    finally:
        node.start_daemon()


def test_names_that_users_choose_forge_nothing(idle: Cluster) -> None:
    first = started(idle, "sleep 300", "--gres=shard:4", "--nodelist=n1")
    hostile = started(
        idle, "sleep 300", "--gres=shard:8", "--nodelist=n1", f"--job-name={HOSTILE}", user="bob"
    )
    jobs = {job["id"]: job for job in read(idle, "list")["jobs"]}
    assert jobs[hostile]["name"] == HOSTILE
    assert (jobs[hostile]["user"], jobs[hostile]["nodes"]) == ("bob", "n1")
    assert (jobs[first]["user"], jobs[first]["name"]) == ("alice", "sbatch")
    for verb in (["status"], ["list"], ["show", str(hostile)]):
        assert "\x1b" not in ask(idle, *verb)


def test_an_array_is_shown_and_cancelled_by_element_and_as_a_whole(idle: Cluster) -> None:
    array = idle.sbatch("sleep 300", "--gres=shard:8", "--array=0-5%2", "--nodelist=n1")
    wait_for("two run", lambda: len(read(idle, "show", f"{array}")["jobs"]) == 3)
    elements = read(idle, "show", f"{array}")["jobs"]
    assert [job["label"] for job in elements] == [f"{array}_{it}" for it in ("0", "1")] + [
        f"{array}_[2-5%2]"
    ]
    assert read(idle, "show", f"{array}_1")["array_index"] == 1
    assert ask(idle, "cancel", f"{array}_4") == f"job {array}_4 is cancelled\n"
    assert "2 jobs are ending" in ask(idle, "cancel", f"{array}")
    assert {job["state"] for job in read(idle, "show", f"{array}")["jobs"]} <= {
        "ended",
        "releasing",
    }


def test_cancel_ends_only_jobs_that_use_gpus(idle: Cluster) -> None:
    other = started(idle, "sleep 300", "--nodelist=n1")
    waits = idle.sbatch("sleep 300", "--gres=shard:8", "--hold")
    assert ask(idle, "cancel", "--all") == f"job {waits} is cancelled\n"
    assert idle.job(other)["JobState"] == "RUNNING"


def test_an_admin_cancels_many_jobs_of_a_user_in_one_step(idle: Cluster) -> None:
    for _ in range(21):
        idle.sbatch("true", "--gres=shard:8", "--hold", "--job-name=sweep", user="bob")
    kept = idle.sbatch("true", "--gres=shard:8", "--hold", "--job-name=other", user="bob")
    words = ("cancel", "--user", "bob", "--name", "swe*")
    assert ask(idle, *words, user="root") == "21 jobs are cancelled\n"
    assert idle.job(kept)["JobState"] == "PENDING"
    assert "KillWait" in ask(idle, "cancel", "--all", "--grace", "5s", status=2)


def test_both_ways_of_reading_a_line_ask_slurm_and_start_no_daemon(idle: Cluster) -> None:
    job = idle.sbatch("true", "--gres=shard:8", "--hold")
    slurm = {"GPULEASE_CLUSTER": "slurm", "GPULEASE_QUICK_PARSER": "off"}
    for words in (["status"], ["list"], ["show", f"{job}"]):
        shown = idle.run("gpulease", *words, "--json", env=slurm).stdout
        assert f'"id": {job}' in shown
    idle.run("gpulease", "cancel", f"{job}", env=slurm)
    assert idle.job(job)["JobState"] == "CANCELLED"
    assert not list(idle.home.glob("alice/.local/state/gpulease/**/gpulease.db"))


def test_a_machine_without_a_daemon_names_what_slurm_has_instead(idle: Cluster) -> None:
    said = ask(idle, "hold", "--mem", "4G", status=125)
    assert said.startswith("cannot hold a lease: no gpuleased runs on this machine")
    assert "run --shell" in said
    program = "import gpulease; gpulease.lease('4G').__enter__()"
    done = idle.run("python", "-c", program, env={"GPULEASE_CLUSTER": "slurm"}, check=False)
    assert "cannot lease: no gpuleased runs on this machine" in done.stderr
    assert "driver" not in ask(idle, "doctor")
    assert not list(idle.home.glob("alice/.local/state/gpulease/**/gpulease.db"))


@pytest.mark.parametrize("node", [None, "n1"])
def test_verbs_on_the_queue_of_a_machine_name_what_slurm_has(
    idle: Cluster, node: str | None
) -> None:
    job = started(idle, "sleep 300", "--gres=shard:8", "--nodelist=n1")
    instead = {
        "requeue": f"cannot requeue a job of Slurm|scontrol requeue {job}",
        "keep": "cannot keep the lease of a job of Slurm|not released while idle",
        "edit": f"cannot edit a job of Slurm|scontrol update jobid={job}",
        "move": "cannot move a job of Slurm|nice=N",
    }
    options = {"edit": ["--name", "other"], "move": ["--first"]}
    for verb, said in instead.items():
        words = ("gpulease", verb, f"{job}", *options.get(verb, []))
        done = idle.run(*words, node=node, env={"GPULEASE_CLUSTER": "slurm"}, check=False)
        assert done.returncode == 125
        assert all(each.replace(f"{job}", "JOB") in done.stderr for each in said.split("|"))
    assert idle.job(job)["JobState"] == "RUNNING"


def test_a_node_calls_jobs_by_the_numbers_of_slurm(idle: Cluster) -> None:
    held = idle.sbatch("true", "--hold")  # one that the daemon of the node never sees
    job = started(idle, "sleep 300", "--gres=shard:8", "--nodelist=n1", "--job-name=this")
    assert job > held
    local = {"GPULEASE_CLUSTER": "none"}

    def on_node(*words: str) -> Any:
        return json.loads(idle.run("gpulease", *words, "--json", node="n1", env=local).stdout)

    (shown,) = on_node("list")["jobs"]
    assert shown["label"] == f"{job}"
    assert shown["id"] != job
    assert on_node("show", f"{job}")["name"] == "this"
    done = idle.run("gpulease", "show", f"{shown['id']}", node="n1", env=local, check=False)
    assert "this" not in done.stdout
    idle.run("gpulease", "cancel", f"{job}", node="n1", env=local)
    idle.wait_until(job, "CANCELLED")
    past = wait_for("it has ended", lambda: on_node("history")["jobs"])
    assert past[0]["label"] == f"{job}"


def test_a_node_records_how_jobs_ended_that_slurm_stopped(idle: Cluster) -> None:
    local = {"GPULEASE_CLUSTER": "none"}
    words = ("--gres=shard:8", "--nodelist=n1")
    cancelled, requeued = (started(idle, "echo up; sleep 300", *words) for _ in range(2))

    def is_up(job: int) -> bool:
        output = idle.home / "alice" / f"slurm-{job}.out"
        return output.exists() and output.read_text() == "up\n"

    # A job may be RUNNING before its script is.
    wait_for("both run", lambda: is_up(cancelled) and is_up(requeued))
    idle.run("scancel", f"{cancelled}")
    idle.scontrol("requeue", f"{requeued}")

    def both() -> Any:
        history = idle.run("gpulease", "history", "--json", node="n1", env=local)
        jobs = json.loads(history.stdout)["jobs"]
        found = {each["label"]: (each["outcome"], each["exit_status"]) for each in jobs}
        with suppress(KeyError):
            return [found[f"{number}"] for number in (cancelled, requeued)]
        return None

    assert wait_for("both have ended", both) == [("signaled", 143), ("exited", None)]


def test_what_a_job_used_is_known_where_no_daemon_runs(idle: Cluster) -> None:
    program = "import time; held = b'x' * (600 << 20); time.sleep(3)"
    job = idle.sbatch(f'python -c "{program}"', "--gres=shard:4", "--nodelist=n1", "-Jused")
    ask(idle, "wait", f"{job}")

    def used() -> Any:
        return read(idle, "show", f"{job}")["used"]

    assert 600 << 20 <= wait_for("the node publishes it", used) < GIB
    assert re.search(r"used +6\d\d(\.\d)?M at most", ask(idle, "show", f"{job}"))
    assert read(idle, "list", "--all")["jobs"][-1]["used"] == used()
    assert read(idle, "history", "--name", "used")["jobs"][0]["used"] == used()
    assert "USED" in ask(idle, "history")
    assert "gpulease history --csv on a node" in ask(idle, "history", "--csv", status=2)
    before, node = used(), idle.nodes["n1"]
    node.kill_daemon()
    at = nodes_of(idle)[0]["at"]
    node.start_daemon()
    wait_for("the next daemon publishes", lambda: nodes_of(idle)[0]["at"] != at)
    assert used() == before


def test_jobs_of_others_are_refused(idle: Cluster) -> None:
    job = started(idle, "sleep 300", "--gres=shard:8", "--nodelist=n1", "--time=60", user="bob")
    for words in (["cancel", f"{job}"], ["extend", f"{job}", "-30m"]):
        assert "it belongs to bob" in ask(idle, *words, status=125)
    assert idle.job(job)["JobState"] == "RUNNING"


def test_wait_exits_as_the_worst_job_did(idle: Cluster) -> None:
    words = ("--gres=shard:8", "--nodelist=n1")
    failed, good = idle.sbatch("exit 3", *words), idle.sbatch("true", *words)
    ask(idle, "wait", f"{failed}", f"{good}", status=3)
    killed = idle.sbatch("kill -9 $$", *words)
    ask(idle, "wait", f"{killed}", status=137)
    held = idle.sbatch("true", *words, "--hold")
    ask(idle, "wait", f"{held}", "--timeout", "1s", status=75)
    ask(idle, "cancel", f"{held}")
    ask(idle, "wait", f"{held}", status=143)
    array = idle.sbatch("true", *words, "--array=0-9", "--hold")
    ask(idle, "wait", f"{array}_5", f"{array}_6", "--timeout", "1s", status=75)


def test_logs_follow_a_batch_job_to_its_end(idle: Cluster) -> None:
    script = "for i in 1 2 3; do echo line $i; echo error $i >&2; sleep 1; done"
    job = idle.sbatch(script, "--gres=shard:8", "--nodelist=n1", "-Jtalk", "-ee-%j", "-oo-%x")
    slurm = {"GPULEASE_CLUSTER": "slurm"}
    done = idle.run("gpulease", "logs", "-f", f"{job}", env=slurm)
    assert done.stdout == "line 1\nline 2\nline 3\n"
    assert done.stderr.endswith("error 1\nerror 2\nerror 3\n")
    assert ask(idle, "logs", "--stdout", "--tail", "2", f"{job}") == "line 2\nline 3\n"


def test_logs_of_an_element_and_of_a_job_that_waits(idle: Cluster) -> None:
    array = idle.sbatch("echo $SLURM_ARRAY_TASK_ID", "--gres=shard:8", "--array=7,8")
    ask(idle, "wait", f"{array}")
    assert ask(idle, "logs", f"{array}_8") == "8\n"
    assert "name one of its elements" in ask(idle, "logs", f"{array}", status=2)
    held = idle.sbatch("true", "--gres=shard:8", "--hold")
    assert ask(idle, "logs", f"{held}") == ""


def test_logs_say_where_a_file_is_that_is_not_here(idle: Cluster) -> None:
    job = started(idle, "sleep 300", "--gres=shard:8", "--nodelist=n2", "--output=/tmp/there")
    said = ask(idle, "logs", f"{job}", status=125)
    assert "/tmp/there" in said
    assert f"srun --overlap --jobid={job} cat /tmp/there" in said


def test_the_owner_shortens_a_limit_and_admins_raise_it(idle: Cluster) -> None:
    job = started(idle, "sleep 300", "--gres=shard:8", "--nodelist=n1", "--time=120")
    assert f"job {job} now ends at" in ask(idle, "extend", f"{job}", "-1h")
    refused = ask(idle, "extend", f"{job}", "+2h", status=125)
    assert f"scontrol update jobid={job} timelimit=+120" in refused
    assert f"job {job} now ends at" in ask(idle, "extend", f"{job}", "+2h", user="root")
    assert idle.job(job)["TimeLimit"] == "03:00:00"


def test_attach_shows_what_srun_started_and_no_batch_job(idle: Cluster) -> None:
    words = ("srun", "--gres=shard:8", "--job-name=fg", "sh", "-c", "sleep 3; echo said; exit 4")
    process = idle.open(*words)

    def running_job() -> str:
        named = ("squeue", "--noheader", "--name=fg", "--states=R", "--format=%i")
        return idle.run(*named).stdout.strip()

    job = wait_for("it runs", running_job)
    slurm = {"GPULEASE_CLUSTER": "slurm"}
    done = idle.run("gpulease", "attach", "fg", env=slurm, check=False)
    assert (done.stdout, done.returncode) == ("said\n", 4)
    assert process.wait() == 4
    ask(idle, "attach", job, status=4)
    batch = started(idle, "sleep 300", "--gres=shard:8")
    assert f"gpulease logs -f {batch}" in ask(idle, "attach", f"{batch}", status=125)


def test_a_watch_leaves_the_input_of_the_job_open(idle: Cluster) -> None:
    told = "until [ -e attached ]; do echo waits; sleep 0.2; done"
    script = f"cd /home/alice; {told}; timeout 1 cat || echo open"
    process = idle.open("srun", "--gres=shard:8", "sh", "-c", script, stdin=subprocess.PIPE)

    def running_job() -> str:
        return idle.run("squeue", "--noheader", "--states=R", "--format=%i").stdout.strip()

    job = wait_for("it runs", running_job)
    attached = idle.open(
        "gpulease", "attach", "--watch", job, env={"GPULEASE_CLUSTER": "slurm"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert attached.stdout is not None
    assert attached.stdout.readline() == "waits\n"
    (idle.home / "alice/attached").touch()
    assert attached.stdout.read().splitlines()[-1] == "open"
    assert process.wait() == 0


def test_the_last_job_and_names_mean_own_jobs_that_use_gpus(idle: Cluster) -> None:
    job = idle.sbatch("true", "--gres=shard:8", "--hold", "--job-name=sweep-1")
    idle.sbatch("true", "--hold", user="bob")
    assert read(idle, "show", "last")["id"] == job
    assert read(idle, "show", "sweep-1")["id"] == job
    assert read(idle, "show", "--name", "sweep*")["jobs"][0]["id"] == job
    assert "Slurm knows no such job" in ask(idle, "show", "999999", status=125)


def test_a_tab_completes_the_numbers_of_jobs(idle: Cluster) -> None:
    job = idle.sbatch("true", "--gres=shard:8", "--hold", "--job-name=sweep")
    assert f"{job}\tsweep, queued, alice" in ask(idle, "__complete", "cancel", "")


def test_within_a_job_of_slurm_numbers_are_those_of_slurm(idle: Cluster) -> None:
    waits = idle.sbatch("true", "--gres=shard:8", "--hold")
    job = idle.sbatch(f"gpulease cancel {waits}", "--gres=shard:8", "--nodelist=n2")
    ask(idle, "wait", f"{job}")
    assert ask(idle, "logs", f"{job}") == f"job {waits} is cancelled\n"


def test_slurmctld_away_is_an_error_within_ten_seconds(idle: Cluster) -> None:
    # A controller that has not saved the end of a job waits for it again.
    idle.wait_until_saved(idle.sbatch("true", "--gres=shard:8", "--hold"))
    idle.kill_controller()
    try:
        for verb in (["status"], ["list"], ["cancel", "1"]):
            began = time.monotonic()
            said = ask(idle, *verb, status=125)
            assert time.monotonic() - began < 12
            assert said.startswith("cannot ask Slurm: ")
    finally:
        idle.start_controller()
        wait_for("it is back", lambda: set(idle.states().values()) == {"idle"})
