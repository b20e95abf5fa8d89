"""The hook for Slurm, run as slurmd runs it, against a daemon that answers as a test says."""

import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpulease.slurm.setup.node_files import hook_text

ODD = b'\xff\xc3\xa9 "quoted" \\ \x01\n\tlast'


@dataclass
class StandIn:
    """A daemon on a socket; `answers` are given in turn, the last one again."""

    path: Path
    hook: Path
    answers: list[bytes] = field(default_factory=list)
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    _listener: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX))

    def listen(self) -> None:
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.requests.append(_request(connection))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                connection.sendall(answer)

    def run(
        self, context: str, parent: str = "sh", **variables: str | bytes
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the hook below a process with the name of `parent`."""
        environment: dict[str, str | bytes] = {
            "SLURM_SCRIPT_CONTEXT": context, "SLURM_JOB_ID": "17", "SLURM_JOB_GPUS": "0",
            **variables,
        }  # fmt: skip
        return subprocess.run(
            [parent, "-c", f"{self.hook}; exit $?"], executable="/bin/sh", env=environment,
            capture_output=True, check=False,
        )  # fmt: skip


def _request(connection: socket.socket) -> tuple[str, bytes]:
    read = connection.makefile("rb")
    line = read.readline().decode().strip()
    length = 0
    while (header := read.readline().strip()) != b"":
        if found := re.match(rb"Content-Length: (\d+)", header):
            length = int(found[1])
    return line, read.read(length)


def reply(status: int, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StandIn]:
    hook = tmp_path / "hook"
    text = re.sub(r"(WAIT_S) = \d+;", r"\1 = 1;", hook_text(tmp_path / "s"))
    hook.write_text(text)
    hook.chmod(0o755)
    made = StandIn(tmp_path / "s", hook, [reply(204)])
    yield made
    made.close()


def test_the_prolog_asks_for_a_lease(daemon: StandIn) -> None:
    daemon.listen()
    for status, code in ((201, 0), (409, 0), (400, 1), (404, 1), (422, 1), (500, 1)):
        daemon.answers = [reply(status, b"cannot lease: no memory")]
        done = daemon.run(
            "prolog_slurmd", SLURM_JOB_GPUS="0,1", SLURM_JOB_UID="7", SLURM_JOB_GID="8",
            SLURMD_NODENAME="n1", SLURM_JOB_RESTART_COUNT="2",
        )  # fmt: skip
        assert done.returncode == code, status
        assert (b"job 17 has no lease: cannot lease: no memory" in done.stderr) == bool(code)
    line, body = daemon.requests[0]
    assert line == "POST /v1/slurm/leases HTTP/1.0"
    assert json.loads(body) == {
        "job_id": 17, "job_uid": 7, "job_gid": 8, "node": "n1",
        "job_restart_count": 2,
    }  # fmt: skip


def test_the_epilog_never_fails(daemon: StandIn) -> None:
    assert daemon.run("epilog_slurmd").returncode == 0
    daemon.listen()
    for status in (204, 404, 500):
        daemon.answers = [reply(status)]
        assert daemon.run("epilog_slurmd", SLURM_JOB_EXIT_CODE="256").returncode == 0
    assert {body for _, body in daemon.requests} == {b'{"job_exit_code":256}'}
    assert {line for line, _ in daemon.requests} == {"POST /v1/slurm/leases/17/end HTTP/1.0"}


def test_the_task_prolog_passes_environments_byte_by_byte(daemon: StandIn) -> None:
    daemon.listen()
    daemon.answers = [reply(200, b"export A=\xff\nunset C\n")]
    done = daemon.run("prolog_task", ODD=ODD, EMPTY="", PERL5OPT="-Mmissing", PERL5LIB="/nowhere")
    assert (done.returncode, done.stdout) == (0, b"export A=\xff\nunset C\n")
    line, body = daemon.requests[0]
    assert line == "POST /v1/slurm/leases/17/environment HTTP/1.0"
    sent = json.loads(body)["environment"]
    assert sent["ODD"].encode("latin-1") == ODD
    assert sent["EMPTY"] == ""
    assert sent["SLURM_JOB_ID"] == "17"


@pytest.mark.parametrize(
    ("parent", "variables", "asks_for"),
    [
        ("slurmstepd: [18.0]", {"SLURM_STEP_GPUS": "0"}, "18"),  # a component of a larger job
        ("slurmstepd: [17.0]", {}, None),  # a step without GPUs
        ("slurmstepd: [17.batch]", {"SLURM_STEP_ID": "0"}, "17"),
        ("slurmstepd: [17.batch]", {"SLURM_STEP_GPUS": "0", "SLURM_JOB_GPUS": ""}, None),
        ("sh", {"SLURM_STEP_ID": "0"}, None),
    ],
)
def test_the_task_prolog_asks_for_the_job_of_its_slurmstepd(
    daemon: StandIn, parent: str, variables: dict[str, str], asks_for: str | None
) -> None:
    daemon.listen()
    daemon.answers = [reply(200, b"export A=1\n")]
    inherited = {"SLURM_STEP_TASKS_PER_NODE": "3"}
    done = daemon.run("prolog_task", parent, **inherited, **variables)
    assert done.returncode == 0
    assert [line.split("/")[4] for line, _ in daemon.requests] == ([asks_for] if asks_for else [])
    if parent.endswith("batch]") and asks_for:
        assert done.stdout == b"unset SLURM_STEP_TASKS_PER_NODE\nexport A=1\n"
        assert "SLURM_STEP_TASKS_PER_NODE" not in json.loads(daemon.requests[0][1])["environment"]


def test_a_large_environment_passes_in_both_directions(daemon: StandIn) -> None:
    daemon.listen()
    daemon.answers = [reply(200, b"export A=" + b"a" * 3_000_000 + b"\n")]
    large = {f"LARGE_{number}": "\xff" * 60_000 for number in range(10)}
    assert len(daemon.run("prolog_task", **large).stdout) == 3_000_010
    sent = json.loads(daemon.requests[0][1])["environment"]
    assert all(sent[name].encode("latin-1") == text.encode() for name, text in large.items())


def test_a_refused_task_says_why(daemon: StandIn) -> None:
    daemon.listen()
    daemon.answers = [reply(409, b"cannot lease: GPU 1 is used\n\nhint: try later\n")]
    done = daemon.run("prolog_task", SLURM_STEP_ID="0", SLURM_STEP_GPUS="1")
    assert done.returncode == 1
    lines = [b"print gpulease: cannot lease: GPU 1 is used", b"print gpulease: hint: try later"]
    assert done.stdout.splitlines() == lines


def test_jobs_and_steps_without_gpus_are_left_alone(daemon: StandIn) -> None:
    for context in ("prolog_slurmd", "epilog_slurmd", "prolog_task"):
        assert daemon.run(context, SLURM_JOB_GPUS="").returncode == 0
    # A step of a job with GPUs that asks for none.
    assert daemon.run("prolog_task", SLURM_STEP_ID="1").stdout == b""


def test_other_contexts_are_refused(daemon: StandIn) -> None:
    done = daemon.run("prolog_slurmctld")
    assert done.returncode != 0
    assert b"Prolog, Epilog or TaskProlog" in done.stderr


@pytest.mark.parametrize("busy", [reply(503, b"starting"), b"", b"HTTP/1.1 201 X\r\ncontent-len"])
def test_a_daemon_that_restarts_is_asked_again(daemon: StandIn, busy: bytes) -> None:
    daemon.answers = [busy, busy, reply(201)]
    threading.Timer(0.1, daemon.listen).start()
    assert daemon.run("prolog_slurmd").returncode == 0
    assert len(daemon.requests) == 3


def test_a_daemon_that_is_away_fails_the_prolog_in_time(daemon: StandIn) -> None:
    done, took = _timed(lambda: daemon.run("prolog_slurmd"))
    assert done.returncode == 1
    assert b"no answer from gpuleased in 1 s" in done.stderr
    assert 1 <= took < 5


def test_a_daemon_that_hangs_fails_the_task_in_time(daemon: StandIn) -> None:
    """The kernel accepts the connection of a stopped daemon."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(daemon.path))
    listener.listen(8)
    with listener:
        done, took = _timed(lambda: daemon.run("prolog_task"))
    assert done.returncode == 1
    assert done.stdout.startswith(b"print gpulease: no answer from gpuleased in 1 s")
    assert 1 <= took < 5


def test_a_full_queue_of_connections_fails_in_time(daemon: StandIn) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(daemon.path))
    listener.listen(0)
    with listener, socket.socket(socket.AF_UNIX) as first:
        first.connect(str(daemon.path))
        done, took = _timed(lambda: daemon.run("prolog_slurmd"))
    assert done.returncode == 1
    assert 1 <= took < 5


def _timed(
    call: Callable[[], subprocess.CompletedProcess[bytes]],
) -> tuple[subprocess.CompletedProcess[bytes], float]:
    begun = time.monotonic()
    return call(), time.monotonic() - begun
