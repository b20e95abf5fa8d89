"""The spawner: a small process that keeps a stock of shims ready for the daemon.

The daemon runs `python -P -S -m gpulease.shim.spawner FD [confined]` with an empty environment in
`/`. With `confined` the spawner leaves the mount namespace in which systemd confines the daemon, so
that jobs see the file system as all users do.

FD is a socket. The shims of the stock wait on it, and the kernel gives each message to one of them:
a launch costs neither the start of an interpreter nor, while it is awaited, a fork. A message is
one byte with two descriptors: a launch request, and the write end of a pipe for the reply. With a
third one, the read end of a pipe, the shim first reports its pid and launches when a byte arrives;
in between the daemon moves it to its cgroup.

Each shim of the stock holds the write end of a pipe, and closes it when it has taken a message; so
does the kernel when the shim is killed. Then the spawner forks another. The spawner has never had
the daemon's memory, so no job can find anything of it. It ends with the daemon, and the stock with
it; the shims of jobs stay.
"""

from __future__ import annotations

import gc
import os
import select
import sys

from gpulease.light_json import encode
from gpulease.shim import linux, record
from gpulease.shim import main as shim_main
from gpulease.shim.record import Failure
from gpulease.shim.worker import IGNORED

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from typing import NoReturn

    _Title = tuple[int, int] | None
else:
    import _signal as signal  # plain numbers, without enumerations
    import _socket as socket

STOCK = 2
"""Shims that wait. Another is forked in less time than a launch takes."""
IDLE_TITLE = "gpulease-shim: waits for a job"
_LONGEST = socket.CMSG_SPACE(3 * 4)


def main() -> None:
    """Keep the stock until the daemon closes its end."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    if sys.argv[2:] == ["confined"]:
        linux.enter_mount_namespace(1)
    _keep_stock(channel, _prepare())


def _prepare() -> _Title:
    """Prepare this process to be forked; return the memory of its title."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in IGNORED else signal.SIG_DFL)
    # The kernel then reaps shims, and none becomes a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.umask(0o177)  # a shim creates files and a socket
    if os.geteuid() == 0:
        linux.reset_oom_score()
    linux.set_name("gpulease-spawn")
    record.now()  # the C library then knows the time zone
    title = linux.argument_area()
    linux.set_title(title, "gpulease-spawner")
    gc.collect()
    gc.freeze()  # otherwise the first collection in a shim would copy every page
    return title


def _keep_stock(channel: socket.socket, title: _Title) -> None:
    events = select.poll()
    events.register(channel, 0)  # for its end only: the shims read it
    idle: set[int] = set()
    while _fill(channel, idle, title):
        for fd in idle:
            events.register(fd, 0)
        for fd, _ in events.poll():
            if fd == channel.fileno():
                return
            events.unregister(fd)
            os.close(fd)
            idle.discard(fd)


def _fill(channel: socket.socket, idle: set[int], title: _Title) -> bool:
    """Fork what the stock lacks; False if the daemon has stopped."""
    while len(idle) < STOCK:
        try:
            idle.add(_fork_ahead(channel, idle, title))
        except OSError as error:
            if idle:
                break  # the rest is forked after the next launch
            if not _refuse(channel, error):
                return False
    return True


def _fork_ahead(channel: socket.socket, idle: set[int], title: _Title) -> int:
    """Add a shim to the stock, and return a pipe that hangs up when it has left."""
    spawner = os.getpid()
    left, waits = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(left)
        os.close(waits)
        raise
    if pid == 0:
        _be_shim(spawner, channel, waits, (left, *idle), title)
    os.close(waits)
    return left


def _refuse(channel: socket.socket, error: OSError) -> bool:
    """Answer one message without a shim; False if the daemon has stopped."""
    descriptors = _receive(channel)
    if len(descriptors) in (2, 3):
        why = f"cannot start a process for the job: {error.strerror}"
        failed = vars(Failure("fork", error.errno, why))
        os.write(descriptors[1], encode({"failed": failed}) + b"\n")
    for fd in descriptors:
        os.close(fd)
    return bool(descriptors)


def _receive(channel: socket.socket) -> list[int]:
    """Return the descriptors of the next message; none when the daemon has stopped."""
    descriptors: list[int] = []
    _, messages, _, _ = channel.recvmsg(1, _LONGEST, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += memoryview(content[: len(content) // 4 * 4]).cast("i")
    return descriptors


def _be_shim(
    spawner: int, channel: socket.socket, waits: int, others: tuple[int, ...], title: _Title
) -> NoReturn:
    code = 1
    try:
        for fd in others:
            os.close(fd)
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() == spawner:
            linux.set_title(title, IDLE_TITLE)
            children = shim_main.become_shim()
            descriptors = _receive(channel)
            # Until here the end of the spawner loses at most a request, which is sent again.
            linux.outlive_parent()
            channel.close()
            os.close(waits)
            _launch(descriptors, children, title)
        code = 0
    finally:
        os._exit(code)


def _launch(descriptors: list[int], children: int, title: _Title) -> None:
    if len(descriptors) not in (2, 3):
        return  # the daemon has stopped
    request, status, *go = descriptors
    if not go or _may_go(status, go[0]):
        shim_main.run(request, status, children, title)


def _may_go(status: int, go: int) -> bool:
    """Wait for the daemon's go-ahead. Without it nothing is launched and no record is made."""
    try:
        os.write(status, encode({"waiting": os.getpid()}) + b"\n")
        return bool(os.read(go, 1))
    except OSError:
        return False  # the daemon has stopped
    finally:
        os.close(go)


if __name__ == "__main__":
    main()
