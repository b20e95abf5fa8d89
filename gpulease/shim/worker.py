"""The steps of a launch that concern the worker: become the user, fork, and exec the command.

The shim gets a `Worker`: the pid, its ends of the pipes, and a pipe that carries why the start
failed, or closes when the command runs. The command is looked up as a shell does it. Each failure
names its step and says what went wrong.
"""

from __future__ import annotations

import os
import resource
from errno import E2BIG, EACCES, ENOENT, ENOEXEC, ENOTDIR

from gpulease.light_json import encode
from gpulease.record import record
from gpulease.shim.launch_request import (
    IdentitySpec,
    ShimSpec,
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
from gpulease.shim.terminal import PseudoTerminal, open_terminal, take_foreground

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping
    from typing import NoReturn
else:
    # Plain numbers, as in all modules of the shim: with `signal` and `socket`, which make
    # enumerations, a shim takes 3.13 MiB of memory in place of 2.86, as long as its job runs.
    import _signal as signal


class StepFailed(Exception):
    """A step of the launch failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class step:  # noqa: N801 - a context manager, without the imports and calls of contextlib
    """Turn an OSError into StepFailed, with the sentence, a colon and the system's message."""

    def __init__(self, name: str, sentence: str, hint: str | None = None) -> None:
        self._name = name
        self._sentence = sentence
        self._hint = hint

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            why = os.strerror(error.errno) if error.errno else str(error)
            sentence = f"{self._sentence}: {why}"
            raise StepFailed(Failure(self._name, error.errno, sentence, self._hint)) from error


def shown(text: bytes, length: int = 400) -> str:
    """Return `text` for a message: bytes that are not UTF-8 are escaped, and it is cut."""
    known = text.decode("utf-8", "backslashreplace")
    return known if len(known) <= length else f"{known[:length]}..."


_SHELL = b"/bin/sh"


def become_command(argv: tuple[bytes, ...], environment: Mapping[bytes, bytes]) -> NoReturn:
    """Replace this process by the command, looked up on the PATH of `environment`.

    /bin/sh runs an executable file of unknown format, as with execvp(3).

    Raises:
        StepFailed: the command does not exist or cannot be executed.
    """
    denied: OSError | None = None
    for path in _candidates(argv[0], environment):
        try:
            _become(path, argv, environment)
        except OSError as error:
            if error.errno not in (ENOENT, ENOTDIR, EACCES) or os.access(path, os.F_OK):
                denied = denied or error
            if error.errno not in (ENOENT, ENOTDIR, EACCES):
                break
    failed = _not_found(argv[0], environment) if denied is None else _denied(argv[0], denied)
    raise StepFailed(failed)


def _candidates(name: bytes, environment: Mapping[bytes, bytes]) -> list[bytes]:
    if b"/" in name or not name:
        return [name]
    path = environment.get(b"PATH", os.fsencode(os.defpath))
    return [(directory or b".") + b"/" + name for directory in path.split(b":")]


def _become(path: bytes, argv: tuple[bytes, ...], environment: Mapping[bytes, bytes]) -> None:
    try:
        os.execve(path, argv, environment)  # noqa: S606 - the purpose of this process
    except OSError as error:
        if error.errno != ENOEXEC:
            error.filename = path
            raise
    os.execve(_SHELL, [_SHELL, path, *argv[1:]], environment)  # noqa: S606 - likewise


def _not_found(name: bytes, environment: Mapping[bytes, bytes]) -> Failure:
    if b"/" in name:
        why = "no such file"
        hint = None if name.startswith(b"/") else "the path is relative to the job's directory"
    elif b"PATH" in environment:
        why = "no such command on PATH"
        hint = (
            f"give its path, or add its directory to PATH, which is {shown(environment[b'PATH'])}"
        )
    else:
        why, hint = "no such command", "PATH is not set; give the path of the command"
    return Failure(EXEC, ENOENT, f"cannot run {shown(name)}: {why}", hint)


def _denied(name: bytes, error: OSError) -> Failure:
    number, why, hint = error.errno or EACCES, error.strerror or str(error), None
    path = bytes(error.filename)
    if number in (ENOENT, ENOTDIR):
        # The file exists, so the exit code is that of "not executable", 126 and not 127.
        number, why = EACCES, "its interpreter does not exist"
        hint = "check the first line of the file"
    elif number == EACCES and _is_directory(path):
        why = "it is a directory"
    elif number == EACCES:
        why, hint = "it is not executable", f"chmod +x {shown(path)}, or name its interpreter first"
    elif number == E2BIG:
        why = "its arguments and environment are longer than the system allows"
        hint = "pass long lists in a file"
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
"""Signals that the spawner and shims ignore. A shim ends after its worker, and the spawner with the
daemon. What a shutdown sends to all processes ends the worker. All other signals have their
defaults, so a worker resets only these."""
_NULL = "/dev/null"
_CWD_HINT = "submit the job from a directory that exists and that you may enter"
_TERMINAL_HINT = "to run without a terminal, pipe the output, as in `gpulease run ... | cat`"


@record(frozen=True)
class Worker:
    """A forked worker, and the shim's ends of its descriptors, which do not block."""

    pid: int
    failure: int
    """Has a `Failure` as JSON if the start failed, and otherwise closes without data."""
    stdin: int | None
    stdout: int
    stderr: int | None
    """None: standard error is the terminal."""
    terminal: PseudoTerminal | None
    """The terminal that it runs on. Then `stdin` and `stdout` are descriptors of its master."""


@record(frozen=True)
class _Ends:
    """The worker's ends."""

    stdin: int
    stdout: int
    stderr: int
    failure: int


def start_worker(request: int, spec: ShimSpec) -> Worker:
    """Fork the worker of the request that is open as `request`.

    Call this as the user. A pipe or terminal belongs to the user that creates it, and the worker
    may want to open /dev/stdout or /dev/tty.

    Raises:
        OSError: the system has no pipe or process left.
        StepFailed: the terminal could not be opened.
    """
    failure, theirs = os.pipe()
    terminal: PseudoTerminal | None = None
    if spec.terminal is None:
        ours, ends = _pipes(spec.stdin, theirs)
    else:
        with step("terminal", "cannot open a terminal for the job", _TERMINAL_HINT):
            terminal = open_terminal(spec.terminal)
            terminal.control()
        ours, ends = _terminal_ends(terminal, spec.terminal.stderr, theirs)
    pid = _fork(read_worker_spec(request), ends, terminal is not None)
    for end in set(vars(ends).values()) - ({terminal.slave} if terminal else set()):
        os.close(end)
    for fd in (failure, *ours):
        if fd is not None:
            os.set_blocking(fd, False)
    return Worker(pid, failure, *ours, terminal)


_Ours = tuple[int | None, int, int | None]


def _pipes(wants_stdin: bool, failure: int) -> tuple[_Ours, _Ends]:
    stdout, stdout_end = os.pipe()
    stderr, stderr_end = os.pipe()
    stdin: int | None = None
    if wants_stdin:
        stdin_end, stdin = os.pipe()
    else:
        stdin_end = os.open(_NULL, os.O_RDONLY | os.O_CLOEXEC)
    return (stdin, stdout, stderr), _Ends(stdin_end, stdout_end, stderr_end, failure)


def _terminal_ends(terminal: PseudoTerminal, for_stderr: bool, failure: int) -> tuple[_Ours, _Ends]:
    slave, stderr = terminal.slave, None
    stderr_end = slave
    if not for_stderr:
        stderr, stderr_end = os.pipe()
    # Two descriptors, so that each direction is watched and closed separately.
    ours = (os.dup(terminal.master), terminal.master, stderr)
    return ours, _Ends(slave, slave, stderr_end, failure)


def _fork(spec: WorkerSpec, ends: _Ends, on_terminal: bool) -> int:
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_worker(spec, ends, shim, on_terminal)
    # The worker does this too. Whichever is first, a signal finds the group.
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass  # it runs its command, or has ended
    return pid


def _be_worker(spec: WorkerSpec, ends: _Ends, shim: int, on_terminal: bool) -> NoReturn:
    """Become the command. Whatever this touches the kernel copies, so that it is short."""
    try:
        # A group in the shim's session, as in that of a shell, which the kernel lets stop. If all
        # parents were in other sessions, the group would be orphaned, and Ctrl-Z without effect.
        os.setpgid(0, 0)
        if on_terminal:
            take_foreground(ends.stdin)
        _reset_signals(shim)
        # All other descriptors close when the command runs; Python makes them so (PEP 446).
        for target, end in enumerate((ends.stdin, ends.stdout, ends.stderr)):
            os.dup2(end, target)
        _set_attributes(spec)
        become_command(spec.argv, spec.environment)
    except StepFailed as failed:
        os.write(ends.failure, encode(vars(failed.failure)))
    except BaseException as error:  # noqa: BLE001 - the shim must learn of every error
        failure = Failure("worker", None, f"cannot start the job: {error!r}")
        os.write(ends.failure, encode(vars(failure)))
    finally:
        os._exit(127)


def _reset_signals(shim: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(127)
    signal.set_wakeup_fd(-1)
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)


def _set_attributes(spec: WorkerSpec) -> None:
    try:
        os.chdir(spec.cwd)
    except OSError as error:
        with step("cwd", f"cannot start in {shown(spec.cwd)}", _CWD_HINT):
            raise error
    os.umask(spec.umask)
    with step("limits", "cannot set the limits of the job"):
        try:
            os.setpriority(os.PRIO_PROCESS, 0, spec.nice)
        except PermissionError:
            pass  # the user may not have this value, and keeps that of the daemon
        _set_limits(spec.soft_limits)


def _set_limits(soft_limits: Mapping[str, int]) -> None:
    """Set soft limits, named as in getrlimit(2), at most to the hard limits."""
    for name, soft in soft_limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper().removeprefix('RLIMIT_')}", None)
        if number is None:
            continue
        present, hard = resource.getrlimit(number)
        bounded = hard if soft < 0 else soft if hard < 0 else min(soft, hard)
        if bounded != present:
            resource.setrlimit(number, (bounded, hard))


