"""The process at the other end of a Unix socket, as the kernel names it (SO_PEERCRED, unix(7)),
and the name of its user.

Standard library only: the shim imports this.
"""

from __future__ import annotations

import struct
from _socket import SO_PEERCRED, SOL_SOCKET

from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

_UCRED = struct.Struct("iII")


@record(frozen=True)
class PeerCredentials:
    """The ids of a process when it called connect(2), or listen(2) at the listening end."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Return the credentials of the peer of a connected Unix socket."""
    packed = connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _UCRED.size)
    return PeerCredentials(*_UCRED.unpack(packed))


def user_name(uid: int) -> str:
    """Return the name of a user, or the uid if it has no name."""
    import pwd  # everyday verbs that need no name start without it

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
