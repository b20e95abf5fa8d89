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

The order of a shim's steps keeps the launch safe. As root it uses only the job's directory, which
belongs to root. Then it becomes the user, and only then anything of the user's is used, in the
worker. The record is made before anything else that can be seen, so that a job is launched once at
most. When the worker runs, `supervisor` takes over.
"""

from __future__ import annotations

import gc
import os
import select
import sys

from gpulease.light_json import encode
from gpulease.shim import linux
from gpulease.shim.launch_request import ShimSpec, read_shim_spec
from gpulease.shim.output import JobLog
from gpulease.shim.record import Failure, JobEvents, claim, now
from gpulease.shim.supervisor import Supervisor
from gpulease.shim.worker import IGNORED, StepFailed, become_user, start_worker, step

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Mapping
    from typing import Any, NoReturn

    _Title = tuple[int, int] | None
else:
    import _signal as signal  # plain numbers, without enumerations
    import _socket as socket

STOCK = 2
"""Shims that wait. Another is forked in less time than a launch takes."""
IDLE_TITLE = "gpulease-shim: waits for a job"
SOCKET = "socket"
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
    now()  # the C library then knows the time zone
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
            children = _become_shim()
            descriptors = _receive(channel)
            # Until here the end of the spawner loses at most a request, which is sent again.
            linux.outlive_parent()
            channel.close()
            os.close(waits)
            _launch(descriptors, children, title)
        code = 0
    finally:
        os._exit(code)


class LaunchReport:
    """Tells the daemon, once, how the launch went."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def __call__(self, content: Mapping[str, Any]) -> None:
        """Send one line and close, unless that was done before."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            os.write(fd, encode(content) + b"\n")
        except OSError:
            return  # the daemon has stopped; it will find the record
        finally:
            os.close(fd)


def _become_shim() -> int:
    """Leave the spawner's session and its standard error, and adopt orphans.

    Returns:
        A descriptor that is readable when a child has ended.
    """
    os.setsid()
    linux.adopt_orphans()
    linux.set_name("gpulease-shim")
    os.dup2(0, 2)  # /dev/null
    receiver, sender = os.pipe()
    for fd in (receiver, sender):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return receiver


def _launch(descriptors: list[int], children: int, title: _Title) -> None:
    """Launch the job of a request when the daemon gives the go-ahead, and stay until its end."""
    if len(descriptors) not in (2, 3):
        return  # the daemon has stopped
    request, status, *go = descriptors
    if go and not _may_go(status, go[0]):
        return
    report = LaunchReport(status)
    try:
        spec = read_shim_spec(request)
        what = f"job {spec.job}" if spec.job else "notification"
        linux.set_title(title, f"gpulease-shim: {what}")
        _launch_once(spec, request, report, children)
    except StepFailed as failed:
        report({"failed": vars(failed.failure)})
    except BaseException as error:
        report({"failed": vars(Failure("shim", None, f"cannot start the job: {error!r}"))})
        raise


def _may_go(status: int, go: int) -> bool:
    """Wait for the daemon's go-ahead. Without it nothing is launched and no record is made."""
    try:
        os.write(status, encode({"waiting": os.getpid()}) + b"\n")
        return bool(os.read(go, 1))
    except OSError:
        return False  # the daemon has stopped
    finally:
        os.close(go)


def _launch_once(spec: ShimSpec, request: int, report: LaunchReport, children: int) -> None:
    with step("directory", f"cannot open the job's directory {spec.directory}"):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        directory = os.open(spec.directory, flags)
    with step("record", "cannot create the job's record"):
        record = claim(directory, os.getpid())
    if record is None:
        report({"already": True})
        return
    events = JobEvents(record)

    def note(*_: object) -> None:
        events.terminated = True

    signal.signal(signal.SIGTERM, note)
    try:
        _supervise(spec, request, report, children, directory, events)
    except StepFailed as failed:
        events.note_failure(failed.failure)
        events.write()
        raise


def _supervise(
    spec: ShimSpec,
    request: int,
    report: LaunchReport,
    children: int,
    directory: int,
    events: JobEvents,
) -> None:
    """Open what only root may open, give up the rights of root, and run the worker."""
    daemon = os.geteuid()
    with step("logs", "cannot create the job's logs"):
        stdout, stderr = (_open_log(directory, name, spec) for name in ("stdout", "stderr"))
    with step("socket", "cannot create the job's socket"):
        listener = _listen(directory, spec)
    os.close(directory)
    if spec.identity is not None:
        become_user(spec.identity)
    if spec.cores:
        # The scope holds the job there. Without one, this is what there is.
        with step("cores", "cannot run the job on its cores"):
            os.sched_setaffinity(0, spec.cores)
    supervisor = Supervisor(spec, events, listener, daemon, report, children)
    with step("fork", "cannot start a process for the job"):
        worker = start_worker(request, spec)
    os.close(request)
    try:
        supervisor.run(worker, stdout, stderr)
    except BaseException as error:
        stderr.write(f"[gpulease: the shim failed: {error!r}]\n".encode())
        raise


def _open_log(directory: int, name: str, spec: ShimSpec) -> JobLog:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(name, flags, 0o600, dir_fd=directory)
    return JobLog(fd, spec.log_limit, spec.keep_free)


def _listen(directory: int, spec: ShimSpec) -> socket.socket:
    """Create the job's socket, through the directory's descriptor: addresses must be short."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
    if spec.identity is not None:
        uid, gid = spec.identity.uid, spec.identity.gid
        os.chown(SOCKET, uid, gid, dir_fd=directory, follow_symlinks=False)
    listener.listen(128)
    return listener


if __name__ == "__main__":
    main()
