"""Linux system calls that the standard library does not offer. Knows nothing of jobs."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
# Looked up here: what a shim touches for the first time after its fork costs it a page.
_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_prctl_name = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_char_p, *[ctypes.c_ulong] * 3, use_errno=True
)(("prctl", _libc))
_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long,) * 4
_syscall.restype = ctypes.c_long
_capset = _libc.capset
_memmove = ctypes.memmove
_fallocate = getattr(_libc, "fallocate64", _libc.fallocate)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()
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
    _check(_prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def outlive_parent() -> None:
    """Revoke `die_with_parent`."""
    _check(_prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0))


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def forbid_tracing() -> None:
    """Forbid all users but root to trace or dump this process, or to see its descriptors."""
    _check(_prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def set_name(name: str) -> None:
    """Set what `top` and /proc/PID/comm show; the kernel keeps 15 bytes."""
    _check(_prctl_name(_PR_SET_NAME, name.encode(), 0, 0, 0))


def drop_capabilities() -> None:
    """Clear the permitted, effective and inheritable sets."""
    _check(_capset(_CAPABILITY_HEADER, _NO_CAPABILITIES))


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
    if _KEYCTL is None or _syscall(_KEYCTL, _KEYCTL_JOIN_SESSION_KEYRING, 0, 0) < 0:
        return
    _syscall(_KEYCTL, _KEYCTL_LINK, _KEY_SPEC_USER_KEYRING, _KEY_SPEC_SESSION_KEYRING)


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
    _memmove(start, text, size)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
