"""The spawner: a small process that forks shims for the daemon, which are never its own image.

`python -P -S -m gpulease.shim.spawner FD [confined]`, with an empty environment, in `/`. With
`confined` it leaves the mount namespace to which systemd confines the daemon: jobs see the file
system as everyone does. It reads messages of one byte that carry two descriptors: a request (see
`orders`) and the write end of a pipe for the answer. With a third, the read end of a pipe, the new
process first tells its pid, and is a shim only when a byte comes: by then the daemon has put it
where it belongs. What the daemon holds was never here, so no job can find it, and a launch costs a
fork and not an interpreter. When the daemon has gone it goes too; the shims stay.
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
        linux.see_files_as(1)
    title = _settle()
    while (descriptors := _receive(channel)) is not None:
        if len(descriptors) in (2, 3):
            request, status, *go = descriptors
            _spawn(channel, request, status, go[0] if go else None, title)
        for fd in descriptors:
            os.close(fd)


def _settle() -> tuple[int, int] | None:
    """Make this process fit to be forked from; return where its title stands."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in IGNORED else signal.SIG_DFL)
    # The system then buries shims by itself, and none ever becomes a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    linux.set_name("gpulease-spawn")
    title = linux.argument_area()
    linux.set_title(title, "gpulease-spawner")
    gc.collect()
    gc.freeze()  # or the first collection in a shim would write to, and so copy, every page
    return title


def _receive(channel: socket.socket) -> list[int] | None:
    """Return the descriptors of the next message, or None when the daemon has gone."""
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
    """Wait for the daemon's word; without it nothing was launched, and nothing says that it was."""
    try:
        os.write(status, json.dumps({"waiting": os.getpid()}).encode() + b"\n")
        return bool(os.read(go, 1))
    except OSError:
        return False  # the daemon has gone
    finally:
        os.close(go)


if __name__ == "__main__":
    main()
