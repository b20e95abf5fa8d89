"""The steps of a shim from its fork to its worker's. Their order keeps the launch safe.

As root it uses only the job's directory, which belongs to root. Then it becomes the user, and only
then anything of the user's is used, in the worker. The record is made before anything else that can
be seen, so that a job is launched once at most. When the worker runs, `supervisor` takes over.
"""

from __future__ import annotations

import os

from gpulease.light_json import encode
from gpulease.shim import linux, worker
from gpulease.shim.launch_request import IdentitySpec, ShimSpec, read_shim_spec
from gpulease.shim.output import JobLog
from gpulease.shim.record import Failure, JobEvents, claim
from gpulease.shim.supervisor import Supervisor
from gpulease.shim.worker import StepFailed, start_worker, step

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Mapping
    from typing import Any
else:
    import _signal as signal  # plain numbers, without enumerations
    import _socket as socket

SOCKET = "socket"


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


def run(request: int, status: int, children: int, title: tuple[int, int] | None) -> None:
    """Launch the job of the request and stay until its end.

    `children` is what `become_shim` returned.
    """
    report = LaunchReport(status)
    try:
        spec = read_shim_spec(request)
        what = f"job {spec.job}" if spec.job else "notification"
        linux.set_title(title, f"gpulease-shim: {what}")
        _launch(spec, request, report, children)
    except StepFailed as failed:
        report({"failed": vars(failed.failure)})
    except BaseException as error:
        report({"failed": vars(Failure("shim", None, f"cannot start the job: {error!r}"))})
        raise


def become_shim() -> int:
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


def _launch(spec: ShimSpec, request: int, report: LaunchReport, children: int) -> None:
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
        _become(spec.identity)
    supervisor = Supervisor(spec, events, listener, daemon, report, children)
    with step("fork", "cannot start a process for the job"):
        worker = start_worker(request, spec)
    os.close(request)
    try:
        supervisor.run(worker, stdout, stderr)
    except BaseException as error:
        stderr.write(f"[gpulease: the shim failed: {error!r}]\n".encode())
        raise


def _become(identity: IdentitySpec) -> None:
    sentence = f"cannot switch to user {identity.user}"
    try:
        with step("identity", sentence):
            worker.become_user(identity)
    except worker.NotTheUser as error:
        raise StepFailed(Failure("identity", None, f"{sentence}: {error}")) from error


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
