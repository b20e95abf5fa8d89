"""A job finds what the same command finds when it is run directly: all but a short list."""

import json
import os
import pty
import pwd
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpulease
from daemon_rig import PATIENCE_S, Daemon
from process_rig import PYTHON

from .users import needs_root

PROBE = Path(__file__).with_name("probe.py")
DOCUMENT = Path(__file__).parents[2] / "docs" / "commands" / "job-environment.md"

ADDED = {
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING"),
    *("GPULEASE_JOB", "GPULEASE_WORKER", "GPULEASE_MEMORY", "GPULEASE_MEMORY_FRACTION"),
    "GPULEASE_MEMORY_GUARANTEED",
    *("GPULEASE_HOOK", "PYTHONPATH", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUPY_GPU_MEMORY_LIMIT"),
    "FLAGS_gpu_memory_limit_mb",
}
"""The variables that a lease sets; docs/commands/job-environment.md names them."""

AS_TYPED = "umask 027; ulimit -Sn 700; ulimit -Sc 0; cd {cwd}; exec nice -n 5 {command}"
"""What a careful user may have done before; `nice` is only ever raised."""


def differences(direct: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Return what is not the same, by name; of the environment, what is not as documented."""
    before, after = direct.pop("environment"), job.pop("environment")
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    others = {name: (direct[name], job[name]) for name in direct if direct[name] != job[name]}
    # A shell that runs a command sets `_` to its path: that of gpulease here, of the probe there.
    return {**others, "environment": sorted((changed - {"_"}) ^ ADDED)}


def probe_of(environment: dict[str, str], *command: str, cwd: Path, **options: Any) -> Any:
    """Run the probe by a shell as a user would, with pipes on all three streams."""
    words = shlex.join(command)
    done = subprocess.run(
        ["/bin/sh", "-c", AS_TYPED.format(cwd=cwd, command=words)],
        env=environment, stdin=subprocess.PIPE, capture_output=True, timeout=PATIENCE_S,
        check=False, process_group=0, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture
def environment() -> dict[str, str]:
    odd = os.fsdecode(b"caf\xe9 \xff")
    own = {name: text for name, text in os.environ.items() if not name.startswith("GPULEASE")}
    return {**own, "ODD": odd, "EMPTY": "", "LINES_OF": "a\nb", "SHLVL": "3"}


def test_a_job_on_pipes_finds_what_the_command_itself_finds(
    daemon: Daemon, environment: dict[str, str], tmp_path: Path
) -> None:
    command = (PYTHON, str(PROBE), "--flag", "two words")

    direct = probe_of(environment, *command, cwd=tmp_path)
    job = probe_of(
        environment, *daemon.gpulease("run", "--mem", "1G", "--", *command), cwd=tmp_path
    )

    assert job["nice"] == direct["nice"] == min(19, 5 + os.nice(0))
    assert differences(direct, job) == {"environment": []}


def test_the_list_of_what_is_different_is_in_the_documentation() -> None:
    text = DOCUMENT.read_text()

    assert [name for name in sorted(ADDED) if f"`{name}`" not in text] == []


def on_a_terminal(command: list[str], environment: dict[str, str], cwd: Path) -> Any:
    """Run a command on a terminal with settings of its own, under a shell with job control."""
    pid, master = pty.fork()
    if pid == 0:
        os.closerange(3, 1024)
        os.chdir(cwd)
        script = 'stty rows 33 cols 101 erase ^H -ixon; set -m; "$@"; exit $?'
        os.execve("/bin/bash", ["bash", "-c", script, "bash", *command], environment)
    said = bytearray()
    try:
        while piece := os.read(master, 65536):
            said += piece
    except OSError:
        pass  # the terminal has closed
    finally:
        os.close(master)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, bytes(said)
    line = next(line for line in said.decode().splitlines() if line.startswith("{"))
    return json.loads(line)


def test_a_job_on_a_terminal_finds_a_terminal_like_the_caller_s(
    daemon: Daemon, environment: dict[str, str], tmp_path: Path
) -> None:
    command = [PYTHON, str(PROBE)]

    direct = on_a_terminal(command, environment, tmp_path)
    job = on_a_terminal(
        daemon.gpulease("run", "--mem", "1G", "--", *command), environment, tmp_path
    )

    assert direct["terminal"][-2:] == [101, 33]
    assert direct["session"]["is in the foreground"]
    assert differences(direct, job) == {"environment": []}


PATHS = [str(Path(gpulease.__file__).parents[1]), *(path for path in sys.path if "site-" in path)]
ANYONE_S = f"import sys; sys.path[:0] = {PATHS!r}; from gpulease.cli.app import main; main()"
"""The command for an interpreter that everyone can reach, which that of the tests may not be."""


@pytest.fixture
def reachable(user: pwd.struct_passwd) -> Iterator[Path]:
    """Return a folder that every user can enter, where they can also start this gpulease."""
    tries = subprocess.run(
        [PYTHON, "-c", ANYONE_S, "--version"], user=user.pw_uid, group=user.pw_gid,
        extra_groups=[], cwd="/", capture_output=True, check=False,
    )  # fmt: skip
    if tries.returncode != 0:
        pytest.skip("other users cannot read this checkout and what it needs")
    with tempfile.TemporaryDirectory(prefix="gpulease-e2e-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@needs_root
def test_another_user_s_job_has_the_groups_of_the_caller_and_no_more_rights(
    user: pwd.struct_passwd,
    reachable: Path,
    make_daemon: Callable[..., Daemon],
    environment: dict[str, str],
) -> None:
    daemon = make_daemon(folder=reachable, settings={"grace": "2s"}).start()
    as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [44, user.pw_gid, 4711]}
    probe = reachable / "probe.py"
    probe.write_bytes(PROBE.read_bytes())
    probe.chmod(0o644)
    own = {name: environment[name] for name in ("PATH", "ODD", "EMPTY", "LINES_OF")}

    direct = probe_of(own, PYTHON, str(probe), cwd=reachable, **as_user)
    run = ["--socket", str(daemon.socket), "run", "--mem", "1G", "--", PYTHON, str(probe)]
    job = probe_of(own, PYTHON, "-c", ANYONE_S, *run, cwd=reachable, **as_user)

    assert direct["status"]["Groups"].split() == sorted(["44", "4711", str(user.pw_gid)], key=int)
    assert differences(direct, job) == {"environment": []}
