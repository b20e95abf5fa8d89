"""What a worker finds: exactly what the caller gave, and nothing of the daemon's."""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from process_rig import finish, output, python, shell, start, wait_until

LOOK = """
import json, os, resource, signal
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(json.dumps({
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "environment": dict(os.environ),
    "umask": os.umask(0),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "nice": os.nice(0),
    "blocked": status["SigBlk"].strip(),
    "ignored": status["SigIgn"].strip(),
    "cwd": os.getcwd(),
    "ids": [os.getsid(0), os.getpgid(0), os.getpid(), os.getppid()],
    "stdin": os.readlink("/proc/self/fd/0"),
    "oom": int(open("/proc/self/oom_score_adj").read()),
}))
"""


def look(directory: Path, **changes: Any) -> dict[str, Any]:
    environment = {"LC_ALL": "C.UTF-8", **changes.pop("environment", {})}
    assert finish(python(directory, LOOK, environment=environment, **changes)).exit_code == 0
    found: dict[str, Any] = json.loads(output(directory))
    return found


def test_its_descriptors_are_its_three_streams(directory: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)  # as careless code in a daemon might
    try:
        found = look(directory)
    finally:
        os.close(reader)
        os.close(writer)

    # The fourth is the listing's own.
    assert found["descriptors"] == ["0", "1", "2", "3"]
    assert found["stdin"] == "/dev/null"


def test_its_environment_is_the_callers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAEMONS_SECRET", "x")

    found = look(directory, environment={"HOME": "/home/alice", "EMPTY": ""})

    assert found["environment"] == {"LC_ALL": "C.UTF-8", "HOME": "/home/alice", "EMPTY": ""}


def test_its_mask_limits_and_place_are_the_callers(directory: Path, tmp_path: Path) -> None:
    found = look(
        directory,
        umask=0o027,
        cwd=str(tmp_path),
        soft_limits={"RLIMIT_NOFILE": 123, "core": 0, "RLIMIT_OF_ANOTHER_SYSTEM": 1},
        nice=3,
    )

    assert found["umask"] == 0o027
    assert found["cwd"] == str(tmp_path)
    assert found["nofile"] == [123, resource.getrlimit(resource.RLIMIT_NOFILE)[1]]
    assert found["core"][0] == 0
    assert found["nice"] == 3


def test_a_soft_limit_goes_as_far_as_the_hard_one(directory: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    assert look(directory, soft_limits={"nofile": -1})["nofile"] == [hard, hard]


# No program may set signals 32 and 33, so as they were when these tests began, so they stay.
_THE_C_LIBRARYS_OWN = 1 << (32 - 1) | 1 << (33 - 1)


def test_its_signals_are_as_new(directory: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        found = look(directory)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    python_ignores = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    assert int(found["blocked"], 16) == 0
    assert int(found["ignored"], 16) & ~python_ignores & ~_THE_C_LIBRARYS_OWN == 0


def test_a_shell_finds_no_signal_ignored(directory: Path) -> None:
    finish(shell(directory, "grep SigIgn /proc/self/status"))

    assert int(output(directory).split()[1], 16) & ~_THE_C_LIBRARYS_OWN == 0


def test_it_leads_a_group_in_the_session_of_its_shim(directory: Path) -> None:
    session, group, pid, shim = look(directory)["ids"]

    assert (session, group) == (shim, pid)
    assert shim != pid


def test_limits_bind_the_worker_and_not_its_shim(directory: Path) -> None:
    ended = finish(
        shell(directory, "echo heard; echo > file; exit 1", soft_limits={"fsize": 0}, cwd="/tmp")
    )

    assert output(directory) == "heard\n"
    assert ended.signal == signal.SIGXFSZ or ended.exit_code not in (0, None)


def test_it_may_open_its_streams_by_name(directory: Path) -> None:
    assert finish(shell(directory, "echo one > /dev/stdout; echo two > /dev/stderr")).exit_code == 0

    assert output(directory) == "one\n"


def test_the_shim_is_known_by_its_name(directory: Path) -> None:
    started = start(shell(directory, "sleep 1000"))

    def command(pid: int) -> str:
        return Path(f"/proc/{pid}/cmdline").read_text()

    assert command(started.shim_pid) == "gpulease-shim: job 17\0"
    assert Path(f"/proc/{started.shim_pid}/comm").read_text() == "gpulease-shim\n"
    wait_until(lambda: "sleep" in command(started.pid), "the command")


def test_the_shim_holds_nothing_of_the_job_but_what_it_needs(directory: Path) -> None:
    started = start(shell(directory, "sleep 1000", environment={"SECRET_OF_THE_JOB": "x"}))

    assert b"SECRET" not in Path(f"/proc/{started.shim_pid}/environ").read_bytes()
    held = {
        link.readlink().name.split(":")[0]
        for link in Path(f"/proc/{started.shim_pid}/fd").iterdir()
    }
    # The record was made under a private name.
    held = {"record" if name.startswith("record.") else name for name in held}
    assert held <= {"null", "record", "stdout", "stderr", "pipe", "socket", "anon_inode"}
