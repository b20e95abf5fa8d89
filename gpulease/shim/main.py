"""A shim's steps from its birth to its worker's: the order in which they come is the safety.

As root it touches only the job's directory, which is root's; then it becomes the user; only then
anything of the user's is touched, in the worker. The record comes before all else that can be
seen, so that a job is launched once at most. Once the worker runs, `supervise` takes over.
"""

import json
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from gpulease.shim import linux, worker
from gpulease.shim.launch_request import IdentitySpec, ShimSpec, read_shim_spec
from gpulease.shim.log_file import JobLog
from gpulease.shim.record import Chronicle, Failure, claim
from gpulease.shim.supervisor import Supervisor
from gpulease.shim.worker import StepFailed, start_worker, step

SOCKET = "socket"


class Status:
    """The way to tell the daemon, once, how the launch went."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def __call__(self, content: Mapping[str, Any]) -> None:
        """Send one line and close, if that was not done before."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            os.write(fd, json.dumps(content).encode() + b"\n")
        except OSError:
            return  # the daemon has gone; it will find the record
        finally:
            os.close(fd)


def run(request: int, status: int, title: tuple[int, int] | None) -> None:
    """Be a shim: launch what the request says and stay with it until its end."""
    report = Status(status)
    try:
        children = _become_shim()
        order = read_shim_spec(request)
        linux.set_title(title, f"gpulease-shim: job {order.job}")
        _launch(order, request, report, children)
    except StepFailed as failed:
        report({"failed": failed.failure._asdict()})
    except BaseException as error:
        report({"failed": Failure("shim", None, f"cannot start the job: {error!r}")._asdict()})
        raise


def _become_shim() -> int:
    """Leave the spawner's session and adopt orphans; return what a child's end makes readable."""
    os.setsid()
    linux.adopt_orphans()
    linux.set_name("gpulease-shim")
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    receiver, sender = os.pipe()
    for fd in (receiver, sender):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return receiver


def _launch(order: ShimSpec, request: int, report: Status, children: int) -> None:
    with step("directory", f"cannot open the job's directory {order.directory}"):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        directory = os.open(order.directory, flags)
    with step("record", "cannot make the job's record"):
        record = claim(directory, os.getpid())
    if record is None:
        report({"already": True})
        return
    chronicle = Chronicle(record)
    try:
        _company(order, request, report, children, directory, chronicle)
    except StepFailed as failed:
        chronicle.note_failure(failed.failure)
        chronicle.write()
        raise


def _company(
    order: ShimSpec,
    request: int,
    report: Status,
    children: int,
    directory: int,
    chronicle: Chronicle,
) -> None:
    """Open what needs the rights of root, give them up, and start the worker."""
    daemon = os.geteuid()
    owner = daemon if order.identity is None else order.identity.uid
    with step("logs", "cannot make the job's logs"):
        stdout, stderr = (_open_log(directory, name, order) for name in ("stdout", "stderr"))
    with step("socket", "cannot make the job's socket"):
        listener = _listen(directory, order)
    os.close(directory)
    if order.identity is not None:
        _take(order.identity)
    supervisor = Supervisor(order, chronicle, listener, (owner, daemon), report, children)
    with step("fork", "cannot start a process for the job"):
        worker = start_worker(request, order)
    os.close(request)
    try:
        supervisor.keep(worker, stdout, stderr)
    except BaseException as error:
        stderr.write(f"[gpulease: the shim failed: {error!r}]\n".encode())
        raise


def _take(wanted: IdentitySpec) -> None:
    sentence = f"cannot become {wanted.user}"
    try:
        with step("identity", sentence):
            worker.take(wanted)
    except worker.NotTaken as error:
        raise StepFailed(Failure("identity", None, f"{sentence}: {error}")) from error


def _open_log(directory: int, name: str, order: ShimSpec) -> JobLog:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(name, flags, 0o600, dir_fd=directory)
    return JobLog(fd, order.log_limit, order.keep_free)


def _listen(directory: int, order: ShimSpec) -> socket.socket:
    """Make the job's socket; through the descriptor, since addresses are short and paths long."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
    finally:
        os.umask(before)
    if order.identity is not None:
        uid, gid = order.identity.uid, order.identity.gid
        os.chown(SOCKET, uid, gid, dir_fd=directory, follow_symlinks=False)
    listener.listen(128)
    return listener
