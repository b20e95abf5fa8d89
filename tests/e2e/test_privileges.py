"""What a job of another user has of the root daemon that launched it: nothing. From inside."""

import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import PATIENCE_S, Daemon, open_folder
from process_rig import PYTHON
from process_rig import Client as Peer

from .users import needs_root

pytestmark = needs_root

# A daemon whose own state is as odd as can be: whatever of it is seen in a job was inherited.
_ODD = """
import os, signal, sys
os.umask(0o077)
os.nice(-3)
os.environ["SECRET_OF_THE_DAEMON"] = "xyzzy"
open("/proc/self/oom_score_adj", "w").write("-500")
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGWINCH})
for target in range(20, 30):
    os.dup2(os.open("/etc/shadow", os.O_RDONLY), target, inheritable=True)
os.execv(sys.argv[1], sys.argv[1:])
"""

_LOOK = r"""
import ctypes, json, os, resource
libc = ctypes.CDLL(None)
def status(pid):
    lines = open(f"/proc/{pid}/status").read().splitlines()
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}
def refused(path):
    try:
        os.listdir(path) if path.endswith("fd") else open(path, "rb").read(1)
    except PermissionError:
        return True
    return False
shim = os.getppid()
print(json.dumps({
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")
                          if os.path.exists(f"/proc/self/fd/{fd}")),
    "environment": dict(os.environ),
    "status": status("self"),
    "shim": status(shim),
    "oom": open("/proc/self/oom_score_adj").read().strip(),
    "umask": os.umask(0),
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "securebits": libc.prctl(27, 0, 0, 0, 0),
    "dumpable": libc.prctl(3, 0, 0, 0, 0),
    "cwd": os.getcwd(),
    "traced": libc.ptrace(16, shim, 0, 0),
    "refused": [name for name in ("fd", "mem", "environ", "maps", "exe", "cwd", "stack")
                if refused(f"/proc/{shim}/{name}")],
}))
"""


