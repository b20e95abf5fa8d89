"""Jobs of another user: fully theirs, and nothing of ours within their reach. Needs root."""

import ctypes
import dataclasses
import os
import pwd
import subprocess
from pathlib import Path

import pytest

from gpulease.errors import LaunchFailed
from gpulease.host.launch import Launch
from gpulease.record import replace
from process_rig import (
    PYTHON,
    ephemeral_user,
    finish,
    is_alive,
    output,
    shell,
    start,
    user_identity,
    wait_until,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def as_user(launch: Launch, user: pwd.struct_passwd, groups: tuple[int, ...] | None = ()) -> Launch:
    shim = replace(launch.shim, identity=user_identity(user, groups))
    return dataclasses.replace(launch, shim=shim)


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def attempt(user: pwd.struct_passwd, program: str, *arguments: str) -> str:
    """Return what a program of this user says."""
    done = subprocess.run(
        [PYTHON, "-c", program, *arguments],
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_worker_and_shim_are_the_user_in_every_way(
    directory: Path, user: pwd.struct_passwd
) -> None:
    started = start(as_user(shell(directory, "sleep 1000"), user, (user.pw_gid, 12345)))

    for pid in (started.pid, started.shim_pid):
        seen = status(pid)
        assert seen["Uid"] == [str(user.pw_uid)] * 4
        assert seen["Gid"] == [str(user.pw_gid)] * 4
        assert set(seen["Groups"]) == {str(user.pw_gid), "12345"}
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(seen[name][0], 16) == 0


def test_without_given_groups_those_of_the_user_database_are_taken(
    directory: Path, user: pwd.struct_passwd
) -> None:
    subprocess.run(["usermod", "-a", "-G", "video", user.pw_name], check=True)

    finish(as_user(shell(directory, "id -Gn"), user, None))

    assert set(output(directory).split()) == {user.pw_name, "video"}


def test_no_job_shares_the_keys_of_the_daemons_session(
    directory: Path, user: pwd.struct_passwd
) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("keyctl(2) has another number here")
    # A session keyring for this process, as systemd gives one to each service.
    ours = ctypes.CDLL(None).syscall(250, 1, None)
    if ours < 0:
        pytest.skip("keyrings are not to be had here")
    program = "import ctypes; print(ctypes.CDLL(None).syscall(250, 0, -3, 0))"

    finish(as_user(shell(directory, f"{PYTHON} -c '{program}'"), user))

    assert int(output(directory)) not in (-1, ours)


def test_the_exit_of_a_users_job_is_recorded(directory: Path, user: pwd.struct_passwd) -> None:
    ended = finish(as_user(shell(directory, "id -un; exit 3"), user))

    assert ended.exit_code == 3
    assert output(directory) == f"{user.pw_name}\n"
    assert (directory / "socket").stat().st_uid == user.pw_uid
    assert {(directory / name).stat().st_uid for name in ("record", "stdout", "stderr")} == {0}


def test_the_user_can_neither_trace_the_shim_nor_use_its_descriptors(
    directory: Path, user: pwd.struct_passwd
) -> None:
    started = start(as_user(shell(directory, "sleep 1000"), user))
    program = """
import ctypes, os, sys
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
print("attach", libc.ptrace(16, pid, 0, 0))
for path in ("fd", "mem", "environ", "maps"):
    try:
        os.listdir(f"/proc/{pid}/fd") if path == "fd" else open(f"/proc/{pid}/{path}").read(1)
        print("read", path)
    except OSError as error:
        print("refused", path)
print("getfd", libc.syscall(438, os.pidfd_open(pid), 3, 0))
"""

    seen = attempt(user, program, str(started.shim_pid))

    assert seen.split("\n")[:-1] == [
        "attach -1",
        "refused fd",
        "refused mem",
        "refused environ",
        "refused maps",
        "getfd -1",
    ]


def test_the_user_can_forge_and_remove_nothing(directory: Path, user: pwd.struct_passwd) -> None:
    start(as_user(shell(directory, "sleep 1000"), user))
    program = """
import os, sys
directory = sys.argv[1]
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return
    print("could", call, arguments)
for name in ("record", "stdout", "stderr"):
    refused(os.open, f"{directory}/{name}", os.O_RDONLY)
    refused(os.open, f"{directory}/{name}", os.O_WRONLY)
    refused(os.unlink, f"{directory}/{name}")
refused(os.listdir, directory)
refused(os.unlink, f"{directory}/socket")
refused(os.rename, f"{directory}/record", f"{directory}/other")
refused(os.mkdir, f"{directory}/new")
"""

    assert attempt(user, program, str(directory)) == ""


def test_the_user_may_attach_and_may_not_control(directory: Path, user: pwd.struct_passwd) -> None:
    start(as_user(shell(directory, "echo mine; sleep 1000", awaits_attach=True), user))
    program = """
import socket, sys
channel = socket.socket(socket.AF_UNIX)
channel.connect(sys.argv[1] + "/socket")
def say(kind, payload):
    channel.sendall(bytes([kind]) + len(payload).to_bytes(4, "big") + payload)
say(16, b'{"role": "%s"}' % sys.argv[2].encode())
data = b""
while b"mine" not in data and b"only the daemon" not in data:
    piece = channel.recv(4096)
    if not piece:
        break
    data += piece
print(data)
"""
    assert "mine" in attempt(user, program, str(directory), "attach")
    assert "the daemon" in attempt(user, program, str(directory), "control")
    assert is_alive(directory)


def test_a_third_user_cannot_connect(directory: Path, user: pwd.struct_passwd) -> None:
    start(as_user(shell(directory, "sleep 1000"), user))
    program = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1] + '/socket')"

    with ephemeral_user() as third:
        assert "PermissionError" in attempt(third, program, str(directory))
    assert "Error" not in attempt(user, program, str(directory))


def test_a_third_user_with_a_handed_down_way_in_is_refused(
    directory: Path, user: pwd.struct_passwd
) -> None:
    start(as_user(shell(directory, "sleep 1000"), user))
    (directory / "socket").chmod(0o666)  # as if someone had been careless
    program = """
import socket, sys
channel = socket.socket(socket.AF_UNIX)
channel.connect(sys.argv[1] + "/socket")
print(channel.recv(4096))
"""

    with ephemeral_user() as third:
        assert "this job belongs to another user" in attempt(third, program, str(directory))


def test_a_place_that_only_root_may_enter_is_refused_to_the_user(
    directory: Path, user: pwd.struct_passwd, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)

    with pytest.raises(LaunchFailed, match="Permission denied"):
        start(as_user(shell(directory, "true", cwd=str(tmp_path)), user))


def test_a_user_may_open_the_streams_by_name(directory: Path, user: pwd.struct_passwd) -> None:
    finish(as_user(shell(directory, "echo one > /dev/stdout"), user))

    assert output(directory) == "one\n"


def test_the_protection_of_the_daemon_is_not_the_jobs(
    directory: Path, user: pwd.struct_passwd
) -> None:
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    try:
        score.write_text("-500")
    except PermissionError:
        pytest.skip("this machine does not let root lower its score")
    try:
        start(as_user(shell(directory, "cat /proc/self/oom_score_adj; sleep 1000"), user))
    finally:
        score.write_text(before)

    wait_until(lambda: output(directory) == "0\n")
