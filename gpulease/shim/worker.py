"""From the fork to the command: the worker's first moments, as the user.

The shim gets a `Worker`: the pid, its own ends of the pipes, and a descriptor on which a failed
start is told and which closes when the command runs.

Becoming the command, found as a shell would find it, and saying why that failed.

The steps of a launch: each failure names its step and says in a sentence what went wrong.

Becoming the user who asked, for good, and making sure of it.
"""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import E2BIG, EACCES, ENOENT, ENOEXEC, ENOTDIR
from typing import NamedTuple, NoReturn

from gpulease.shim.launch_request import (
    IdentitySpec,
    ShimSpec,
    TerminalSpec,
    WorkerSpec,
    read_worker_spec,
)
from gpulease.shim.linux import (
    die_with_parent,
    drop_capabilities,
    forbid_tracing,
    leave_session_keyring,
)
from gpulease.shim.record import EXEC, Failure
from gpulease.shim.terminal import PseudoTerminal, come_to_the_foreground, open_terminal


class StepFailed(Exception):
    """A step of the launch failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def step(name: str, sentence: str, hint: str | None = None) -> Iterator[None]:
    """Turn an OSError within into StepFailed: the sentence, a colon, and what the system says."""
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise StepFailed(Failure(name, error.errno, f"{sentence}: {why}", hint)) from error


def shown(text: str | bytes, length: int = 400) -> str:
    """Return `text` fit for a sentence: bytes that are no UTF-8 escaped, and not too long."""
    known = os.fsencode(text).decode("utf-8", "backslashreplace")
    return known if len(known) <= length else f"{known[:length]}..."


_SHELL = b"/bin/sh"


def become_command(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, looked up on the PATH of `environment`.

    A file that is executable and of no known format is run by /bin/sh, as execvp(3) has it.

    Raises:
        StepFailed: there is no such command, or it cannot be executed.
    """
    words = [os.fsencode(word) for word in argv]
    variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    denied: OSError | None = None
    for path in _candidates(words[0], variables):
        try:
            _become(path, words, variables)
        except OSError as error:
            if error.errno not in (ENOENT, ENOTDIR, EACCES) or os.access(path, os.F_OK):
                denied = denied or error
            if error.errno not in (ENOENT, ENOTDIR, EACCES):
                break
    raise StepFailed(_not_found(argv[0], variables) if denied is None else _denied(argv[0], denied))


def _candidates(name: bytes, environment: Mapping[bytes, bytes]) -> list[bytes]:
    if b"/" in name or not name:
        return [name]
    path = environment.get(b"PATH", os.fsencode(os.defpath))
    return [(directory or b".") + b"/" + name for directory in path.split(b":")]


def _become(path: bytes, words: list[bytes], environment: dict[bytes, bytes]) -> None:
    try:
        os.execve(path, words, environment)  # noqa: S606 - to become the command is the point
    except OSError as error:
        if error.errno != ENOEXEC:
            error.filename = path
            raise
    os.execve(_SHELL, [_SHELL, path, *words[1:]], environment)  # noqa: S606 - likewise


def _not_found(name: str, environment: Mapping[bytes, bytes]) -> Failure:
    if "/" in name:
        why = "there is no such file"
        hint = None if name.startswith("/") else "the path counts from where the job starts"
    elif b"PATH" in environment:
        why = "no such command on PATH"
        hint = (
            f"give its path, or add its directory to PATH, which is {shown(environment[b'PATH'])}"
        )
    else:
        why, hint = "no such command", "PATH is not set; give the path of the command"
    return Failure(EXEC, ENOENT, f"cannot run {shown(name)}: {why}", hint)


def _denied(name: str, error: OSError) -> Failure:
    number, why, hint = error.errno or EACCES, error.strerror or str(error), None
    path = bytes(error.filename)
    if number in (ENOENT, ENOTDIR):
        # The file is there, which to a shell makes it "not executable": 126 and not 127.
        number, why = EACCES, "its interpreter does not exist"
        hint = "the first line of the file names it"
    elif number == EACCES and _is_directory(path):
        why = "it is a directory"
    elif number == EACCES:
        why, hint = "it is not executable", f"chmod +x {shown(path)}, or name its interpreter first"
    elif number == E2BIG:
        why = "its arguments and environment are longer than the system allows"
        hint = "hand long lists over in a file"
    return Failure(EXEC, number, f"cannot run {shown(name)}: {why}", hint)


def _is_directory(path: bytes) -> bool:
    try:
        os.close(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


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
    terminal: PseudoTerminal | None
    """What it runs on; `stdin` and `stdout` are two descriptors of its master then."""


class _Ends(NamedTuple):
    """The worker's own ends."""

    stdin: int
    stdout: int
    stderr: int
    complaint: int


def start_worker(request: int, order: ShimSpec) -> Worker:
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


def _terminal(order: TerminalSpec) -> PseudoTerminal:
    with step("terminal", "cannot make a terminal for the job", _TERMINAL_HINT):
        terminal = open_terminal(order)
        terminal.control()
        return terminal


def _terminal_ends(
    terminal: PseudoTerminal, for_stderr: bool, complaint: int
) -> tuple[_Ours, _Ends]:
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
        order = read_worker_spec(request)
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


def _settle(order: WorkerSpec) -> None:
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


class NotTaken(Exception):
    """The kernel said yes, and yet this process is still someone else."""


def take(identity: IdentitySpec) -> None:
    """Take uid, gid and groups, in all their real, effective and saved kinds.

    Afterwards only root may trace this process or look at its descriptors: they were opened with
    more rights than the user has.

    Raises:
        OSError: a call was refused.
        NotTaken: something of the old identity is left.
    """
    _forgive_the_oom_killer()
    if identity.groups is None:
        os.initgroups(identity.user, identity.gid)
    else:
        os.setgroups(identity.groups)
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)
    # The daemon's is inherited by all jobs of all users, and who possesses it may read its keys:
    # Kerberos tickets, say.
    leave_session_keyring()
    if identity.uid != 0:
        drop_capabilities()
    forbid_tracing()
    _verify(identity)


def _verify(identity: IdentitySpec) -> None:
    if os.getresuid() != (identity.uid,) * 3 or os.getresgid() != (identity.gid,) * 3:
        raise NotTaken(f"still uid {os.getresuid()} and gid {os.getresgid()}")
    if identity.groups is not None and set(os.getgroups()) != set(identity.groups):
        raise NotTaken(f"still in the groups {os.getgroups()}")
    if identity.uid != 0 and _can_return():
        raise NotTaken("could become root again")


def _can_return() -> bool:
    try:
        os.setuid(0)
    except PermissionError:
        return False
    return True


def _forgive_the_oom_killer() -> None:
    """Undo a protection of the daemon's against the OOM killer; a job has no right to it."""
    fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    try:
        if int(os.read(fd, 16)) < 0:
            os.pwrite(fd, b"0", 0)
    finally:
        os.close(fd)