def become_user(identity: IdentitySpec) -> None:
    """Set the real, effective and saved uid and gid, and the groups.

    Afterwards only root may trace this process or see its descriptors, which were opened with more
    rights than the user has.

    Raises:
        StepFailed: this process still has rights of its former user.
    """
    sentence = f"cannot switch to user {identity.user}"
    with step("identity", sentence):
        if identity.groups is None:
            os.initgroups(identity.user, identity.gid)
        else:
            os.setgroups(identity.groups)
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
        # The daemon's keyring would be inherited by the jobs of all users, who could read its keys,
        # such as Kerberos tickets.
        leave_session_keyring()
        if identity.uid != 0:
            drop_capabilities()
        forbid_tracing()
        if (why := _rights_left(identity)) is not None:
            raise StepFailed(Failure("identity", None, f"{sentence}: {why}"))


def _rights_left(identity: IdentitySpec) -> str | None:
    """Return what this process still has of its former user, although every call succeeded."""
    if os.getresuid() != (identity.uid,) * 3 or os.getresgid() != (identity.gid,) * 3:
        return f"it still has uid {os.getresuid()} and gid {os.getresgid()}"
    if identity.groups is not None and set(os.getgroups()) != set(identity.groups):
        return f"it is still in the groups {os.getgroups()}"
    try:
        if identity.uid != 0:
            os.setuid(0)
            return "it could become root again"
    except PermissionError:
        pass
    return None
