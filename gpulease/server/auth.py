"""Who calls, as the kernel says, and which routes and jobs that user may access."""

import ctypes
import grp
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from errno import ERANGE
from typing import Any

from gpulease.domain.job import Job, Owner
from gpulease.errors import NotAllowed
from gpulease.peer_credentials import peer_credentials, user_name

_SO_PEERGROUPS = 59
"""Of asm-generic/socket.h; Python does not name it."""
_GID_BYTES = 4
_MOST_GROUPS = 65536
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that opened the connection, with its ids at that moment."""

    pid: int
    """0 if the daemon cannot see the process, as in another pid namespace."""
    uid: int
    gid: int
    groups: tuple[int, ...] | None = None
    """Supplementary groups; None where the kernel does not say."""

    @property
    def user(self) -> str:
        """The name of the user, or the uid if it has no name."""
        return user_name(self.uid)

    @property
    def owner(self) -> Owner:
        """The user as the owner of jobs."""
        return Owner(self.uid, self.gid, self.user)


def caller_of(connection: socket.socket) -> Caller:
    """Return the process at the other end of a connected Unix socket."""
    peer = peer_credentials(connection)
    return Caller(peer.pid, peer.uid, peer.gid, _groups_of(connection))


def _groups_of(connection: socket.socket) -> tuple[int, ...] | None:
    """Return the supplementary groups at the other end; None on kernels before 4.13."""
    # Through libc: Python's getsockopt() returns at most 1024 bytes, which is 256 groups.
    capacity = 64
    while capacity <= _MOST_GROUPS:
        groups = (ctypes.c_uint32 * capacity)()
        size = ctypes.c_uint32(ctypes.sizeof(groups))
        option = (connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS)
        if _libc.getsockopt(*option, groups, ctypes.byref(size)) == 0:
            return tuple(groups[: size.value // _GID_BYTES])
        if ctypes.get_errno() != ERANGE:
            return None
        # The kernel has set the size that it needs.
        capacity = max(2 * capacity, size.value // _GID_BYTES)
    return None


def caller_in(scope: Mapping[str, Any]) -> Caller:
    """Return the caller of a request, which the HTTP server has put into the ASGI scope."""
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


class Access(Enum):
    """Who may use a route."""

    ANYONE = auto()
    """Every local user."""
    SUBMITTER = auto()
    """Users whose jobs the daemon can run: everyone if it runs as root, else its own user."""
    MANAGER = auto()
    """The owner of the job, and admins."""
    OWNER = auto()
    """The owner of the job, and root: output and environment may hold secrets."""
    ADMIN = auto()
    """Admins."""
    ROOT = auto()
    """Root, and the user of the daemon."""
    EACH = auto()
    """The owner of each job that the body names, and admins; the handler checks that."""

    @property
    def concerns_job(self) -> bool:
        """Whether it depends on the job in the path of the route."""
        return self in (Access.MANAGER, Access.OWNER)


@dataclass(frozen=True, slots=True)
class Rights:
    """Decides what a caller may do on this machine."""

    daemon_uid: int
    admins: str | None = None
    """The name of a group; the daemon of one user has none."""
    hide_commands: bool = False
    """Whether only managers see what a job runs."""

    def is_root(self, caller: Caller) -> bool:
        """Tell whether `caller` is root or the user of the daemon, who could do all by hand."""
        return caller.uid in (0, self.daemon_uid)

    def is_admin(self, caller: Caller) -> bool:
        """Tell whether `caller` may manage the jobs of all users."""
        return self.is_root(caller) or self._admins_gid() in (caller.gid, *(caller.groups or ()))

    def owns(self, caller: Caller, job: Job) -> bool:
        """Tell whether `caller` may see all of `job`."""
        return caller.uid == job.owner.uid or self.is_root(caller)

    def manages(self, caller: Caller, job: Job) -> bool:
        """Tell whether `caller` may change `job`."""
        return caller.uid == job.owner.uid or self.is_admin(caller)

    def redacts_for(self, caller: Caller) -> bool:
        """Tell whether `caller` does not see what other users run."""
        return self.hide_commands and not self.is_admin(caller)

    def check(self, access: Access, caller: Caller, verb: str, job: Job | None = None) -> None:
        """Check that `caller` has the access that a route needs, to `job` if it concerns one.

        Raises:
            NotAllowed: the caller does not.
        """
        match access:
            case Access.ANYONE | Access.EACH:
                return
            case Access.SUBMITTER:
                # Only a daemon of root can run jobs as another user.
                if self.daemon_uid not in (0, caller.uid):
                    raise NotAllowed(
                        "cannot submit: this daemon belongs to another user and runs only their "
                        "jobs",
                        "unset GPULEASE_SOCKET to use the system's daemon or your own",
                    )
            case Access.MANAGER | Access.OWNER:
                assert job is not None, "the router finds the job"
                self._check_job(access, caller, verb, job)
            case Access.ADMIN:
                self._check_admin(caller, verb)
            case Access.ROOT:
                if not self.is_root(caller):
                    raise NotAllowed(f"cannot {verb}: only root may")

    def _check_job(self, access: Access, caller: Caller, verb: str, job: Job) -> None:
        is_owner = access is Access.OWNER
        if self.owns(caller, job) if is_owner else self.manages(caller, job):
            return
        allowed = "its owner and root" if is_owner else "its owner, the machine's admins and root"
        raise NotAllowed(
            f"cannot {verb} job {job.label}: it belongs to {job.owner.user}", f"only {allowed} may"
        )

    def _check_admin(self, caller: Caller, verb: str) -> None:
        if self.is_admin(caller):
            return
        others = f"members of the group {self.admins}" if self.admins else "the daemon's user"
        raise NotAllowed(
            f"cannot {verb}: only admins of this machine may", f"admins are root and {others}"
        )

    def _admins_gid(self) -> int | None:
        # Looked up each time: the group may be created while the daemon runs.
        try:
            return grp.getgrnam(self.admins).gr_gid if self.admins else None
        except KeyError:
            return None
