"""Becoming the user who asked, for good, and making sure of it."""

import os

from gpulease.process.linux import drop_capabilities, forbid_tracing, leave_session_keyring
from gpulease.process.orders import IdentityOrder


class NotTaken(Exception):
    """The kernel said yes, and yet this process is still someone else."""


def take(identity: IdentityOrder) -> None:
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


def _verify(identity: IdentityOrder) -> None:
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
