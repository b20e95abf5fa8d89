"""The spawner: a small process that forks shims for the daemon.

The daemon runs `python -P -S -m gpulease.shim.spawner FD [confined]` with an empty environment in
`/`. With `confined` the spawner leaves the mount namespace in which systemd confines the daemon, so
that jobs see the file system as all users do.

It reads messages of one byte with two descriptors: a launch request, and the write end of a pipe
for the reply. With a third one, the read end of a pipe, the new process first reports its pid and
becomes a shim when a byte arrives; in between the daemon moves it to its cgroup.

A launch costs a fork and not the start of an interpreter. The spawner has never had the daemon's
memory, so no job can find anything of it. The spawner ends with the daemon; the shims stay.
"""

import gc
import json
import os
import signal
import socket
import sys
from array import array
from typing import NoReturn

from gpulease.shim import linux
from gpulease.shim import main as shim_main
from gpulease.shim.record import Failure
from gpulease.shim.worker import IGNORED

_ROOM = socket.CMSG_SPACE(3 * 4)


def main() -> None:
    """Fork a shim for every message, until the daemon closes its end."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    if sys.argv[2:] == ["confined"]:
        linux.enter_mount_namespace(1)
    title = _prepare()
    while (descriptors := _receive(channel)) is not None:
        if len(descriptors) in (2, 3):
            request, status, *go = descriptors
            _spawn(channel, request, status, go[0] if go else None, title)
        for fd in descriptors:
            os.close(fd)


def _prepare() -> tuple[int, int] | None:
    """Prepare this process to be forked; return the memory of its title."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in IGNORED else signal.SIG_DFL)
    # The kernel then reaps shims, and none becomes a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    linux.set_name("gpulease-spawn")
    title = linux.argument_area()
    linux.set_title(title, "gpulease-spawner")
    gc.collect()
    gc.freeze()  # otherwise the first collection in a shim would copy every page
    return title


def _receive(channel: socket.socket) -> list[int] | None:
    """Return the descriptors of the next message, or None when the daemon has stopped."""
    descriptors = array("i")
    data, messages, _, _ = channel.recvmsg(1, _ROOM, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // 4 * 4])
    return list(descriptors) if data else None


def _spawn(
    channel: socket.socket,
    request: int,
    status: int,
    go: int | None,
    title: tuple[int, int] | None,
) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        why = f"cannot start a process for the job: {error.strerror}"
        failed = Failure("fork", error.errno, why)._asdict()
        os.write(status, json.dumps({"failed": failed}).encode() + b"\n")
        return
    if pid == 0:
        _be_shim(channel, request, status, go, title)


def _be_shim(
    channel: socket.socket,
    request: int,
    status: int,
    go: int | None,
    title: tuple[int, int] | None,
) -> NoReturn:
    code = 1
    try:
        channel.close()
        if go is None or _may_go(status, go):
            shim_main.run(request, status, title)
        code = 0
    finally:
        os._exit(code)


def _may_go(status: int, go: int) -> bool:
    """Wait for the daemon's go-ahead. Without it nothing is launched and no record is made."""
    try:
        os.write(status, json.dumps({"waiting": os.getpid()}).encode() + b"\n")
        return bool(os.read(go, 1))
    except OSError:
        return False  # the daemon has stopped
    finally:
        os.close(go)


if __name__ == "__main__":
    main()
