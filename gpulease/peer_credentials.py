"""The process at the other end of a Unix socket, as the kernel names it (SO_PEERCRED, unix(7)).

Standard library only: the shim imports this.
"""

import socket
import struct
from typing import NamedTuple

_UCRED = struct.Struct("iII")


class PeerCredentials(NamedTuple):
    """The ids of a process when it called connect(2), or listen(2) at the listening end."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Return the credentials of the peer of a connected Unix socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return PeerCredentials(*_UCRED.unpack(packed))