class OddDaemon(Daemon):
    """A daemon that was started by somebody careless."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", _ODD, *super().command()]


class TracedDaemon(Daemon):
    """A daemon whose every look at a file is written down, process by process."""

    def command(self) -> list[str]:
        traced = "%file,setresuid,clone,clone3,fork,vfork"
        return ["strace", "-ff", "-qq", "-e", f"trace={traced}", "-s", "300",
                "-o", str(self.folder / "trace"), *super().command()]  # fmt: skip

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the daemon itself; strace hears no signal, and ends with the last that it traces."""
        assert self.process is not None
        tracer = self.process.pid
        children = Path(f"/proc/{tracer}/task/{tracer}/children").read_text().split()
        os.kill(min(map(int, children)), number)
        self.process.wait(PATIENCE_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as made:
        made.chmod(0o755)  # as /var/lib
        yield made


_CALL = """
import http.client, os, socket, sys
path, uid, gid, body = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.setgroups([gid]); os.setgid(gid); os.setuid(uid)
call = http.client.HTTPConnection("gpulease")
call.sock = socket.socket(socket.AF_UNIX); call.sock.connect(path)
call.request("POST", "/v1/jobs", body, {"content-type": "application/json"})
print(call.getresponse().read().decode())
"""


def submit(daemon: Daemon, user: pwd.struct_passwd, *argv: str, **changes: Any) -> int:
    body = {"argv": argv, "cwd": "/", "environment": {"PATH": "/usr/bin:/bin"},
            "claim": {"memory": 1 << 29}, **changes}  # fmt: skip
    done = subprocess.run(
        [PYTHON, "-c", _CALL, str(daemon.socket), str(user.pw_uid), str(user.pw_gid),
         json.dumps(body)],
        capture_output=True, text=True, timeout=120, check=True, cwd="/",
    )  # fmt: skip
    return int(json.loads(done.stdout)["id"])


def seen_inside(daemon: Daemon, user: pwd.struct_passwd, **changes: Any) -> dict[str, Any]:
    job = submit(daemon, user, PYTHON, "-c", _LOOK, **changes)
    daemon.wait_until(job, "ended")
    seen: dict[str, Any] = json.loads(daemon.run("logs", str(job)).stdout)
    return seen


def test_a_job_has_nothing_of_the_daemon_that_launched_it(
    folder: Path, user: pwd.struct_passwd
) -> None:
    daemon = OddDaemon(folder)
    try:
        daemon.start()
        assert daemon.process is not None
        pid = daemon.process.pid
        assert "xyzzy" in Path(f"/proc/{pid}/environ").read_text(), "the daemon is not odd"
        bounding = re.search(r"CapBnd:\s(\w+)", Path(f"/proc/{pid}/status").read_text())
        assert bounding is not None
        seen = seen_inside(daemon, user, umask=0o027, nice=4)
    finally:
        daemon.end_all()

    assert seen["descriptors"] == [0, 1, 2]
    environment = seen["environment"]
    assert "xyzzy" not in environment.values()
    ours = {name for name in environment if not name.startswith(("GPULEASE_", "CUDA_"))}
    assert not {"INVOCATION_ID", "NOTIFY_SOCKET", "JOURNAL_STREAM", "HOME", "VIRTUAL_ENV"} & ours
    for who in ("status", "shim"):
        status = seen[who]
        assert status["Uid"].split() == [str(user.pw_uid)] * 4
        assert status["Gid"].split() == [str(user.pw_gid)] * 4
        assert status["Groups"].split() == [str(user.pw_gid)]
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(status[name], 16) == 0, (who, name)
        # As at a login: else no sudo, ping or nvidia-modprobe would work in a job.
        assert (status["NoNewPrivs"], status["CapBnd"]) == ("0", bounding[1])
        assert int(status["SigBlk"], 16) == 0
    # Python itself ignores SIGPIPE and SIGXFSZ, and nothing else is ignored; of what has a number
    # that is not even a signal to Python, this test may have been started so.
    ignored = {
        number for number in range(1, 65) if int(seen["status"]["SigIgn"], 16) >> number - 1 & 1
    }
    assert ignored & set(signal.valid_signals()) == {signal.SIGPIPE, signal.SIGXFSZ}
    assert seen["oom"] == "0"
    assert (seen["umask"], seen["nice"], seen["cwd"]) == (0o027, 4, "/")
    assert (seen["securebits"], seen["dumpable"]) == (0, 1)


def test_a_job_can_neither_trace_its_shim_nor_look_into_it(
    folder: Path, user: pwd.struct_passwd
) -> None:
    daemon = Daemon(folder)
    try:
        seen = seen_inside(daemon.start(), user)
    finally:
        daemon.end_all()
    assert seen["traced"] == -1
    assert {"fd", "mem", "environ", "maps"} <= set(seen["refused"])


# Prints each path that its user may change or replace, below the folders that are named.
_WRITABLE = """
import os, sys
for top in sys.argv[1:]:
    for folder, folders, files in os.walk(top):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            if os.access(path, os.W_OK):
                print(path)
for name in ("record", "stdout", "stderr", "socket", "ledger"):
    for job in range(1, 5):
        path = f"{sys.argv[1]}/jobs/{job}/{name}"
        if os.access(path, os.W_OK):
            print(path)
        for attempt in (
            lambda: os.symlink("/etc/passwd", path),
            lambda: os.rename(path, path + ".old"),
            lambda: os.link(path, f"{sys.argv[1]}/jobs/{job}/other"),
            lambda: os.unlink(path),
            lambda: os.mkdir(f"{sys.argv[1]}/jobs/{job + 5}"),
        ):
            try:
                attempt()
                print("could", path)
            except OSError:
                pass
"""


def test_of_all_that_the_daemon_keeps_a_user_may_write_to_what_stores_nothing(
    folder: Path, user: pwd.struct_passwd
) -> None:
    daemon = Daemon(folder)
    try:
        daemon.start()
        job = submit(daemon, user, "sleep", "1000")
        daemon.wait_until(job, "active")
        done = subprocess.run(
            [PYTHON, "-c", _WRITABLE, str(daemon.state), str(folder)],
            user=user.pw_uid, group=user.pw_gid, extra_groups=[], cwd="/",
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        socket = daemon.state / "jobs" / str(job) / "socket"
        ledger = socket.with_name("ledger")
        status = ledger.stat()
        assert stat.S_ISFIFO(status.st_mode)
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (user.pw_uid, 0o600)
        theirs = sorted(map(str, [socket, ledger, daemon.socket]))
        assert sorted(done.stdout.splitlines()) == theirs
        with Peer(socket.parent, "watch"):
            pass  # nothing of it was moved
    finally:
        daemon.end_all()


@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace here")
def test_no_path_of_a_user_is_touched_as_root(folder: Path, user: pwd.struct_passwd) -> None:
    home = folder / "their-home"
    home.mkdir(mode=0o700)
    script = home / "script.sh"
    script.write_text("#!/bin/sh\ncat their-data\n")
    script.chmod(0o755)
    (home / "their-data").write_text("theirs\n")
    for path in (home, *home.iterdir()):
        os.chown(path, user.pw_uid, user.pw_gid)
    daemon = TracedDaemon(folder)
    try:
        daemon.start()
        job = submit(
            daemon, user, str(script), cwd=str(home),
            environment={"PATH": f"{home}:/usr/bin:/bin", "HOME": str(home),
                         "XDG_RUNTIME_DIR": str(home), "TMPDIR": str(home)},
        )  # fmt: skip
        daemon.wait_until(job, "ended")
        assert daemon.run("logs", str(job)).stdout == "theirs\n"
    finally:
        daemon.end_all()
    touched = touches(folder, str(home), user.pw_uid)
    assert any("chdir" in line for line, root in touched if not root), "nothing was traced"
    assert [line for line, root in touched if root] == []


_FORKED = re.compile(r"^(?:clone3?|v?fork)\(.*\)\s+= (\d+)")
_BECAME = re.compile(r"^setresuid\((\d+), \1, \1\)\s+= 0")


def touches(folder: Path, home: str, uid: int) -> list[tuple[str, bool]]:
    """Return each traced call that names something in `home`, and whether root made it."""
    traces = {
        int(path.suffix[1:]): path.read_text(errors="replace").splitlines()
        for path in folder.glob("trace.*")
    }
    found: list[tuple[str, bool]] = []

    def read(pid: int, as_user: bool) -> None:
        for line in traces.get(pid, []):
            if (became := _BECAME.match(line)) is not None:
                as_user = int(became[1]) == uid
            elif (forked := _FORKED.match(line)) is not None:
                children[int(forked[1])] = as_user
            # What a program is given says nothing; what is opened, looked at or entered does.
            if f'"{home}' in line.split("[", 1)[0]:
                found.append((line, not as_user))

    every = (line for lines in traces.values() for line in lines)
    forked = {int(fork[1]) for line in every if (fork := _FORKED.match(line)) is not None}
    # Not the lowest: pids begin anew when they have reached kernel.pid_max.
    (first,) = set(traces) - forked
    children: dict[int, bool] = {first: False}
    read_already: set[int] = set()
    while left := set(children) - read_already:
        pid = min(left)
        read_already.add(pid)
        read(pid, children[pid])
    assert read_already >= set(traces), "a process came from nowhere"
    return found
