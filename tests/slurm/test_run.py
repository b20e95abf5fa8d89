"""`gpulease run` on a cluster: as on one machine, from a home that the nodes share."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from daemon_rig import wait_for

from .cluster import Cluster
from .leased_cluster import leases, leasing, where

GIB = 1024**3
MIB = 1024**2
ON_SLURM = {"GPULEASE_CLUSTER": "slurm"}
_SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    lines = "DependencyParameters=kill_invalid_depend"
    with leasing(("n1", "n2"), slurm_lines=lines) as made:
        yield made


def run(cluster: Cluster, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `gpulease run` with these words."""
    given = {"check": False, **options}
    return cluster.run("gpulease", "run", *words, env=ON_SLURM, **given)


def start(cluster: Cluster, *words: str, **options: Any) -> subprocess.Popen[str]:
    """Start `gpulease run` with these words."""
    return cluster.open(
        "gpulease", "run", *words, env=ON_SLURM, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def running(cluster: Cluster, user: str = "alice") -> list[int]:
    """Return the jobs of a user that run."""
    line = ("squeue", "--noheader", "--states=RUNNING", "--format=%A", f"--user={user}")
    return [int(word) for word in cluster.run(*line).stdout.split()]


def the_job(cluster: Cluster) -> int:
    """Return the only running job, once its node has granted its lease."""
    job: int = wait_for("a job runs", lambda: next(iter(running(cluster)), None))
    wait_for("it has a lease", lambda: where(cluster, job))
    return job


def fill(cluster: Cluster) -> None:
    """Let other jobs take all memory."""
    for _ in range(4):
        cluster.sbatch("sleep 300", "--gres=shard:96", "--output=/dev/null", user="bob")
    wait_for("all GPUs are taken", lambda: len(running(cluster, "bob")) == 4)


def test_streams_and_exit_code_are_those_of_the_job(idle: Cluster) -> None:
    done = run(idle, "--mem", "4G", "sh", "-c", "cat; echo error >&2; exit 3", stdin="a\0b")
    assert (done.returncode, done.stdout) == (3, "a\0b")
    lines = done.stderr.splitlines()
    assert "error" in lines
    started = re.compile(r"gpulease: job \d+ started on n\d, GPU \d")
    assert any(map(started.fullmatch, lines)), "srun's own lines may come first"


def test_what_the_job_finds_is_that_of_its_user(idle: Cluster) -> None:
    shown = run(idle, "--mem", "1G", "printenv", "SLURM_EXIT_ERROR", "GPULEASE_SLURM")
    assert shown.stdout == ""
    killed = run(idle, "--mem", "1G", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 128 + signal.SIGKILL
    missing = run(idle, "--mem", "1G", "sh", "-c", "no-such-program")
    assert missing.returncode == 127


def test_the_job_has_a_lease_of_its_size(idle: Cluster) -> None:
    done = run(idle, "--mem", "4G", "--growth", "python", "-c", _SHOW)
    found = json.loads(done.stdout)
    assert found["GPULEASE_MEMORY"] == str(4 * GIB)
    assert found["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert found["CUDA_VISIBLE_DEVICES"].startswith("GPU-")


def test_the_listing_on_the_node_has_the_command(idle: Cluster) -> None:
    process = start(idle, "--mem", "4G", "sleep", "300")
    job = the_job(idle)
    (node,) = where(idle, job)
    wait_for("it is described", lambda: leases(idle.nodes[node])[job].command == "sleep 300")
    idle.run("scancel", str(job))
    _, errors = process.communicate()
    # The message of slurmstepd, which says CANCELLED, may be lost with the step; so may its status
    # in srun 24.11, on a busy machine.
    assert process.returncode in {
        128 + signal.SIGTERM,
        0 if idle.settings.release == "24.11" else None,
    }
    assert re.search("CANCELLED|aborted", errors)


def test_a_terminal_is_that_of_the_job(idle: Cluster) -> None:
    terminal = idle.terminal("env", "GPULEASE_CLUSTER=slurm", "gpulease", "run", "--mem", "4G",
                             "--shell", size=(30, 90))  # fmt: skip
    terminal.read_until("$ ")
    terminal.type(b"stty size; exit 7\n")
    terminal.read_until("30 90")
    assert terminal.finish() == 7


def test_ctrl_c_interrupts_the_job(idle: Cluster) -> None:
    terminal = idle.terminal("env", "GPULEASE_CLUSTER=slurm", "gpulease", "run", "--mem", "4G",
                             "sh", "-c", "echo ready; exec sleep 300")  # fmt: skip
    terminal.read_until("ready")
    terminal.type(b"\x03")
    assert terminal.finish() == 128 + signal.SIGINT


def test_an_interrupt_reaches_the_job_and_sigterm_ends_it(idle: Cluster) -> None:
    script = "trap 'echo interrupted; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    for signum, status, shown in ((signal.SIGINT, 5, "interrupted\n"), (signal.SIGTERM, 137, "")):
        process = start(idle, "--mem", "4G", "sh", "-c", script)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        out, _ = process.communicate()
        assert (process.returncode, out) == (status, shown)


def test_the_output_is_kept_nowhere(idle: Cluster) -> None:
    job = run(idle, "--mem", "4G", "echo", "out").stderr.split()[2]
    logged = idle.run("gpulease", "logs", job, env=ON_SLURM, check=False)
    assert logged.returncode == 125
    assert "it goes to the command that started it, and is not kept" in logged.stderr


def test_a_job_in_the_background_of_a_shell_is_not_stopped(idle: Cluster) -> None:
    shell = ("env", "GPULEASE_CLUSTER=slurm", "bash", "--norc", "-i")
    terminal = idle.terminal(*shell)
    terminal.read_until("$ ")
    terminal.type(b"gpulease run --mem 1G sh -c 'sleep 0.5; echo ra''n' &\n")
    terminal.read_until("ran")
    terminal.type(b"wait; exit\n")
    assert terminal.finish() == 0


def test_a_batch_job_prints_its_id_alone(idle: Cluster) -> None:
    script = 'echo $0 "$1"; pwd; umask; echo error >&2'
    done = run(idle, "-d", "--mem", "4G", "--name", "a b", "bash", "-c", script, "it's", "$HOME")
    assert done.returncode == 0
    job = int(done.stdout)
    idle.wait_until(job, "COMPLETED")
    folder = idle.home / "alice/.local/state/gpulease/slurm"
    assert (folder / f"{job}.out").read_text() == "it's $HOME\n/home/alice\n0022\n"
    assert (folder / f"{job}.err").read_text() == "error\n"


def test_an_array_has_a_file_for_each_element(idle: Cluster) -> None:
    done = run(idle, "--array", "0-1", "--mem", "1G", "sh", "-c", "echo $SLURM_ARRAY_TASK_ID")
    job = int(done.stdout)
    folder = idle.home / "alice/.local/state/gpulease/slurm"
    files = [folder / f"{job}_{index}.out" for index in (0, 1)]
    wait_for("both have run", lambda: all(it.exists() and it.read_text() for it in files))
    assert [it.read_text() for it in files] == ["0\n", "1\n"]


def test_a_job_that_cannot_start_is_given_up(idle: Cluster) -> None:
    fill(idle)
    assert run(idle, "--mem", "4G", "--no-wait", "true").returncode == 75
    assert run(idle, "--mem", "4G", "--wait", "2s", "true").returncode == 75
    assert not idle.run("squeue", "--noheader", "--user=alice").stdout


def test_a_signal_cancels_a_job_that_waits(idle: Cluster) -> None:
    fill(idle)
    process = start(idle, "--mem", "4G", "true")
    line = ("squeue", "--noheader", "--user=alice")
    # srun 24.11 may hang if it is interrupted while it prints that the job is queued.
    wait_for("it waits", lambda: " PD " in idle.run(*line).stdout)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 125
    assert not idle.run("squeue", "--noheader", "--user=alice").stdout


def test_a_node_that_refuses_the_job_says_why(idle: Cluster) -> None:
    strangers = [node.stranger(200 * MIB, gpu) for node in idle.nodes.values() for gpu in (0, 1)]
    try:
        done = run(idle, "--mem", "24G", "echo", "never")
    finally:
        for each in strangers:
            each.communicate()
    assert done.returncode == 1
    first, hint, *rest = done.stdout.splitlines()
    assert re.match(
        r"gpulease: cannot start job \d+ of Slurm on this node: .* is used outside", first
    )
    assert "--exclude=NODE" in hint
    assert not any(rest)


def test_a_job_over_its_lease_is_stopped_with_the_reason(idle: Cluster) -> None:
    done = run(idle, "--mem", "512M", "python", "/etc/slurm/work.py", "900", "300")
    assert done.returncode == 128 + signal.SIGTERM
    assert "is stopped: it held " in done.stderr
    assert "under a lease of 512M" in done.stderr
    words = ("gpulease", "list", "--all", "--state", "over-lease")
    wait_for("it is over", lambda: "work.py" in idle.run(*words, env=ON_SLURM).stdout)


def test_within_a_job_the_command_uses_its_lease(idle: Cluster) -> None:
    inner = ("gpulease", "run", "--mem", "512M", "sh", "-c", "echo $GPULEASE_MEMORY")
    done = run(idle, "--mem", "1G", *inner)
    assert done.stdout == f"{512 * MIB}\n"
    assert "runs within the lease of job" in done.stderr
    idle.sbatch("true", "--hold")  # Slurm's numbers are not those of the daemon
    detached = run(idle, "--mem", "1G", "sh", "-c", 'gpulease run -d true; echo "$SLURM_JOB_ID"')
    number = detached.stdout.strip()
    assert f"cannot use -d within the lease of job {number}:" in detached.stderr


def test_a_directory_that_the_node_lacks_is_an_error(idle: Cluster) -> None:
    idle.login.path("/tmp/only-here").mkdir(exist_ok=True)
    idle.login.path("/tmp/only-here").chmod(0o777)
    for words in ((), ("-d",)):
        done = run(idle, *words, "--mem", "1G", "true", cwd="/tmp/only-here")
        if not words:
            assert done.returncode == 125
        else:
            idle.wait_until(int(done.stdout), "FAILED")


def test_options_of_slurm_are_passed_on(idle: Cluster) -> None:
    options = "-p main --nodelist=n2"
    done = run(idle, "--mem", "1G", "--slurm", options, "--slurm=--comment=a", "uname", "-n")
    assert (done.returncode, done.stdout) == (0, "n2\n"), done.stderr


@pytest.mark.parametrize("option", ["--nonsense", "--mem=x"])
def test_what_srun_says_of_its_options_is_shown(idle: Cluster, option: str) -> None:
    done = run(idle, "--mem", "1G", f"--slurm={option}", "true")
    assert done.returncode in (125, 255)
    assert option.partition("=")[0].lstrip("-") in done.stderr


def test_a_job_may_start_without_the_environment_of_its_user(idle: Cluster) -> None:
    done = run(idle, "--mem", "1G", "--slurm=--export=NONE", "pwd")
    assert (done.returncode, done.stdout) == (0, "/home/alice\n"), done.stderr


def test_without_slurmctld_the_error_says_so(idle: Cluster) -> None:
    idle.kill_controller()
    try:
        done = run(idle, "--mem", "1G", "true", within_s=60)
    finally:
        idle.start_controller()
    assert done.returncode == 125
    assert "Traceback" not in done.stderr
    assert "hint: " in done.stderr


def test_a_dependency_can_name_a_job(idle: Cluster) -> None:
    first = run(idle, "-d", "--mem", "1G", "--name", "first", "sh", "-c", "sleep 1; exit 1").stdout
    done = run(idle, "--mem", "1G", "--after", "first:fail", "echo", "after")
    assert done.stdout == "after\n"
    assert idle.job(int(first))["JobState"] == "FAILED"


def test_a_batch_job_whose_dependency_can_never_be_met_is_cancelled(idle: Cluster) -> None:
    first = run(idle, "-d", "--mem", "1G", "false").stdout.strip()
    idle.wait_until(int(first), "FAILED")
    job = int(run(idle, "-d", "--mem", "1G", "--after", first, "true").stdout)
    idle.wait_until(job, "CANCELLED")


def test_a_dependency_that_can_never_be_met_is_an_error(idle: Cluster) -> None:
    run(idle, "-d", "--mem", "1G", "--name", "fails", "sh", "-c", "sleep 2; exit 1")
    done = run(idle, "--mem", "1G", "--after", "fails", "echo", "after")
    assert (done.returncode, done.stdout) == (125, "")
    assert "cancel" in done.stderr


def test_without_a_size_a_job_gets_what_its_command_needed_before(idle: Cluster) -> None:
    (idle.home / "alice/train.py").write_text((idle.directory / "slurm/work.py").read_text())
    first = run(idle, "train.py", "600", "1.5")
    assert "the job leases 4G, the default" in first.stderr
    assert first.returncode == 0

    def sized() -> dict[str, str]:
        view: dict[str, str] = json.loads(
            run(idle, "--dry-run", "--json", "train.py", "700").stdout
        )
        return view if view["sized"] != "the default" else {}

    found = wait_for("the node publishes it", sized)
    assert found["sized"] == "since train.py needed that before"
    assert found["size"] in ("768M", "1G")
