"""Whether the kernel enforces device rules on a cgroup: systemd takes them where it cannot.

With cgroups of version 2 they are programs (CONFIG_CGROUP_BPF), of which the kernel is asked here,
see bpf(2), BPF_PROG_QUERY; with version 1 they are a file.
"""

import ctypes
import errno
import os
import platform
from functools import cache
from pathlib import Path

_SYSCALL = {"x86_64": 321, "aarch64": 280, "ppc64le": 361, "riscv64": 280, "s390x": 351}
_PROG_QUERY = 16
_CGROUP_DEVICE = 6
_ALL = "a *:* rwm"


class _Query(ctypes.Structure):
    """The part of union bpf_attr that BPF_PROG_QUERY reads and writes."""

    _fields_ = (
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("query_flags", ctypes.c_uint32),
        ("attach_flags", ctypes.c_uint32),
        ("prog_ids", ctypes.c_uint64),
        ("prog_cnt", ctypes.c_uint32),
        ("padding", ctypes.c_uint32 * 9),
    )


@cache
def kernel_has_them(cgroup: Path) -> bool | None:
    """Tell whether this kernel can enforce rules on any cgroup of version 2; None: no telling."""
    count = _programs(cgroup)
    return None if count is None else count >= 0


def are_in_force(cgroup: Path) -> bool | None:
    """Tell whether rules are enforced on exactly this cgroup; None: no telling."""
    listed = cgroup / "devices.list"
    try:
        if listed.exists():
            return _ALL not in listed.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    count = _programs(cgroup)
    return None if count is None else count > 0


def _programs(cgroup: Path) -> int | None:
    """Return how many programs decide on devices there, -1 if there can be none; None: unknown."""
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return None
    try:
        fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    query = _Query(target_fd=fd, attach_type=_CGROUP_DEVICE)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.syscall(number, _PROG_QUERY, ctypes.byref(query), ctypes.sizeof(query))
    finally:
        os.close(fd)
    if failed:
        return -1 if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS) else None
    return int(query.prog_cnt)
