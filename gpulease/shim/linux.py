"""Linux system calls that the standard library does not offer. Knows nothing of jobs."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", _libc.fallocate)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_CAPABILITY_VERSION_3 = 0x20080522
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}.get(
    os.uname().machine
)
"""The number of keyctl(2), which the C library does not wrap."""
_KEYCTL_JOIN_SESSION_KEYRING = 1
_KEYCTL_LINK = 8
_KEY_SPEC_SESSION_KEYRING = -3
_KEY_SPEC_USER_KEYRING = -4
_CLONE_NEWNS = 0x00020000
_ARG_START = 45
"""Index of `arg_start` (field 48 of proc_pid_stat(5)) in the fields after the command's name."""


def die_with_parent(number: int) -> None:
    """Let the kernel send this process the signal when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def outlive_parent() -> None:
    """Revoke `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_tracing() -> None:
    """Forbid all users but root to trace or dump this process, or to see its descriptors."""
    _prctl(_PR_SET_DUMPABLE, 0)


def set_name(name: str) -> None:
    """Set what `top` and /proc/PID/comm show; the kernel keeps 15 bytes."""
    _check(_libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0))


def drop_capabilities() -> None:
    """Clear the permitted, effective and inheritable sets."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def enter_mount_namespace(pid: int) -> None:
    """Enter the mount namespace of process `pid`, at its root; see setns(2).

    This works in a process with one thread only.
    """
    fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, _CLONE_NEWNS))
    finally:
        os.close(fd)


def leave_session_keyring() -> None:
    """Join a new session keyring that contains the user's, as a login does.

    Do nothing if the system has no keyrings or forbids their use, as in a container.
    """
    if _KEYCTL is None or _keyctl(_KEYCTL, _KEYCTL_JOIN_SESSION_KEYRING, 0, 0) < 0:
        return
    _keyctl(_KEYCTL, _KEYCTL_LINK, _KEY_SPEC_USER_KEYRING, _KEY_SPEC_SESSION_KEYRING)


def _keyctl(number: int, operation: int, first: int, second: int) -> int:
    arguments = (number, operation, first, second)
    return int(_libc.syscall(*(ctypes.c_long(argument) for argument in arguments)))


def reset_oom_score() -> None:
    """Remove a protection against the OOM killer, which later children would inherit."""
    fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    try:
        if int(os.read(fd, 16)) < 0:
            os.pwrite(fd, b"0", 0)
    finally:
        os.close(fd)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free this part of a file; afterwards it reads as zeros."""
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    _check(_fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)))


def argument_area() -> tuple[int, int] | None:
    """Return start and size of the memory behind /proc/PID/cmdline, or None if that is unknown."""
    fd = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fields = os.read(fd, 4096).rpartition(b")")[2].split()
    finally:
        os.close(fd)
    start, end = (int(field) for field in fields[_ARG_START : _ARG_START + 2])
    return (start, end - start) if 0 < start < end else None


def set_title(area: tuple[int, int] | None, title: str) -> None:
    """Overwrite the command line that `ps` shows.

    If the last byte is not NUL, the kernel ends the text at the first NUL, without trailing blanks.
    """
    if area is None or area[1] < len("gpulease-shim"):
        return
    start, size = area
    text = title.encode()[: size - 2].ljust(size - 1, b"\0") + b"\n"
    ctypes.memmove(start, text, size)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, *(ctypes.c_ulong(number) for number in (value, 0, 0, 0))))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
