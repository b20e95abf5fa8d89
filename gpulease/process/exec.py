"""From the fork to the command: the worker's first moments, as the user.

The shim gets a `Worker`: the pid, its own ends of the pipes, and a descriptor on which a failed
start is told and which closes when the command runs.
"""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from gpulease.process.command import become_command
from gpulease.process.linux import die_with_parent
from gpulease.process.orders import ShimOrder, TerminalOrder, WorkerOrder, read_worker_order
from gpulease.process.record import Failure
from gpulease.process.steps import StepFailed, shown, step
from gpulease.process.terminal import Terminal, come_to_the_foreground, open_terminal

IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTERM,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXFSZ,
)
"""What spawner and shims ignore: a shim ends when its worker has, and what a shutdown sends to
everyone ends the worker. The spawner ends with the daemon."""
_COMPLAINT = 3
_NULL = "/dev/null"
_CWD_HINT = "submit it from a directory that exists still, and that you may enter"
_TERMINAL_HINT = "pipe its output, as in `gpulease run ... | cat`, and it runs without one"


class Worker(NamedTuple):
    """A worker that has been forked, as its shim holds it; descriptors do not block."""

    pid: int
    complaint: int
    """Reads as JSON (a `Failure`) if the start failed, and as nothing if it did not."""
    stdin: int | None
    stdout: int
    stderr: int | None
    """None: standard error is the terminal."""
    terminal: Terminal | None
    """What it runs on; `stdin` and `stdout` are two descriptors of its master then."""


class _Ends(NamedTuple):
    """The worker's own ends."""

    stdin: int
    stdout: int
    stderr: int
    complaint: int


def start_worker(request: int, order: ShimOrder) -> Worker:
    """Fork the worker of the request that is open as `request`.

    Called as the user: whoever makes a pipe or a terminal owns it, and the worker may want to open
    /dev/stdout or /dev/tty.

    Raises:
        OSError: no pipes or no process could be had.
        StepFailed: no terminal could be had.
    """
    complaint, theirs = os.pipe()
    if order.terminal is None:
        ours, ends = _pipes(order.stdin, theirs)
        terminal = None
    else:
        terminal = _terminal(order.terminal)
        ours, ends = _terminal_ends(terminal, order.terminal.stderr, theirs)
    pid = _fork(request, ends, terminal is not None)
    for end in set(ends) - ({terminal.slave} if terminal else set()):
        os.close(end)
    for fd in (complaint, *ours):
        if fd is not None:
            os.set_blocking(fd, False)
    return Worker(pid, complaint, *ours, terminal)


_Ours = tuple[int | None, int, int | None]


def _pipes(wants_stdin: bool, complaint: int) -> tuple[_Ours, _Ends]:
    stdout, stdout_end = os.pipe()
    stderr, stderr_end = os.pipe()
    stdin: int | None = None
    if wants_stdin:
        stdin_end, stdin = os.pipe()
    else:
        stdin_end = os.open(_NULL, os.O_RDONLY | os.O_CLOEXEC)
    return (stdin, stdout, stderr), _Ends(stdin_end, stdout_end, stderr_end, complaint)


def _terminal(order: TerminalOrder) -> Terminal:
    with step("terminal", "cannot make a terminal for the job", _TERMINAL_HINT):
        terminal = open_terminal(order)
        terminal.control()
        return terminal


def _terminal_ends(terminal: Terminal, for_stderr: bool, complaint: int) -> tuple[_Ours, _Ends]:
    slave, stderr = terminal.slave, None
    stderr_end = slave
    if not for_stderr:
        stderr, stderr_end = os.pipe()
    # Two descriptors, so that each direction is watched and closed by itself.
    ours = (os.dup(terminal.master), terminal.master, stderr)
    return ours, _Ends(slave, slave, stderr_end, complaint)


def _fork(request: int, ends: _Ends, on_terminal: bool) -> int:
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_worker(request, ends, shim, on_terminal)
    # Here as well as there: whoever of the two is first, a signal finds the group.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _be_worker(request: int, ends: _Ends, shim: int, on_terminal: bool) -> NoReturn:
    complaint = ends.complaint
    try:
        order = read_worker_order(request)
        _lead_group(ends.stdin if on_terminal else None)
        _start_afresh(shim)
        complaint = _settle_descriptors(ends)
        _settle(order)
        become_command(order.argv, order.environment)
    except StepFailed as failed:
        _complain(complaint, failed.failure)
    except BaseException as error:  # noqa: BLE001 - the shim must learn of it, whatever it is
        _complain(complaint, Failure("worker", None, f"cannot start the job: {error!r}"))
    finally:
        os._exit(127)


def _lead_group(terminal: int | None) -> None:
    """Be a process group, in the shim's session as in a shell's: the kernel lets such a one stop.

    One whose parents are all in other sessions is orphaned, and Ctrl-Z would do nothing to it.
    """
    os.setpgid(0, 0)
    if terminal is not None:
        come_to_the_foreground(terminal)


def _start_afresh(shim: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(127)
    signal.set_wakeup_fd(-1)
    # Not only those that we ignore: the daemon may have been started with others ignored.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)


def _settle_descriptors(ends: _Ends) -> int:
    """Leave 0, 1, 2, and the way to complain, which closes by itself when the command runs."""
    for target, end in enumerate((ends.stdin, ends.stdout, ends.stderr)):
        os.dup2(end, target)
    os.dup2(ends.complaint, _COMPLAINT, inheritable=False)
    with os.scandir("/proc/self/fd") as names:
        held = [int(name.name) for name in names]
    for fd in held:
        if fd > _COMPLAINT:
            _close(fd)
    return _COMPLAINT


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        return  # the listing names the descriptor that it was read through


def _settle(order: WorkerOrder) -> None:
    with step("cwd", f"cannot start in {shown(order.cwd)}", _CWD_HINT):
        os.chdir(os.fsencode(order.cwd))
    os.umask(order.umask)
    with step("limits", "cannot set the limits of the job"):
        _be_nice(order.nice)
        _limit(order.soft_limits)


def _be_nice(nice: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except PermissionError:
        return  # below what this user may have; what the daemon has is as low as it gets


def _limit(soft_limits: Mapping[str, int]) -> None:
    """Set soft limits by their names in getrlimit(2); none can pass its hard limit."""
    for name, soft in soft_limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper().removeprefix('RLIMIT_')}", None)
        if number is None:
            continue
        hard = resource.getrlimit(number)[1]
        bounded = hard if soft < 0 else soft if hard < 0 else min(soft, hard)
        resource.setrlimit(number, (bounded, hard))


def _complain(complaint: int, failure: Failure) -> None:
    os.write(complaint, json.dumps(failure._asdict()).encode())
