"""The routes for Slurm's prolog, epilog and task prolog, on a real daemon.

A stand-in for scontrol says what jobs have. tests/slurm has the real one.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from fuzz.unix import connected

from daemon_rig import Daemon, daemons, open_folder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of a node runs as root")

G = 1024**3
OTHER = 47_111
_SCONTROL = """#!/bin/sh
case "$1 $2" in
"show job") cat "$(dirname "$0")/job-$4" ;;
*) echo "$@" >> "$(dirname "$0")/asked" ;;
esac
"""
_JOB = """JobId={id} JobName=train.py
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
     Nodes=n1 CPU_IDs=0 Mem=0 GRES={gres}
"""
_CALL = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[2])
link.sendall(sys.stdin.buffer.read())
while piece := link.recv(65536): sys.stdout.buffer.write(piece)
"""


class Node:
    """A daemon under Slurm, and what its prologs ask."""

    def __init__(self, daemon: Daemon, bin: Path) -> None:
        self.daemon = daemon
        self.bin = bin

    def give(self, job: int, gres: str, state: str = "RUNNING") -> None:
        (self.bin / f"job-{job}").write_text(_JOB.format(id=job, gres=gres, state=state))

    def post(self, path: str, body: object = None) -> tuple[int, str]:
        link = HTTPConnection("node", timeout=120)
        with closing(link), connected(self.daemon.socket) as link.sock:
            link.request("POST", f"/v1/slurm/{path}", None if body is None else json.dumps(body))
            answer = link.getresponse()
            return answer.status, answer.read().decode("latin-1")

    def prolog(
        self, job: int, gres: str = "shard:16(IDX:0)", uid: int = 0, state: str = "RUNNING"
    ) -> tuple[int, str]:
        self.give(job, gres, state)
        asked = {"job_id": job, "job_uid": uid, "job_gid": uid, "node": "n1"}
        return self.post("leases", asked)

    def task_prolog(self, job: int, **environment: str) -> tuple[int, str]:
        return self.post(f"leases/{job}/environment", {"environment": environment})

    def task_of(self, job: int, **environment: str) -> dict[str, str]:
        """Return the environment of a task as Slurm makes it."""
        status, lines = self.task_prolog(job, **environment)
        assert status == 200, lines
        for line in lines.splitlines():
            verb, _, rest = line.partition(" ")
            name, _, value = rest.partition("=")
            if verb == "export":
                environment[name] = value
            else:
                environment.pop(name)
        return environment

    def as_user(self, uid: int, path: str, body: object) -> str:
        """Return the whole answer to a request of another user."""
        content = json.dumps(body)
        request = f"POST /v1/slurm/{path} HTTP/1.0\r\nContent-Length: {len(content)}\r\n\r\n"
        done = subprocess.run(
            [sys.executable, "-c", _CALL, str(uid), str(self.daemon.socket)],
            input=request + content, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    with open_folder() as folder, daemons(folder) as make:

        def node(tables: str = "", **fields: Any) -> Node:
            daemon = make(
                settings={"cluster": "slurm", "margin": "0", "grace": "2s"}, tables=tables,
                simulate="2x8G", **fields,
            )  # fmt: skip
            bin = daemon.folder / "bin"
            bin.mkdir()
            for name, text in (("scontrol", _SCONTROL), ("squeue", "#!/bin/sh\nexit 1\n")):
                (bin / name).write_text(text)
                (bin / name).chmod(0o755)
            daemon.environment["PATH"] = f"{bin}:{os.environ['PATH']}"
            return Node(daemon.start(), bin)

        yield node


@pytest.fixture(scope="module")
def node(made: Any) -> Node:
    found: Node = made()
    return found


@pytest.fixture(autouse=True)
def ended(node: Node) -> Iterator[None]:
    yield
    for job in node.daemon.client.status().jobs:
        assert job.slurm_job is not None
        assert node.post(f"leases/{job.slurm_job}/end")[0] == 204


def test_the_prolog_leases_and_the_epilog_releases(node: Node) -> None:
    status, content = node.prolog(17, "shard:12(IDX:1)")
    assert status == 201
    job = json.loads(content)
    assert (job["kind"], job["slurm_job"], job["name"]) == ("slurm", 17, "train.py")
    assert [lease["memory"] for lease in job["leases"]] == [3 * G]
    assert json.loads(node.prolog(17)[1])["id"] == job["id"]
    shown = node.daemon.wait_until(job["id"], "active")
    assert shown["directory"] is None
    assert node.post("leases/17/end", {"job_exit_code": 768}) == (204, "")
    ended = node.daemon.job(job["id"])
    assert (ended["outcome"], ended["exit_status"]) == ("exited", 3)
    assert node.post("leases/17/end")[0] == 204


def test_a_job_that_does_not_fit_is_refused_and_its_tasks_say_why(node: Node) -> None:
    assert node.prolog(18, "gpu:1(IDX:0)")[0] == 201
    # The prolog asks again, since Slurm does not take the job back.
    status, why = node.prolog(19, "shard:1(IDX:0)")
    assert status == 503
    assert why.startswith("Slurm refused `squeue")
    status, why = node.task_prolog(19)
    assert status == 409
    assert "256M does not fit on GPU 0: job" in why
    assert node.prolog(20, "shard:1(IDX:1)")[0] == 201


def test_a_job_cancelled_in_its_prolog_is_left_to_its_epilog(node: Node) -> None:
    status, why = node.prolog(31_415, "", state="COMPLETING")
    assert (status, node.daemon.client.status().jobs) == (409, [])
    assert "job 31415 does not run any more" in why
    asked = node.bin / "asked"
    assert not asked.exists() or "31415" not in asked.read_text()


def test_a_task_gets_the_environment_of_the_lease(node: Node) -> None:
    assert node.prolog(21)[0] == 201
    task = node.task_of(21, PATH="/usr/bin:/bin", CUDA_VISIBLE_DEVICES="0")
    gpu = node.daemon.client.status().gpus[0].uuid
    assert (task["CUDA_VISIBLE_DEVICES"], task["GPULEASE_MEMORY"]) == (gpu, str(4 * G))
    assert task["PATH"] == "/usr/bin:/bin"
    options = json.loads(task["GPULEASE_HOOK"])["options"]
    assert options["processes"] is None
    again = node.task_of(21, PATH="/usr/bin", SLURM_STEP_TASKS_PER_NODE="1,4(x2)", SLURM_NODEID="2")
    assert json.loads(again["GPULEASE_HOOK"])["options"]["processes"] == 4
    assert again["GPULEASE_JOB"] == task["GPULEASE_JOB"]


def test_the_options_and_the_command_come_with_the_task(node: Node) -> None:
    assert node.prolog(22)[0] == 201
    command = {"argv": ["python", "tr\xe4in.py"], "cwd": "/", "options": {"growth": True}}
    task = node.task_of(22, GPULEASE_SLURM=json.dumps(command), PYTHONPATH="a\nb")
    assert json.loads(task["GPULEASE_HOOK"])["options"]["growth"]
    assert task["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert task["PYTHONPATH"] == "a\nb"
    [job] = node.daemon.client.status().jobs
    assert job.command.startswith("python ")
    status, why = node.task_prolog(22, GPULEASE_SLURM="{")
    assert status == 400
    assert why.startswith("cannot read the variable GPULEASE_SLURM: ")


def processes_in(task: dict[str, str]) -> object:
    return json.loads(task["GPULEASE_HOOK"])["options"]["processes"]


@pytest.mark.parametrize(
    ("step_gpus", "devices", "given", "processes"),
    [
        ("0", [0, 1], [0], 1),
        ("1", [0, 1], [1], 1),
        ("0,1", [0, 1], [0, 1], 2),
        # Device rules: Slurm numbers the GPUs of each task from 0.
        ("0", [1], [1], 1),
        ("0", [0], [0], 1),
        # Nothing is known, as from a hook of an older version.
        ("0", [], [0, 1], 2),
    ],
)
def test_a_task_has_the_gpus_of_the_lease_to_which_slurm_binds_it(
    node: Node, step_gpus: str, devices: list[int], given: list[int], processes: int
) -> None:
    assert node.prolog(33, "gpu:2(IDX:0-1)")[0] == 201
    variables = {"SLURM_STEP_GPUS": step_gpus, "SLURM_STEP_TASKS_PER_NODE": "2"}
    body = {"environment": variables, "devices": devices}
    status, lines = node.post("leases/33/environment", body)
    assert status == 200
    task = dict(line.partition(" ")[2].split("=", 1) for line in lines.splitlines())
    gpus = [gpu.uuid for gpu in node.daemon.client.status().gpus]
    assert task["CUDA_VISIBLE_DEVICES"].split(",") == [gpus[each] for each in given]
    assert (processes_in(task) or 1) == processes


def test_a_task_of_a_job_without_a_lease_is_refused(node: Node) -> None:
    status, why = node.task_prolog(99, PATH="/bin")
    assert status == 409
    assert why.startswith("cannot start job 99 of Slurm on this node: it has no lease\n")


def test_only_the_owner_of_a_job_reads_its_environment_and_only_root_leases(node: Node) -> None:
    node.prolog(23, uid=OTHER)
    assert " 200 " in node.as_user(OTHER, "leases/23/environment", {"environment": {}})
    assert " 403 " in node.as_user(OTHER + 1, "leases/23/environment", {"environment": {}})
    for path in ("leases/23/end", "leases"):
        answer = node.as_user(OTHER, path, {})
        assert " 403 " in answer.splitlines()[0]
        assert "only root may" in answer


def test_gpulease_run_inside_runs_within_the_lease(node: Node) -> None:
    assert node.prolog(24)[0] == 201
    socket = {"GPULEASE_SOCKET": str(node.daemon.socket)}
    base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | socket
    task = node.task_of(24, **base, GPULEASE_SLURM='{"options": {"growth": true}}')
    inner = "echo $GPULEASE_JOB $GPULEASE_MEMORY $TF_FORCE_GPU_ALLOW_GROWTH"
    line = [sys.executable, "-m", "gpulease.cli", "run", "--mem", "1G", "--", "sh", "-c", inner]
    ran = subprocess.run(
        ["sh", "-c", shlex.join(line)], env=task, capture_output=True, text=True, timeout=120,
        check=False, cwd="/",
    )  # fmt: skip
    assert ran.stdout.split() == [task["GPULEASE_JOB"], str(G), "true"], ran.stderr


def test_a_restarted_daemon_still_has_the_lease(made: Any) -> None:
    node = made()
    job = json.loads(node.prolog(25)[1])["id"]
    node.daemon.wait_until(job, "active")
    node.daemon.kill()
    node.daemon.start()
    assert json.loads(node.prolog(25)[1])["id"] == job
    assert node.post("leases/25/end")[0] == 204
    assert node.daemon.job(job)["state"] == "ended"
